"""Unusual detection data that is right: it passes, perhaps with a warning, and trains."""

import numpy as np
import pytest
import torch
from detection_set import HEIGHT, WIDTH, DetectionSet
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from pycocotools.mask import encode
from synthetic import TINY

import mala_mm
from mala_mm.checks.data import check_data
from mala_mm.cli import read_config

LONG_NAME = 'ü' * 120 + '.png'


def file_name(data, name):
    (data.images / name).parent.mkdir(parents=True, exist_ok=True)
    data.image(name)
    data.coco['images'][0]['file_name'] = name


def one_image(data):
    del data.coco['images'][1], data.coco['annotations'][1]


def one_class(data):
    one_image(data)
    del data.coco['categories'][1]
    data.dataset['metainfo'] = dict(classes=('kite',))
    for head in data.heads.values():
        head['num_classes'] = 1


def no_object_kept(data):
    del data.coco['annotations'][1]
    data.dataset['filter_cfg'] = dict(filter_empty_gt=False)


def renumber(data, first, step):
    for i, (image, category, entry) in enumerate(
        zip(*(data.coco[key] for key in ('images', 'categories', 'annotations')), strict=True)
    ):
        number = first + step * i
        image['id'] = category['id'] = number
        entry.update(id=number, image_id=number, category_id=number)


def text_ids(data):
    for image, entry in zip(data.coco['images'], data.coco['annotations'], strict=True):
        image['id'] = entry['image_id'] = f'id-{image["id"]}'


def crowd(data):
    mask = dict(size=[HEIGHT, WIDTH], counts=[WIDTH * HEIGHT - 100, 100])
    data.coco['annotations'].append(data.object(3, 1, 1, iscrowd=1, segmentation=mask))


def compressed(data):
    pixels = np.asfortranarray(np.tri(HEIGHT, WIDTH, dtype=np.uint8))
    counts = encode(pixels)['counts'].decode()
    data.first(segmentation=dict(size=[HEIGHT, WIDTH], counts=counts))


def add(data, *dropped, **fields):
    entry = data.object(9, 1, fields.pop('category_id', 1), **fields)
    data.coco['annotations'].append({k: v for k, v in entry.items() if k not in dropped})


def unused_category(data):
    data.coco['categories'].append(dict(id=9, name='bee'))
    add(data, 'segmentation', 'iscrowd', category_id=9)


def left_out_without_mask(data):
    data.evaluator['metric'] = 'bbox'
    data.val['pipeline'] = [dict(type='LoadImageFromFile')]
    add(data, 'segmentation', ignore=1)


def thin_image_and_list_of_scales(data):
    data.resize(3000, 20)
    scales = [(96, 72), (128, 96)]
    data.dataset['pipeline'][2] = dict(type='RandomResize', scale=scales, keep_ratio=True)


UNUSUAL = [
    ('grey', lambda d: d.image('a.png', np.full((HEIGHT, WIDTH), 80, np.uint8))),
    ('palette', lambda d: d.image('a.png', np.zeros((HEIGHT, WIDTH), bool))),
    (
        '16 bits',
        lambda d: d.image('a.png', np.full((HEIGHT, WIDTH), 9000, np.uint16)),
        'more than 8',
    ),
    ('1x1 image', lambda d: d.resize(1, 1)),
    ('1x40 image', lambda d: d.resize(1, 40)),
    ('3000x20 image', lambda d: d.resize(3000, 20)),
    ('1x1 object', lambda d: d.first(bbox=[5, 5, 1, 1], area=1)),
    ('object at the border', lambda d: d.first(bbox=[44.3, 24.2, 20, 24])),
    ('image without objects left out', lambda d: d.coco['annotations'].pop(), '1 of 2 images'),
    ('image without objects kept', no_object_kept),
    ('one image', one_image),
    ('one class', one_class),
    ('a category never used', lambda d: d.coco['annotations'][1].update(category_id=1)),
    ('a category of no class', lambda d: d.coco['categories'].insert(0, dict(id=0, name='bee'))),
    ('ids from 1000', lambda d: renumber(d, 1000, 1)),
    ('ids with gaps', lambda d: renumber(d, 7, 90)),
    ('ids as 1.0', lambda d: renumber(d, 1.0, 1)),
    ('image ids as texts', text_ids),
    ('non-ASCII name', lambda d: file_name(d, '図/ä ö.png')),
    ('long name', lambda d: file_name(d, f'{"x" * 200}/{"y" * 200}/{LONG_NAME}')),
    ('a crowd', crowd),
    ('iscrowd as booleans', lambda d: d.first(iscrowd=False)),
    ('no mask in a category of no class', unused_category, 'not in metainfo.classes'),
    ('no mask in what training leaves out', left_out_without_mask),
    ('a thin image and a list of scales', thin_image_and_list_of_scales),
    ('compressed mask', compressed),
    (
        'two polygons',
        lambda d: d.first(segmentation=[[8, 10, 28, 10, 28, 34], [8, 10, 28, 34, 8, 34]]),
    ),
    ('classes from a file', lambda d: d.dataset.update(metainfo=dict(classes=str(d.folder / 'n')))),
]


@pytest.fixture(scope='module')
def model_cfg() -> Config:
    cfg = Config.fromfile(mala_mm.config_path('mask_rcnn_mavit_t_coco.py'))
    cfg.model.backbone.arch = TINY
    cfg.model.backbone.norm_cfg = dict(type='BN')
    cfg.model.neck.update(in_channels=list(TINY['embed_dims']), out_channels=8)
    cfg.model.rpn_head.update(in_channels=8, feat_channels=8)
    heads = cfg.model.roi_head
    for part in (heads.bbox_roi_extractor, heads.mask_roi_extractor):
        part.out_channels = 8
    heads.bbox_head.update(in_channels=8, fc_out_channels=8)
    heads.mask_head.update(in_channels=8, num_convs=1, conv_out_channels=8)
    cfg.model.train_cfg.rpn_proposal.update(nms_pre=50, max_per_img=20)
    cfg.model.train_cfg.rcnn.sampler.num = 16
    return cfg.model


@pytest.fixture(scope='module')
def detectors(model_cfg):
    """Tiny Mask R-CNNs by their number of classes."""
    from mmdet.registry import MODELS
    from mmengine.registry import init_default_scope

    init_default_scope('mmdet')
    built = {}
    for num_classes in (1, 2):
        for head in (model_cfg.roi_head.bbox_head, model_cfg.roi_head.mask_head):
            head.num_classes = num_classes
        built[num_classes] = MODELS.build(model_cfg).train()
    return built


@pytest.mark.parametrize(
    ('change', 'warnings'), [pytest.param(row[1], row[2:], id=row[0]) for row in UNUSUAL]
)
def test_passes_and_trains(change, warnings, tmp_path, detectors):
    from mmdet.registry import DATASETS

    data = DetectionSet(tmp_path)
    (tmp_path / 'n').write_text('kite\nclock\n')
    change(data)
    cfg = read_config(str(data.write()))
    findings = check_data(cfg)
    assert not findings.errors, str(findings)
    assert len(findings.warnings) == len(warnings), str(findings)
    for text, finding in zip(warnings, findings.warnings, strict=True):
        assert text in finding.message

    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    detector = detectors[len(dataset.metainfo['classes'])]
    batch = detector.data_preprocessor(pseudo_collate(list(dataset)), training=True)
    losses = detector(**batch, mode='loss')
    total = sum(torch.as_tensor(value).sum() for name, value in losses.items() if 'loss' in name)
    assert torch.isfinite(total)


def test_labels_follow_the_order_of_the_file(tmp_path):
    """Why another order than that of metainfo.classes is an error."""
    from mmdet.registry import DATASETS

    data = DetectionSet(tmp_path)
    data.coco['categories'].reverse()
    dataset = DATASETS.build(read_config(str(data.write())).train_dataloader.dataset)
    label = dataset[0]['data_samples'].gt_instances.labels.item()
    assert data.coco['annotations'][0]['category_id'] == 1  # a kite
    assert dataset.metainfo['classes'][label] == 'clock'
