"""Which files a config names, and how much of them is looked at."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from detection_set import HEIGHT, WIDTH, DetectionSet
from mmengine.config import Config
from PIL import Image

import mala_mm
from mala_mm.checks import data as data_module
from mala_mm.checks.data import check_data
from mala_mm.checks.findings import Findings


@pytest.fixture
def data(tmp_path) -> DetectionSet:
    return DetectionSet(tmp_path)


def errors(data: DetectionSet, **changes: object) -> list[str]:
    data.write()
    return [e.message for e in check_data(Config({**data.config(), **changes})).errors]


def test_a_file_that_train_and_val_name_is_read_once(data, monkeypatch):
    read, decoded = [], []
    read_annotations, inspect_image = data_module.read_annotations, data_module.inspect_image
    monkeypatch.setattr(
        data_module, 'read_annotations', lambda *a: read.append(a[0]) or read_annotations(*a)
    )
    monkeypatch.setattr(
        data_module, 'inspect_image', lambda *a: decoded.append(a[0]) or inspect_image(*a)
    )
    assert errors(data) == []
    assert read == [f'{data.folder}/train.json']
    assert decoded == [f'{data.images}/a.png', f'{data.images}/b.png']


def test_quick_decodes_a_few_images(data):
    for i in range(3, 60):
        data.image(f'{i}.png', np.zeros((HEIGHT, WIDTH), np.uint8))
        data.coco['images'].append(dict(id=i, file_name=f'{i}.png', width=WIDTH, height=HEIGHT))
        data.coco['annotations'].append(data.object(i, i, 1))
    data.cut('a.png', 20)
    data.cut('30.png', 20)
    data.write()
    cfg = Config(data.config())
    (full,) = check_data(cfg).errors
    (quick,) = check_data(cfg, full=False).errors
    assert [place.split()[0][-6:] for place in full.places] == ['/a.png', '30.png']
    assert len(quick.places) == 1
    (data.images / '31.png').unlink()  # that all files exist is looked at even so
    assert 'images that are not in' in str(check_data(cfg, full=False))


@pytest.mark.parametrize(
    'wrap',
    [
        lambda d: dict(type='RepeatDataset', times=2, dataset=d),
        lambda d: dict(type='ClassBalancedDataset', oversample_thr=0.1, dataset=d),
        lambda d: dict(type='ConcatDataset', datasets=[d, dict(type='RepeatDataset', dataset=d)]),
        lambda d: dict(type='MultiImageMixDataset', pipeline=[], dataset=d),
    ],
)
def test_wrapped_datasets(data, wrap):
    data.cut('a.png', 0)
    loader = dict(dataset=wrap(data.dataset))
    (message,) = errors(data, train_dataloader=loader, val_dataloader=None, val_evaluator=None)
    assert 'images that cannot be used' in message


@pytest.mark.parametrize(('keep', 'errors_expected'), [(True, 0), (False, 1)])
def test_images_without_objects_beside_others(data, keep, errors_expected):
    empty = {k: v for k, v in data.coco.items() if k != 'annotations'}
    (data.folder / 'empty.json').write_text(json.dumps(empty))
    filter_cfg = dict(filter_empty_gt=not keep, min_size=0)
    other = dict(data.dataset, ann_file='empty.json', filter_cfg=filter_cfg)
    both = dict(type='ConcatDataset', datasets=[data.dataset, other])
    assert len(errors(data, train_dataloader=dict(dataset=both))) == errors_expected


def test_number_of_classes_of_a_language_model_is_the_length_of_a_text(data):
    head = dict(type='GroundingDINOHead', num_classes=256)
    assert len(errors(data, model=dict(bbox_head=head))) == 1
    assert errors(data, model=dict(bbox_head=head, language_model=dict(type='BertModel'))) == []


def test_segmentation_is_checked_once_for_val_and_test(monkeypatch):
    calls = []

    def check(*arguments):
        calls.append(arguments)
        findings = Findings()
        findings.error('a fault')
        return findings

    module = SimpleNamespace(check_segmentation_dataset=check)
    monkeypatch.setitem(sys.modules, 'mala_mm.checks.segmentation_data', module)
    cfg = Config.fromfile(mala_mm.config_path('semfpn_mavit_t_ade20k.py'))
    findings = check_data(cfg, full=False, workers=3)
    datasets = [cfg.train_dataloader.dataset, cfg.val_dataloader.dataset]
    assert calls == [(dataset, cfg.model, False, 3, False) for dataset in datasets]
    assert [e.message for e in findings.errors] == ['a fault']


def test_evaluators_in_a_list(data):
    evaluators = [dict(type='DumpDetResults'), dict(data.evaluator, ann_file='none.json')]
    (message,) = errors(data, val_evaluator=evaluators)
    assert 'annotation file none.json does not exist' in message


def test_only_the_splits_of_a_run(data):
    data.val['ann_file'] = 'none.json'
    data.write()
    cfg = Config(data.config())
    assert check_data(cfg, splits=['train']).errors == []
    assert len(check_data(cfg, splits=['train', 'val']).errors) == 1


def test_masks_are_checked_where_they_are_read(data):
    del data.coco['annotations'][0]['segmentation']
    data.dataset['pipeline'] = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')]
    data.evaluator['metric'] = 'bbox'
    assert errors(data) == []
    data.evaluator['metric'] = ['bbox', 'segm']
    assert 'objects without a segmentation' in errors(data)[0]


def test_objects_of_other_categories_need_neither_mask_nor_iscrowd(data):
    data.dataset['metainfo'] = dict(classes=('kite',))
    for head in data.heads.values():
        head['num_classes'] = 1
    for key in ('segmentation', 'iscrowd'):
        del data.coco['annotations'][1][key]
    assert errors(data) == []


def test_a_detector_with_a_language_model_counts_tokens(data):
    head = dict(type='GroundingDINOHead', num_classes=256)
    grounding = dict(type='GroundingDINO', language_model={}, bbox_head=head)
    assert errors(data, model=grounding) == []


def test_orientation_as_the_pipeline_loads(data):
    exif = Image.Exif()
    exif[0x0112] = 6
    data.image('a.jpg', exif=exif)
    data.coco['images'][0]['file_name'] = 'a.jpg'
    data.dataset['pipeline'][0]['color_type'] = 'color_ignore_orientation'
    assert errors(data) == []


@pytest.mark.parametrize(
    ('folder', 'train', 'val', 'classes', 'warnings'),
    [
        ('voc_coco80', 'instances.json', 'instances.json', None, ['annotation id 0']),
        ('fruits_coco', 'train.json', 'val.json', ('date', 'fig', 'hazelnut'), []),
    ],
)
def test_real_data(shared, folder, train, val, classes, warnings):
    cfg = Config.fromfile(mala_mm.config_path('cascade_mavit_s_coco.py'))
    root = f'{shared}/data/{folder}/'
    for loader, ann_file in ((cfg.train_dataloader, train), (cfg.val_dataloader, val)):
        loader.dataset.update(data_root=root, ann_file=ann_file, data_prefix=dict(img='images/'))
        if classes:
            loader.dataset.metainfo = dict(classes=classes)
    cfg.val_evaluator.ann_file = root + val
    if classes:
        heads = cfg.model.roi_head
        for head in (*heads.bbox_head, heads.mask_head):
            head.num_classes = len(classes)
    findings = check_data(cfg, splits=['train', 'val'])
    assert not findings.errors, str(findings)
    assert len(findings.warnings) == len(warnings)
    for finding, text in zip(findings.warnings, warnings, strict=True):
        assert text in finding.message


@pytest.mark.parametrize('config', ['cascade_mavit_b_coco.py', 'retinanet_mavit_t_coco.py'])
def test_shipped_configs_name_what_is_missing(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = Config.fromfile(mala_mm.config_path(config))
    assert [e.message.split(':')[0] for e in check_data(cfg).errors] == [
        'annotation file data/coco/annotations/instances_train2017.json does not exist',
        'annotation file data/coco/annotations/instances_val2017.json does not exist',
    ]


def test_tool_with_worker_processes(data, root, tmp_path):
    data.cut('a.png', 0)
    command = [sys.executable, str(root / 'tools' / 'check_data.py'), str(data.write())]
    log = subprocess.run([*command, '--workers', '2'], capture_output=True, text=True)
    assert log.returncode == 1
    assert f'    {data.images}/a.png is empty (0 bytes)\n' in log.stdout
    assert log.stdout.endswith(f'{tmp_path}/config.py: 1 errors, 0 warnings\n')


def test_tool_options(data, check_data_tool, capsys):
    config = data.write()
    assert check_data_tool(config, '--quick') == 0
    assert check_data_tool(config, '--cfg-options', 'model.roi_head.bbox_head.num_classes=9') == 1
    assert 'bbox_head.num_classes=9' in capsys.readouterr().out
    assert check_data_tool('none.py') == 2
    assert check_data_tool(config, '--cfg-options', 'x') == 2
    assert check_data_tool() == 2
    (data.folder / 'train.json').write_text(json.dumps([]))
    assert check_data_tool(config) == 1
