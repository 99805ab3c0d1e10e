"""Broken and unusual segmentation data, one row each: what the check says of it.

To add a case, write a function that changes the folder of two whole pairs (images a.jpg and b.jpg
of 6x4 pixels, masks a.png and b.png with the values 0, 1 and 255) and a row in a table below.
"""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from mmseg.datasets import BaseSegDataset
from PIL import Image

from mala_mm.checks.findings import MAX_MESSAGE, Finding, Findings
from mala_mm.checks.segmentation_data import check_segmentation_dataset

PIXELS = np.full((4, 6, 3), 90, np.uint8)
LABELS = np.array([[0, 0, 0, 1, 1, 255]] * 4, np.uint8)
PIPELINE = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')]
CV2_MASKS = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', imdecode_backend='cv2')]
HEAD = ('num_classes', 'out_channels', 'ignore_index', 'loss_decode')
SIGMOID = dict(type='CrossEntropyLoss', use_sigmoid=True)
DATASET = dict(
    type='BaseSegDataset',
    metainfo=dict(classes=('road', 'sky')),
    data_prefix=dict(img_path='images', seg_map_path='masks'),
    pipeline=PIPELINE,
)
ADE = dict(type='ADE20KDataset', metainfo={}, reduce_zero_label=False, num_classes=150)


def save(path: Path, pixels: np.ndarray, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in 'ab':
        save(tmp_path / 'images' / f'{name}.jpg', PIXELS)
        save(tmp_path / 'masks' / f'{name}.png', LABELS)
    return tmp_path


def filled(value: int) -> np.ndarray:
    return np.full((4, 6), value, np.uint8)


def mask(pixels: np.ndarray):
    return lambda folder: save(folder / 'masks' / 'b.png', pixels)


def image(pixels: np.ndarray, **options: object):
    return lambda folder: save(folder / 'images' / 'b.jpg', pixels, **options)


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name: str):
    def cut_off(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-30])

    return cut_off


def pair(image_size: tuple[int, int], mask_size: tuple[int, int]):
    def save_pair(folder: Path) -> None:
        save(folder / 'images' / 'b.jpg', np.zeros((*image_size, 3), np.uint8))
        save(folder / 'masks' / 'b.png', np.zeros(mask_size, np.uint8))

    return save_pair


def palette_mask(folder: Path) -> None:
    """Its colours are far above the class numbers that they stand for."""
    picture = Image.fromarray(LABELS).convert('L')
    picture.putpalette([200, 100, 50] * 256)
    picture.save(folder / 'masks' / 'b.png')
    assert Image.open(folder / 'masks' / 'b.png').mode == 'P'


def four_bit_mask(folder: Path) -> None:
    """A grey PNG of 4 bits with the values 0 and 1, which Pillow cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', checksum)

    header = chunk(b'IHDR', struct.pack('>IIBBBBB', 6, 4, 4, 0, 0, 0, 0))
    rows = chunk(b'IDAT', zlib.compress(bytes([0, 0x01, 0x01, 0x01]) * 4))
    content = b'\x89PNG\r\n\x1a\n' + header + rows + chunk(b'IEND', b'')
    (folder / 'masks' / 'b.png').write_bytes(content)


def oriented_image(folder: Path) -> None:
    """Stored as 6x4, shown as 4x6."""
    exif = Image.Exif()
    exif[0x0112] = 6
    save(folder / 'images' / 'b.jpg', PIXELS, exif=exif)


def fractional_mask(folder: Path) -> None:
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(folder / 'masks' / 'b.png', 'TIFF')


def nested(folder: Path) -> None:
    for kind, ending in (('images', 'jpg'), ('masks', 'png')):
        (folder / kind / 'city').mkdir()
        (folder / kind / f'b.{ending}').rename(folder / kind / 'city' / f'b.{ending}')


def listed(*lines: str):
    return lambda folder: (folder / 'list.txt').write_text('\n'.join(lines))


def rename_all(folder: Path) -> None:
    for path in (folder / 'images').iterdir():
        path.rename(path.with_suffix('.jpeg'))


def capital_suffix(folder: Path) -> None:
    for name in 'abc':
        save(folder / 'masks' / f'{name}_labelTrainIds.png', LABELS)
    remove('masks/a.png', 'masks/b.png')(folder)


def unchanged(folder: Path) -> None:
    pass


ERRORS = [
    # (what is broken, settings, message, place)
    (remove('masks/b.png'), {}, 'without a mask in .*masks.*seg_map_suffix=.png', r'b\.jpg: no'),
    (unchanged, dict(seg_map_suffix='_x.png'), 'without a mask .*seg_map_suffix=_x.png', 'a_x.png'),
    (rename_all, {}, r'no image in .* ends in img_suffix=\.jpg', r'there: a\.jpeg, b\.jpeg'),
    (
        unchanged,
        dict(data_prefix=dict(img_path='none', seg_map_path='masks')),
        'none does not exist',
        '',
    ),
    (
        unchanged,
        dict(data_prefix=dict(img_path='images', seg_map_path='none')),
        'none does not exist',
        '',
    ),
    (unchanged, dict(data_prefix={}), 'has no data_prefix.img_path', ''),
    (unchanged, dict(ann_file='list.txt'), r'ann_file .*list\.txt does not exist', ''),
    (listed('a', 'c'), dict(ann_file='list.txt'), 'images of the list', r'c\.jpg'),
    (listed('a.jpg'), dict(ann_file='list.txt'), 'names without the ending', r'a\.jpg\.jpg'),
    (write('images/b.jpg', b''), {}, 'images that cannot be used', r'b\.jpg is empty'),
    (write('images/b.jpg', b'text'), {}, 'images that cannot be used', r'b\.jpg cannot be decoded'),
    (cut('images/b.jpg'), {}, 'images that cannot be used', r'b\.jpg is cut off'),
    (write('masks/b.png', b''), {}, 'masks that cannot be used', r'b\.png is empty'),
    (write('masks/b.png', b'text'), {}, 'masks that cannot be used', r'b\.png cannot be decoded'),
    (cut('masks/b.png'), {}, 'masks that cannot be used', r'b\.png is cut off or damaged'),
    (mask(PIXELS), {}, 'several channels', r'b\.png: 3 channels'),
    (mask(np.zeros((4, 6, 4), np.uint8)), {}, 'several channels', '4 channels'),
    (palette_mask, dict(pipeline=CV2_MASKS), "imdecode_backend='pillow'", '3 channels'),
    (mask(LABELS[:, :5]), {}, 'another .* than their image', r'mask \(5, 4\), image \(6, 4\)'),
    (pair((4, 6), (6, 4)), {}, 'another .* than their image', r'mask \(4, 6\), image \(6, 4\)'),
    (oriented_image, {}, 'orientation tag', r'mask \(6, 4\), image \(4, 6\)'),
    (pair((1, 6), (1, 6)), {}, 'one row or one column', '6x1'),
    (pair((1, 1), (1, 1)), {}, 'one row or one column', '1x1'),
    (fractional_mask, {}, 'fractional numbers', 'float32'),
    (four_bit_mask, {}, 'grey masks of 2 or 4 bits', '4 bits, read as 0, 17'),
    (mask(LABELS.astype(np.uint16) * 300), {}, 'lowest 8 bits', '16 bits, values 300, 10964'),
    (mask(filled(2)), {}, r'outside the classes of decode_head: .*0\.\.1', 'values 2 are'),
    (mask(filled(254)), {}, 'reduce_zero_label=False', 'values 254 are labels 254'),
    (
        mask(filled(3)),
        dict(reduce_zero_label=True),
        'reduce_zero_label=True, expected labels 0..1',
        'values 3 are labels 2',
    ),
    (
        mask(filled(151)),
        dict(ADE, reduce_zero_label=True),
        r'expected labels 0\.\.149',
        'values 151 are labels 150',
    ),
    (unchanged, dict(num_classes=1), r'model\.decode_head\.num_classes=1, but the 2 classes', ''),
    (
        unchanged,
        dict(ADE, num_classes=2),
        r'num_classes=2, but the 150 classes of ADE20KDataset are wall, b',
        '',
    ),
    (
        unchanged,
        dict(ADE, metainfo=dict(classes=('Wall',))),
        "names that ADE20KDataset does not have, such as 'Wall', did you mean wall",
        '',
    ),
    (unchanged, dict(metainfo=dict(classes='road')), r"'road' is a text.*\('road',\)", ''),
    (unchanged, dict(metainfo=dict(CLASSES=('a',))), 'CLASSES is not read', ''),
    (unchanged, dict(metainfo=dict(classes=(1, 2))), 'expected a tuple of names', ''),
    (unchanged, dict(img_sufix='.png'), "cannot be set up.*'img_sufix'", ''),
    (unchanged, dict(ignore_index=0), r'expected labels 0\.\.1 and 0', 'values 255 are'),
]

WARNINGS = [
    (remove('images/b.jpg'), {}, 'masks without an image', r'b\.png'),
    (
        capital_suffix,
        dict(seg_map_suffix='_labelTrainIds.png'),
        'masks without an image',
        r'c_labelTrainIds\.png',
    ),
    (
        lambda folder: save(folder / 'images' / 'c.JPG', PIXELS, format='JPEG'),
        {},
        'not used',
        'c.J',
    ),
    (mask(filled(255)), {}, 'ignored pixels only', r'b\.png'),
    (mask(filled(0)), dict(reduce_zero_label=True), 'ignored pixels only', r'b\.png'),
    (unchanged, dict(num_classes=3), r'model\.decode_head\.num_classes=3, but the 2 classes', ''),
]

ACCEPTED = [
    (unchanged, {}),
    (nested, {}),
    (listed('a', 'b'), dict(ann_file='list.txt')),
    (listed('a'), dict(ann_file='list.txt')),
    (palette_mask, {}),
    (mask(LABELS.astype(np.uint16)), {}),  # 16 bits, small values
    (mask(LABELS == 1), {}),  # one bit
    (mask(np.array([[1, 2, 1, 2, 0, 255]] * 4, np.uint8)), dict(reduce_zero_label=True)),
    (image(PIXELS[:, :, 0]), {}),  # grey
    (pair((3000, 20), (3000, 20)), {}),
    (pair((1, 6), (4, 6)), dict(pipeline=[])),  # nothing is loaded
    (unchanged, dict(data_prefix=dict(img_path='images'))),  # no masks
    (unchanged, dict(num_classes=2, out_channels=1)),
    (unchanged, dict(num_classes=1, loss_decode=[SIGMOID])),
    (unchanged, dict(metainfo=dict(classes=('route', 'ciel été')))),
    (remove('images/b.jpg', 'masks/b.png'), {}),  # one image
    (
        mask(filled(4)),
        dict(ADE, metainfo=dict(classes=('wall', 'floor')), num_classes=2, reduce_zero_label=True),
    ),
]


def check(folder: Path, **settings: object) -> Findings:
    """Settings are those of the head and of the data set."""
    head = {name: settings.pop(name) for name in HEAD if name in settings}
    dataset = {**DATASET, 'data_root': str(folder), **settings}
    return check_segmentation_dataset(dataset, dict(decode_head={'num_classes': 2, **head}))


def assert_found(found: list[Finding], message: str, place: str) -> None:
    (finding,) = [f for f in found if re.search(message, f.message)]
    assert len(finding.message) < MAX_MESSAGE - 1  # the whole of it
    assert re.search(place, '\n'.join(finding.places)), finding.places


@pytest.mark.parametrize(('break_it', 'settings', 'message', 'place'), ERRORS)
def test_error(folder, break_it, settings, message, place):
    break_it(folder)
    assert_found(check(folder, **settings).errors, message, place)


@pytest.mark.parametrize(('break_it', 'settings', 'message', 'place'), WARNINGS)
def test_warning(folder, break_it, settings, message, place):
    break_it(folder)
    findings = check(folder, **settings)
    assert not findings.errors
    assert_found(findings.warnings, message, place)


@pytest.mark.parametrize(('change', 'settings'), ACCEPTED)
def test_accepted(folder, change, settings):
    change(folder)
    assert str(check(folder, **settings)) == ''


class OwnDataset(BaseSegDataset):
    METAINFO = dict(classes=('road', 'sky'), palette=[[0, 0, 0], [9, 9, 9]])

    def __init__(self, root: str, pipeline: list) -> None:
        self.root = Path(root)
        super().__init__(pipeline=pipeline)

    def load_data_list(self) -> list[dict]:
        pairs = [(f'images/{n}.jpg', f'masks/{n}.png') for n in 'ab']
        return [
            dict(img_path=str(self.root / image), seg_map_path=str(self.root / mask))
            for image, mask in pairs
        ]


def test_a_class_that_takes_and_finds_what_it_wants(folder):
    dataset = dict(type=OwnDataset, root=str(folder), pipeline=PIPELINE)
    heads = dict(decode_head=dict(num_classes=2))
    assert str(check_segmentation_dataset(dataset, heads)) == ''
    mask(filled(7))(folder)
    remove('masks/a.png')(folder)
    first, second = check_segmentation_dataset(dataset, heads).errors
    assert first.message == 'files that OwnDataset lists and that do not exist'
    assert first.places[0].endswith('masks/a.png')
    assert second.message.startswith('mask values outside the classes')


def test_a_head_that_learns_borders_has_classes_of_its_own(folder):
    mask(filled(2))(folder)
    dataset = dict(DATASET, data_root=str(folder), metainfo=dict(classes=('a', 'b', 'c')))
    heads = dict(
        decode_head=dict(num_classes=3), auxiliary_head=[dict(type='STDCHead', num_classes=2)]
    )
    assert str(check_segmentation_dataset(dataset, heads)) == ''


def test_all_findings_at_once_by_worker_processes(folder):
    for name, value in zip('cdef', (7, 8, 9, 10), strict=True):
        save(folder / 'images' / f'{name}.jpg', PIXELS)
        save(folder / 'masks' / f'{name}.png', filled(value))
    write('images/a.jpg', b'')(folder)
    dataset = dict(DATASET, data_root=str(folder))
    findings = check_segmentation_dataset(dataset, dict(decode_head=dict(num_classes=2)), workers=2)
    assert [len(finding.places) for finding in findings.errors] == [1, 4]


def test_quick_decodes_a_few(folder):
    for i in range(30):
        save(folder / 'images' / f'{i}.jpg', PIXELS)
        save(folder / 'masks' / f'{i}.png', LABELS)
    for name in ('1', '10'):  # after 0, each fifth of 32 is decoded
        write(f'images/{name}.jpg', b'')(folder)
    dataset = dict(DATASET, data_root=str(folder))
    heads = dict(decode_head=dict(num_classes=2))
    places = {
        full: sum(len(f.places) for f in check_segmentation_dataset(dataset, heads, full).errors)
        for full in (False, True)
    }
    assert places == {False: 0, True: 2}


def test_real_street_scenes_have_no_error(shared):
    for split in ('training', 'validation'):
        dataset = dict(
            type='ADE20KDataset',
            data_root=str(shared / 'data' / 'street_ade20k'),
            data_prefix=dict(img_path=f'images/{split}', seg_map_path=f'annotations/{split}'),
            pipeline=PIPELINE,
        )
        heads = dict(decode_head=dict(num_classes=150), auxiliary_head=dict(num_classes=150))
        assert str(check_segmentation_dataset(dataset, heads)) == ''
