"""The data pipelines of the shipped configs, run on drawn images with annotation."""

import json

import cv2
import numpy as np
import pytest
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, DefaultScope

SHORT_SIDES = set(range(480, 801, 32))
BACKGROUND, OBJECT = 40, 200  # grey values of the drawn images


@pytest.fixture(autouse=True)
def _seeded():
    np.random.seed(0)  # the transforms draw from numpy's global generator


@pytest.fixture
def coco_dataset(tmp_path):
    """Returns a function from a config to its training set, on a drawn 640x480 image.

    One object, a triangle that leaves most of its box to the background, and one crowd (RLE).
    """
    triangle = np.array([[100, 60], [330, 60], [100, 290]])
    image = np.full((480, 640, 3), BACKGROUND, np.uint8)
    cv2.fillPoly(image, [triangle], (OBJECT,) * 3)
    (tmp_path / 'train2017').mkdir()
    cv2.imwrite(str(tmp_path / 'train2017' / '1.png'), image)
    crowd = {'counts': [480 * 600, 480 * 40], 'size': [480, 640]}
    annotations = [
        dict(id=1, category_id=18, bbox=[100, 60, 230, 230], area=26450, iscrowd=0)
        | dict(segmentation=[triangle.flatten().tolist()]),
        dict(id=2, category_id=1, bbox=[600, 0, 40, 480], area=19200, iscrowd=1)
        | dict(segmentation=crowd),
    ]
    (tmp_path / 'annotations').mkdir()
    (tmp_path / 'annotations' / 'instances_train2017.json').write_text(
        json.dumps(
            dict(
                images=[dict(id=1, file_name='1.png', width=640, height=480)],
                annotations=[annotation | dict(image_id=1) for annotation in annotations],
                categories=[dict(id=1, name='person'), dict(id=18, name='dog')],
            )
        )
    )

    def build(cfg):
        with DefaultScope.overwrite_default_scope('mmdet'):
            return DATASETS.build(cfg.train_dataloader.dataset | dict(data_root=str(tmp_path)))

    return build


def test_single_scale_detection(coco_dataset, load_config):
    for name in ('mask_rcnn_mavit_t_coco', 'retinanet_mavit_t_coco'):
        packed = coco_dataset(load_config(name))[0]
        assert packed['inputs'].shape == (3, 800, 1067)  # 1333x800 at most, ratio kept
        sample = packed['data_samples']
        assert sample.gt_instances.labels.tolist() == [1]
        assert len(sample.ignored_instances) == 1
        box = sample.gt_instances.bboxes.tensor[0].tolist()
        left = 1067 - 330 * 800 / 480 if sample.flip else 100 * 800 / 480
        assert box == pytest.approx([left, 100, left + 230 * 800 / 480, 290 * 800 / 480], abs=1)
        assert hasattr(sample.gt_instances, 'masks') == name.startswith('mask_rcnn')


@pytest.mark.parametrize(
    'name', ['mask_rcnn_mavit_s_3x_coco', 'mask_rcnn_mavit_l_3x_coco', 'cascade_mavit_b_coco']
)
def test_multiscale_crop(coco_dataset, load_config, name):
    dataset = coco_dataset(load_config(name))
    seen = dict(whole=0, crop=0, flip=0)
    for _ in range(60):
        packed = dataset[0]
        height, width = packed['inputs'].shape[1:]
        assert min(height, width) in SHORT_SIDES or max(height, width) == 1333
        assert max(height, width) <= 1333
        sample = packed['data_samples']
        whole = height in SHORT_SIDES and width == pytest.approx(height * 640 / 480, abs=1)
        seen['whole' if whole else 'crop'] += 1
        seen['flip'] += sample.flip
        drawn = packed['inputs'][0].numpy() > (BACKGROUND + OBJECT) / 2
        if drawn.sum() > 20000:  # with less, the border's pixels weigh too much
            masks = sample.gt_instances.masks.masks
            assert masks.shape == (1, height, width)
            assert (drawn & (masks[0] == 1)).sum() / (drawn | (masks[0] == 1)).sum() > 0.95
            left, top, right, bottom = sample.gt_instances.bboxes.tensor[0].tolist()
            rows, columns = drawn.nonzero()
            # Cropping clips the box, it does not shrink it to what is left of the object.
            assert left <= columns.min() + 2
            assert columns.max() - 2 <= right <= width
            assert top <= rows.min() + 2
            assert rows.max() - 2 <= bottom <= height
    assert min(seen.values()) > 10


def test_crop_without_object_is_kept(coco_dataset, load_config):
    cfg = load_config('cascade_mavit_b_coco')
    choice = cfg.train_dataloader.dataset.pipeline[3]
    choice.transforms = [choice.transforms[1]]  # always crop
    choice.transforms[0][1].crop_size = (60, 60)  # far smaller than the image
    dataset = coco_dataset(cfg)
    counts = {len(dataset.prepare_data(0)['data_samples'].gt_instances) for _ in range(30)}
    assert counts == {0, 1}


@pytest.fixture
def ade20k_sample(tmp_path):
    """One 640x480 image whose left half is ADE20K's class 3 (floor), the rest unlabelled (0)."""
    image = np.full((480, 640, 3), BACKGROUND, np.uint8)
    labels = np.zeros((480, 640), np.uint8)
    labels[:, :320] = 4
    for kind, content in dict(images=image, annotations=labels).items():
        (tmp_path / kind / 'training').mkdir(parents=True)
        suffix = '.jpg' if kind == 'images' else '.png'
        cv2.imwrite(str(tmp_path / kind / 'training' / f'1{suffix}'), content)
    return tmp_path


@pytest.mark.parametrize('name', ['upernet_mavit_t_ade20k', 'semfpn_mavit_t_ade20k'])
def test_segmentation(ade20k_sample, load_config, name):
    cfg = load_config(name)
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(cfg.train_dataloader.dataset | dict(data_root=str(ade20k_sample)))
        validation = Compose(cfg.val_dataloader.dataset.pipeline)
        augmented = Compose(cfg.tta_pipeline)
    values = set()
    for _ in range(10):
        packed = dataset[0]
        height, width = packed['inputs'].shape[1:]
        labels = packed['data_samples'].gt_sem_seg.data
        assert labels.shape == (1, height, width)
        assert max(height, width) <= 512
        values |= set(labels.unique().tolist())
    assert values == {3, 255}

    whole = validation(dataset.get_data_info(0))
    assert whole['inputs'].shape == (3, 512, 683)  # 2048x512 at most, ratio kept
    assert whole['data_samples'].gt_sem_seg.data.shape == (1, 480, 640)
    assert set(whole['data_samples'].gt_sem_seg.data.unique().tolist()) == {3, 255}

    views = augmented(dataset.get_data_info(0))
    shapes = [tuple(view.shape[1:]) for view in views['inputs']]
    assert shapes == [
        (round(480 * ratio), round(640 * ratio))
        for ratio in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
        for _ in range(2)
    ]
    assert [sample.flip for sample in views['data_samples']] == [False, True] * 6
