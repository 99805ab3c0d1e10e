import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO

SEED, TRAIN, VAL, SIZE = 0, 80, 10, (160, 120)
# COCO's ids and names, and ADE20K's label values: signboard, ball, other, food, food, clock.
COCO_NAMES = {
    13: 'stop sign',
    37: 'sports ball',
    38: 'kite',
    52: 'banana',
    60: 'donut',
    85: 'clock',
}
ADE_LABELS = {13: 44, 37: 120, 38: 0, 52: 121, 60: 121, 85: 149}
DONUT = 60


@pytest.fixture(scope='module')
def make_demo_data(tool) -> ModuleType:
    return tool('make_demo_data')


@pytest.fixture(scope='module')
def data(make_demo_data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('demo') / 'data'
    make_demo_data.make_demo_data(folder, SEED, TRAIN, VAL, SIZE)
    return folder


@pytest.fixture(scope='module')
def coco(data) -> COCO:
    return COCO(str(data / 'coco/annotations/train.json'))


def objects(coco: COCO) -> list[dict]:
    return [annotation for annotation in coco.anns.values() if not annotation['iscrowd']]


def read_files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob('*') if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def count_holes(mask: np.ndarray) -> int:
    """Background parts that do not reach the border."""
    padded = np.pad(mask, 1)
    return cv2.connectedComponents((padded == 0).astype(np.uint8), connectivity=4)[0] - 2


class TestScenes:
    def test_same_seed_same_bytes(self, make_demo_data, data, tmp_path):
        make_demo_data.make_demo_data(tmp_path / 'again', SEED, TRAIN, VAL, SIZE)
        assert read_files(tmp_path / 'again') == read_files(data)

    def test_another_seed_another_image(self, make_demo_data):
        first, second = (
            make_demo_data.draw_scene(make_demo_data.scene_rng(seed, 'train', 0), *SIZE).image
            for seed in (0, 1)
        )
        assert np.mean(first != second) > 0.5

    def test_not_trivial(self, coco):
        classes = Counter(annotation['category_id'] for annotation in objects(coco))
        assert set(classes) == set(COCO_NAMES)
        assert min(classes.values()) > 0.05 * len(objects(coco))
        assert len(objects(coco)) / TRAIN >= 3
        assert 1 <= sum(not coco.getAnnIds(image) for image in coco.getImgIds()) <= 0.2 * TRAIN

    def test_a_third_overlaps(self, coco):
        """Seen from the files: what one object hides of another ends where the first begins."""
        touching = 0
        for image in coco.getImgIds():
            grown = [
                cv2.dilate(coco.annToMask(annotation), np.ones((3, 3), np.uint8))
                for annotation in coco.loadAnns(coco.getAnnIds(image, iscrowd=False))
            ]
            shared = sum(grown, np.zeros(SIZE[::-1], np.uint8)) > 1
            touching += sum((mask[shared] > 0).sum() > 5 for mask in grown)
        assert touching / len(objects(coco)) >= 1 / 3

    def test_sizes_differ(self, coco):
        areas = [annotation['area'] for annotation in objects(coco)]
        assert np.quantile(areas, 0.9) > 4 * np.quantile(areas, 0.1)

    @pytest.mark.parametrize('size', [(64, 64), (65, 131), (320, 97)])
    def test_any_size(self, make_demo_data, size):
        for index in range(12):
            scene = make_demo_data.draw_scene(make_demo_data.scene_rng(3, 'val', index), *size)
            assert scene.image.shape == (size[1], size[0], 3)
            assert scene.labels.shape == scene.ids.shape == (size[1], size[0])


class TestCoco:
    def test_categories_are_cocos(self, coco):
        names = {category['id']: category['name'] for category in coco.cats.values()}
        assert names == COCO_NAMES

    @pytest.mark.parametrize(('split', 'count'), [('train', TRAIN), ('val', VAL)])
    def test_images_exist(self, data, split, count):
        content = json.loads((data / f'coco/annotations/{split}.json').read_text())
        assert len(content['images']) == count
        for image in content['images']:
            pixels = cv2.imread(str(data / 'coco' / split / image['file_name']))
            assert pixels.shape == (image['height'], image['width'], 3)
            assert (image['width'], image['height']) == SIZE

    def test_masks_areas_and_boxes_are_the_visible_pixels(self, make_demo_data, coco):
        """Zero tolerance: polygons and RLE decode to the very pixels that were drawn."""
        for index, image in enumerate(sorted(coco.getImgIds())):
            rng = make_demo_data.scene_rng(SEED, 'train', index)
            scene = make_demo_data.draw_scene(rng, *SIZE)
            annotations = coco.loadAnns(sorted(coco.getAnnIds(image)))
            assert len(annotations) == len(scene.instances)
            for i, annotation in enumerate(annotations, 1):
                drawn = scene.ids == i
                ys, xs = np.nonzero(drawn)
                box = [xs.min(), ys.min(), np.ptp(xs) + 1, np.ptp(ys) + 1]
                np.testing.assert_array_equal(coco.annToMask(annotation), drawn)
                assert annotation['area'] == drawn.sum()
                assert annotation['bbox'] == box
                assert annotation['category_id'] == scene.instances[i - 1].kind.id

    def test_donuts_have_holes(self, coco):
        masks = [coco.annToMask(a) for a in objects(coco) if a['category_id'] == DONUT]
        assert sum(count_holes(mask) == 1 for mask in masks) > len(masks) / 3

    def test_some_objects_are_split(self, coco):
        assert any(len(annotation['segmentation']) > 1 for annotation in objects(coco))

    def test_crowds_are_rle(self, coco):
        crowds = [annotation for annotation in coco.anns.values() if annotation['iscrowd']]
        assert crowds
        for crowd in crowds:
            height, width = crowd['segmentation']['size']
            assert (width, height) == SIZE
            assert sum(crowd['segmentation']['counts']) == width * height
            assert coco.annToMask(crowd).sum() == crowd['area']

    def test_ids_are_unique(self, data):
        ids = {'images': [], 'annotations': []}
        for split in ('train', 'val'):
            content = json.loads((data / f'coco/annotations/{split}.json').read_text())
            for kind, seen in ids.items():
                seen += [entry['id'] for entry in content[kind]]
        for seen in ids.values():
            assert len(seen) == len(set(seen))


class TestMasks:
    def test_polygon_of_a_ring(self, make_demo_data):
        """A 5x5 square with a 1x1 hole, by hand."""
        ring = np.zeros((8, 9), bool)
        ring[1:6, 2:7] = True
        ring[3, 4] = False
        polygons = make_demo_data.mask_to_polygons(ring)
        assert len(polygons) == 1
        assert (min(polygons[0][0::2]), max(polygons[0][0::2])) == (2.25, 6.75)
        decoded = mask_utils.decode(mask_utils.frPyObjects(polygons, 8, 9))[..., 0]
        np.testing.assert_array_equal(decoded, ring)
        assert (decoded[3, 4], decoded.sum()) == (0, 24)

    @pytest.mark.parametrize('density', [0.1, 0.5, 0.9])
    def test_noise_survives(self, make_demo_data, density):
        """Single pixels, diagonal contacts, many holes, parts inside holes, image borders."""
        rng = np.random.default_rng(0)
        for _ in range(100):
            height, width = (int(n) for n in rng.integers(2, 24, 2))
            mask = rng.random((height, width)) < density
            mask[0, 0] = True
            polygons = make_demo_data.mask_to_polygons(mask)
            parts = mask_utils.frPyObjects(polygons, height, width)
            np.testing.assert_array_equal(mask_utils.decode(mask_utils.merge(parts)), mask)
            rle = make_demo_data.mask_to_rle(mask)
            decoded = mask_utils.decode(mask_utils.frPyObjects(rle, height, width))
            np.testing.assert_array_equal(decoded, mask)

    def test_rle_of_columns(self, make_demo_data):
        mask = np.array([[1, 0, 1], [1, 1, 1]], bool)
        assert make_demo_data.mask_to_rle(mask) == {'counts': [0, 2, 1, 3], 'size': [2, 3]}


class TestAde20k:
    @pytest.mark.parametrize(
        ('split', 'coco_split', 'count'),
        [('training', 'train', TRAIN), ('validation', 'val', VAL)],
    )
    def test_layout(self, data, split, coco_split, count):
        values = Counter()
        labels = sorted((data / 'ade20k/annotations' / split).glob('*.png'))
        assert len(labels) == count
        for path in labels:
            label = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            assert (label.dtype, label.shape) == (np.uint8, SIZE[::-1])
            values.update(np.unique(label).tolist())
            image = data / 'ade20k/images' / split / f'{path.stem}.jpg'
            assert image.read_bytes() == (data / 'coco' / coco_split / image.name).read_bytes()
        assert set(values) <= set(range(151))
        assert {1, 2, 3, 10, 44, 120, 121, 149} <= set(values)  # wall, building, sky, grass, ...

    def test_objects_have_their_label(self, data, coco):
        for image in coco.getImgIds():
            path = data / 'ade20k/annotations/training' / f'{image:012d}.png'
            label = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            expected = {value: np.zeros(label.shape, bool) for value in ADE_LABELS.values()}
            for annotation in coco.loadAnns(coco.getAnnIds(image)):
                expected[ADE_LABELS[annotation['category_id']]] |= coco.annToMask(annotation) > 0
            for value, mask in expected.items():
                np.testing.assert_array_equal(label == value, mask)


class TestFiles:
    ARGUMENTS = ('--train', 2, '--val', 1, '--size', '64x64')

    def test_complete_data_is_kept_and_other_data_replaced(self, run_tool, tmp_path):
        for seed, said in ((1, 'complete'), (1, 'already drawn'), (2, 'complete')):
            result = run_tool(
                'make_demo_data', 'data', '--seed', seed, *self.ARGUMENTS, cwd=tmp_path
            )
            assert result.returncode == 0
            assert said in result.stdout.splitlines()[-1]
        assert json.loads((tmp_path / 'data/demo_data.json').read_text())['seed'] == 2
        assert [path.name for path in tmp_path.iterdir()] == ['data']

    def test_foreign_folder_is_refused(self, run_tool, tmp_path):
        (tmp_path / 'data').mkdir()
        (tmp_path / 'data/thesis.tex').write_text('mine')
        result = run_tool('make_demo_data', 'data', *self.ARGUMENTS, cwd=tmp_path)
        assert result.returncode != 0
        assert len(result.stdout.splitlines()) == 1
        assert str(tmp_path / 'data') in result.stdout
        assert read_files(tmp_path) == {'data/thesis.tex': b'mine'}

    def test_broken_off_write_is_made_anew(self, make_demo_data, tmp_path, monkeypatch):
        arguments = dict(seed=0, train=3, val=1, size=(64, 64))
        make_demo_data.make_demo_data(tmp_path / 'whole', **arguments)

        save = make_demo_data.save

        def interrupted_save(path, *args):
            if path.parent.name == 'val':
                raise KeyboardInterrupt
            save(path, *args)

        monkeypatch.setattr(make_demo_data, 'save', interrupted_save)
        with pytest.raises(KeyboardInterrupt):
            make_demo_data.make_demo_data(tmp_path / 'data', **arguments)
        monkeypatch.undo()
        assert not (tmp_path / 'data').exists()
        make_demo_data.make_demo_data(tmp_path / 'data', **arguments)
        assert read_files(tmp_path / 'data') == read_files(tmp_path / 'whole')
        assert sorted(path.name for path in tmp_path.iterdir()) == ['data', 'whole']

    @pytest.mark.parametrize(
        'arguments',
        [('--size', '256'), ('--size', '32x32'), ('--train', '0'), ('--seed', '-1')],
    )
    def test_bad_arguments(self, run_tool, tmp_path, arguments):
        result = run_tool('make_demo_data', 'data', *arguments, cwd=tmp_path)
        assert result.returncode == 2
        assert arguments[1] in result.stdout.splitlines()[-1]
        assert not list(tmp_path.iterdir())
