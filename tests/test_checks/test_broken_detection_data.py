"""Broken detection data, one row each: how it is broken, and what is said of it.

A row has a name, a function that damages a `DetectionSet`, and all findings that follow, each as
'severity: part of the message' or 'severity: part of the message @ part of its first place'.
"""

import json
import shutil

import numpy as np
import pytest
from detection_set import HEIGHT, WIDTH, DetectionSet
from PIL import Image

NAN = float('nan')
GREY = np.full((HEIGHT, WIDTH), 80, np.uint8)
RGBA = np.full((HEIGHT, WIDTH, 4), 80, np.uint8)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # Orientation: turn by 90 degrees
SIZE = WIDTH * HEIGHT

LEFT_OUT = 'warning: 1 of 2 images have no object of metainfo.classes'
NO_LEARNING = 'error: no object to learn: expected annotations with a box inside'


def annotations(data):
    return data.coco['annotations']


def set_size(data, width, height):
    data.coco['images'][0].update(width=width, height=height)


def rename(data, key, value):
    data.coco['categories'][0][key] = value


def write_json(data, text):
    (data.folder / 'train.json').write_text(text)
    data.coco = None


def set_classes(data, classes):
    data.dataset['metainfo'] = dict(classes=classes)


def swap_order(data):
    data.coco['categories'].reverse()


def all_beyond(data):
    for entry in annotations(data):
        entry['bbox'] = [30, 20, 50, 44]


def crowd(data, size, counts):
    data.first(iscrowd=1, segmentation=dict(size=size, counts=counts))


def turned_jpeg(data):
    data.image('a.jpg', exif=TURNED)
    data.coco['images'][0]['file_name'] = 'a.jpg'


def jpeg_cut_off(data):
    data.image('a.jpg', quality=95)
    data.cut('a.jpg', 600)
    data.coco['images'][0]['file_name'] = 'a.jpg'


def other_ground_truth(data):
    other = dict(data.coco, images=data.coco['images'][:1], annotations=annotations(data)[:1])
    (data.folder / 'other.json').write_text(json.dumps(other))
    data.evaluator['ann_file'] = str(data.folder / 'other.json')


IMAGES = [
    ('missing', lambda d: (d.images / 'a.png').unlink(), 'error: images that are not in @ a.png'),
    ('folder gone', lambda d: shutil.rmtree(d.images), 'error: none of its 2 images is in @ a.png'),
    (
        'zero bytes',
        lambda d: d.cut('a.png', 0),
        'error: images that cannot be used @ a.png is empty (0 bytes)',
    ),
    (
        'PNG cut off',
        lambda d: d.cut('a.png', 120),
        'error: images that cannot be used @ a.png is cut off or damaged',
    ),
    (
        'JPEG cut off',
        jpeg_cut_off,
        'error: images that cannot be used @ a.jpg is cut off or damaged',
    ),
    (
        'no image',
        lambda d: (d.images / 'a.png').write_text('<html>'),
        'error: images that cannot be used @ a.png cannot be decoded by cv2 (perhaps no image)',
    ),
    (
        '32-bit float',
        lambda d: (
            d.image('a.tif', GREY.astype(np.float32)),
            d.coco['images'][0].update(file_name='a.tif'),
        ),
        'error: images that cannot be used @ a.tif cannot be decoded by cv2',
    ),
    (
        'orientation tag',
        turned_jpeg,
        'error: images with an orientation tag @ (64, 48), decoded (48, 64)',
    ),
    (
        'another size',
        lambda d: set_size(d, 32, 40),
        'error: images of another (width, height) than listed @ listed (32, 40), decoded (64, 48)',
    ),
    (
        '16 bits',
        lambda d: d.image('a.png', GREY.astype(np.uint16) * 256),
        'warning: images of more than 8 bits @ a.png: 16 bits',
    ),
    (
        'RGBA',
        lambda d: d.image('a.png', RGBA),
        'warning: images with an alpha channel @ a.png: RGBA',
    ),
    (
        '4000x1',
        lambda d: d.resize(4000, 1),
        'error: images so thin that Resize to (128, 96) leaves no pixel @ a.png, 4000x1',
    ),
    (
        'too small',
        lambda d: d.dataset['filter_cfg'].update(min_size=49),
        'error: filter_cfg.min_size=49 leaves no image',
    ),
    (
        'filter_cfg',
        lambda d: d.dataset.update(filter_cfg=dict(min_size='a')),
        "error: filter_cfg={'min_size': 'a'}, expected dict(filter_empty_gt=True, min_size=PIXELS)",
    ),
    (
        'one too small',
        lambda d: (d.resize(16, 16), d.dataset['filter_cfg'].update(min_size=32)),
        'warning: 1 of 2 images have a side of less than filter_cfg.min_size=32',
    ),
]

FILES = [
    (
        'a number as ann_file',
        lambda d: d.dataset.update(ann_file=5),
        'error: dataset.ann_file=5, expected str @ train_dataloader.dataset',
    ),
    (
        'a text as evaluator',
        lambda d: setattr(d, 'evaluator', 'CocoMetric'),
    ),
    (
        'missing file',
        lambda d: d.dataset.update(ann_file='none.json'),
        'error: none.json does not exist: correct data_root',
    ),
    ('empty file', lambda d: write_json(d, ''), 'error: it is empty (0 bytes)'),
    (
        'no JSON',
        lambda d: write_json(d, '<xml>'),
        "error: expected JSON in COCO's format: Expecting value",
    ),
    (
        'cut off',
        lambda d: write_json(d, json.dumps(d.coco)[:200]),
        "error: expected JSON in COCO's format",
    ),
    ('a folder', lambda d: d.dataset.update(ann_file='images'), 'error: Is a directory'),
    ('nested too deep', lambda d: write_json(d, '[' * 100000), 'error: recursion'),
    ('a list', lambda d: write_json(d, '[]'), 'error: holds a JSON list, expected an object'),
    (
        'empty object',
        lambda d: write_json(d, '{}'),
        'error: has no images, expected a list',
        'error: has no categories',
        'error: has no annotations',
    ),
    ('no annotations', lambda d: d.coco.pop('annotations'), 'error: has no annotations'),
    ('empty annotations', lambda d: annotations(d).clear(), NO_LEARNING),
    ('no categories', lambda d: d.coco.pop('categories'), 'error: has no categories'),
    ('empty images', lambda d: d.coco['images'].clear(), 'error: has an empty list of images'),
    ('images as object', lambda d: d.coco.update(images={}), 'error: has a JSON object as images'),
    (
        'image without width',
        lambda d: d.coco['images'].append(dict(id=3, file_name='c', height=1)),
        'error: images need id, file_name, width and height @ images[2]: width is missing',
    ),
    (
        'image id null',
        lambda d: d.coco['images'].append(dict(id=None)),
        'error: images need @ images[2]: id is None',
    ),
    (
        'image id twice',
        lambda d: d.coco['images'].append(d.coco['images'][0]),
        'error: image ids that occur twice @ image 1: a.png',
    ),
    (
        'no data_prefix.img',
        lambda d: d.dataset.update(data_prefix=dict(img_path='images/')),
        'error: a CocoDataset needs ann_file and data_prefix=dict(img=FOLDER)',
    ),
    (
        'unknown type',
        lambda d: d.dataset.update(type='CocoDatset'),
        "error: dataset.type='CocoDatset' is not known to mmdet @ train_dataloader.dataset",
    ),
    (
        'other format',
        lambda d: d.dataset.update(type='VOCDataset'),
        'warning: VOCDataset reads other files',
    ),
    (
        'on a server',
        lambda d: d.dataset.update(data_root='s3://bucket/'),
        'warning: data sets that are not on a local disk @ train_dataloader.dataset',
    ),
    ('evaluator elsewhere', other_ground_truth, 'error: which lacks 1 images of @ image id 2'),
    (
        'evaluator without file',
        lambda d: d.evaluator.update(ann_file='data/coco/val.json'),
        'error: annotation file data/coco/val.json does not exist',
    ),
]

CLASSES = [
    (
        'wrong case',
        lambda d: set_classes(d, ('Kite', 'clock')),
        "error: 1 of 2 metainfo.classes are no category of the file @ 'Kite': did you mean 'kite'?",
        LEFT_OUT,
        "warning: objects of categories @ 'kite': 1 objects",
    ),
    (
        'a space',
        lambda d: rename(d, 'name', 'kite '),
        "error: metainfo.classes are no category of the file @ 'kite': did you mean 'kite '?",
        LEFT_OUT,
        "warning: objects of categories @ 'kite ': 1 objects",
    ),
    (
        'none matches',
        lambda d: set_classes(d, ('dog', 'cat')),
        "error: 2 of 2 metainfo.classes are no category of the file @ 'dog'",
        "warning: objects of categories @ 'kite': 1 objects",
    ),
    (
        'no metainfo',
        lambda d: d.dataset.pop('metainfo'),
        "error: 78 of 80 metainfo.classes are no category of the file @ 'person'",
        'error: model.roi_head.bbox_head.num_classes=2, but metainfo.classes has 80',
        'error: model.roi_head.mask_head.num_classes=2, but metainfo.classes has 80',
    ),
    (
        'a bare string',
        lambda d: set_classes(d, 'kite'),
        "error: classes='kite' is a text, expected a tuple of names: write ('kite',)",
    ),
    (
        'CLASSES',
        lambda d: d.dataset.update(metainfo=dict(CLASSES=('kite', 'clock'))),
        'error: metainfo.CLASSES is not read: write metainfo.classes',
    ),
    ('a number', lambda d: set_classes(d, 2), 'error: metainfo.classes=2, expected a tuple'),
    ('a name twice', lambda d: set_classes(d, ('kite', 'kite')), "error: names 'kite' twice"),
    ('another order', swap_order, 'error: in another order than metainfo.classes'),
    (
        'another order in val',
        lambda d: d.val.update(metainfo=dict(classes=('clock', 'kite'))),
        'error: in another order than metainfo.classes',
        'error: data sets differ in metainfo.classes (kite, clock and clock, kite)',
    ),
    (
        'one category twice',
        lambda d: d.coco['categories'].append(dict(id=3, name='kite')),
        "error: names of metainfo.classes that several categories have @ 'kite': 2 categories",
    ),
    (
        'category id twice',
        lambda d: d.coco['categories'].append(dict(id=1, name='bee')),
        'error: category ids that occur twice @ category 1: kite, bee',
    ),
    (
        'category without name',
        lambda d: d.coco['categories'].append(dict(id=3)),
        "error: categories need id and name @ categories[2]: {'id': 3}",
    ),
    (
        'subset of the categories',
        lambda d: (
            set_classes(d, ('kite',)),
            [head.update(num_classes=1) for head in d.heads.values()],
        ),
        "warning: objects of categories @ 'clock': 1 objects",
        LEFT_OUT,
    ),
    (
        'box head',
        lambda d: d.heads['bbox_head'].update(num_classes=80),
        'error: model.roi_head.bbox_head.num_classes=80, but metainfo.classes has 2 names',
    ),
    (
        'one of three heads',
        lambda d: d.heads.update(bbox_head=[dict(num_classes=n) for n in (2, 80, 2)]),
        'error: model.roi_head.bbox_head.1.num_classes=80',
    ),
    (
        'head without number',
        lambda d: d.heads['mask_head'].pop('num_classes'),
        'error: model.roi_head.mask_head.num_classes=80',
    ),
]

BOXES = [
    (
        'NaN',
        lambda d: d.first(bbox=[NAN, 10, 20, 24]),
        'error: annotations that mmdet cannot use @ annotations[0]: bbox is [nan, 10, 20, 24]',
        LEFT_OUT,
    ),
    (
        'infinite',
        lambda d: d.first(bbox=[0, 0, float('inf'), 24]),
        'error: annotations that mmdet cannot use @ annotations[0]: bbox',
        LEFT_OUT,
    ),
    (
        'negative size',
        lambda d: d.first(bbox=[28, 34, -20, -24]),
        'error: annotations that mmdet cannot use @ expected a width and height from 0',
        LEFT_OUT,
    ),
    (
        '3 numbers',
        lambda d: d.first(bbox=[1, 2, 3]),
        'error: annotations that mmdet cannot use @ bbox is [1, 2, 3], expected 4',
        LEFT_OUT,
    ),
    (
        'texts',
        lambda d: d.first(bbox=['1', '2', '3', '4']),
        'error: annotations that mmdet cannot use @ expected 4 finite',
        LEFT_OUT,
    ),
    (
        'no box',
        lambda d: annotations(d)[0].pop('bbox'),
        'error: annotations that mmdet cannot use @ bbox is missing',
        LEFT_OUT,
    ),
    (
        'no area',
        lambda d: annotations(d)[0].pop('area'),
        'error: annotations that mmdet cannot use @ area is missing',
        LEFT_OUT,
    ),
    (
        'no iscrowd',
        lambda d: annotations(d)[0].pop('iscrowd'),
        'error: annotations that the evaluation cannot use @ annotation 1: iscrowd is missing',
    ),
    (
        'width 0',
        lambda d: d.first(bbox=[8, 10, 0, 24]),
        'warning: boxes of less than 1 pixel @ annotation 1: bbox [8, 10, 0, 24]',
    ),
    ('area 0', lambda d: d.first(area=0), 'warning: boxes of less than 1 pixel @ area 0'),
    (
        'fractions',
        lambda d: [a.update(bbox=[0.1, 0.2, 0.3, 0.5]) for a in annotations(d)],
        'warning: in pixels, not fractions @ annotation 1: bbox [0.1, 0.2, 0.3, 0.5]',
        NO_LEARNING,
    ),
    (
        'outside',
        lambda d: d.first(bbox=[70, 10, 20, 24]),
        'warning: boxes wholly outside their images @ annotation 1: bbox [70, 10, 20, 24]',
        'warning: boxes that reach out of their images @ annotation 1',
    ),
    (
        'beside the image',
        lambda d: d.first(bbox=[64, 10, 20, 24]),
        'warning: boxes wholly outside their images',
        'warning: boxes that reach out of their images',
    ),
    (
        'partly outside',
        lambda d: d.first(bbox=[-6, 10, 20, 24]),
        'warning: boxes that reach out of their images @ annotation 1: bbox [-6, 10, 20, 24]',
    ),
    (
        'x1 y1 x2 y2',
        all_beyond,
        'error: Are they [x1, y1, x2, y2] @ annotation 1: bbox [30, 20, 50, 44]',
    ),
]

IDS = [
    (
        'annotation id twice',
        lambda d: annotations(d)[1].update(id=1),
        'error: annotation ids that occur twice @ annotation 1',
    ),
    (
        'annotation id missing',
        lambda d: annotations(d)[0].pop('id'),
        'error: annotations that mmdet cannot use @ annotations[0]: id is missing',
        LEFT_OUT,
    ),
    (
        'annotation id a text',
        lambda d: d.first(id='a1'),
        "error: annotations that the evaluation cannot use @ id is 'a1'",
    ),
    ('annotation id 0', lambda d: d.first(id=0), 'warning: with annotation id 0 for not found'),
    (
        'text for a number',
        lambda d: [a.update(image_id=str(a['image_id'])) for a in annotations(d)],
        "error: image_id is a text where @ annotation 1: image_id '1'",
        NO_LEARNING,
    ),
    (
        'number for a text',
        lambda d: [i.update(id=str(i['id'])) for i in d.coco['images']],
        'error: image_id is a text where @ annotation 1: image_id 1',
        NO_LEARNING,
    ),
    (
        'unknown image',
        lambda d: d.first(image_id=9),
        'warning: annotations of images @ annotation 1: image_id 9',
        LEFT_OUT,
    ),
    (
        'unknown category',
        lambda d: d.first(category_id=9),
        'warning: annotations of categories @ annotation 1: category_id 9',
        LEFT_OUT,
    ),
    (
        'no object',
        lambda d: d.coco['annotations'].append(7),
        'error: annotations that mmdet cannot use @ annotations[2]: a JSON number',
    ),
    ('image without objects', lambda d: annotations(d).pop(), LEFT_OUT),
]

MASKS = [
    (
        'none',
        lambda d: annotations(d)[0].pop('segmentation'),
        'error: objects without a segmentation @ annotation 1: segmentation None',
    ),
    (
        'empty',
        lambda d: d.first(segmentation=[]),
        'error: objects without a segmentation @ annotation 1: segmentation []',
    ),
    (
        'flat list',
        lambda d: d.first(segmentation=[1, 2, 3, 4, 5, 6]),
        'error: segmentations that are no polygons @ annotation 1: [1, 2',
    ),
    (
        '2 points',
        lambda d: d.first(segmentation=[[1, 2, 3, 4]]),
        'error: first polygon has fewer than 3 points @ annotation 1: [1, 2, 3, 4]',
    ),
    (
        'odd count',
        lambda d: d.first(segmentation=[[1, 2, 30, 4, 30, 30, 7]]),
        'warning: an odd count of numbers @ annotation 1: [1, 2, 30, 4, 30, 30, ...]',
    ),
    (
        'NaN',
        lambda d: d.first(segmentation=[[1, 2, NAN, 4, 5, 6]]),
        'error: not finite or far outside @ annotation 1: [1, 2, nan',
    ),
    (
        'far outside',
        lambda d: d.first(segmentation=[[1, 2, 1000000000.0, 4, 5, 6]]),
        'error: not finite or far outside @ annotation 1',
    ),
    (
        'RLE turned',
        lambda d: crowd(d, [WIDTH, HEIGHT], [SIZE]),
        'error: run-length masks @ size is [64, 48], expected [48, 64]',
    ),
    (
        'RLE short',
        lambda d: crowd(d, [HEIGHT, WIDTH], [10, 20]),
        'error: run-length masks @ counts add up to 30, expected 3072',
    ),
    (
        'RLE negative',
        lambda d: crowd(d, [HEIGHT, WIDTH], [SIZE + 1, -1]),
        'error: run-length masks @ expected whole numbers from 0',
    ),
    (
        'RLE text short',
        lambda d: crowd(d, [HEIGHT, WIDTH], '52'),
        'error: run-length masks @ counts add up to 7,',
    ),
    (
        'RLE no text',
        lambda d: crowd(d, [HEIGHT, WIDTH], '\t'),
        'error: run-length masks @ counts add up to None',
    ),
    (
        'RLE without counts',
        lambda d: d.first(segmentation=dict(size=[HEIGHT, WIDTH])),
        'error: run-length masks @ counts are None',
    ),
]

CASES = [
    pytest.param(broken, expected, id=f'{group}: {name}')
    for group, cases in dict(
        image=IMAGES, file=FILES, classes=CLASSES, box=BOXES, id=IDS, mask=MASKS
    ).items()
    for name, broken, *expected in cases
]


def parse(output: str) -> list[tuple[str, list[str]]]:
    """Return each finding that the tool printed, 'severity: message', with its places."""
    findings = []
    for line in output.splitlines()[:-1]:
        if line.startswith('    '):
            findings[-1][1].append(line.strip())
        else:
            findings.append((line, []))
    return findings


@pytest.mark.parametrize(('broken', 'expected'), CASES)
def test_broken(broken, expected, tmp_path, check_data_tool, capsys):
    data = DetectionSet(tmp_path)
    broken(data)
    exit_code = check_data_tool(data.write(), '--workers', 0)
    assert exit_code == (1 if any(line.startswith('error') for line in expected) else 0)
    left = parse(capsys.readouterr().out)
    for text, _ in left:
        assert len(text) < 300
        assert not text.endswith('...'), 'cut off, perhaps with its remedy'
    for line in expected:
        severity, text = line.split(': ', 1)
        message, _, place = text.partition(' @ ')
        found = [
            finding
            for finding in left
            if finding[0].startswith(severity)
            and message in finding[0]
            and place in (finding[1] or [''])[0]
        ]
        assert len(found) == 1, f'{line}\n{left}'
        left.remove(found[0])
    assert not left, 'not expected'


def test_tool_prints_all_and_ends_with_1(tmp_path, check_data_tool, capsys):
    data = DetectionSet(tmp_path)
    data.cut('a.png', 0)
    annotations(data)[1]['area'] = 0
    assert check_data_tool(data.write(), '--workers', 0) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f'error: {tmp_path}/train.json: images that cannot be used: replace them or take them out '
        'of the file',
        f'    {tmp_path}/images/a.png is empty (0 bytes)',
        f'warning: {tmp_path}/train.json: boxes of less than 1 pixel in width or height, or an '
        'area of 0, are left out: expected [x, y, width, height] in pixels, not fractions',
        '    annotation 2: bbox [8, 10, 20, 24] in an image of 64x48, area 0',
        f'{tmp_path}/config.py: 1 errors, 1 warnings',
    ]
