import logging
from types import SimpleNamespace

import pytest
from mmengine.evaluator import Evaluator
from mmengine.hooks import RuntimeInfoHook
from mmengine.runner import get_priority

from mala_mm.engine import EmptyDetectionsHook
from mala_mm.registry import HOOKS

CFG = dict(model=dict(test_cfg=dict(rcnn=dict(score_thr=0.05))))


def runner(*metrics: dict, cfg: dict = CFG) -> SimpleNamespace:
    from mmdet.registry import METRICS

    evaluator = Evaluator([METRICS.build(dict(metric, _scope_='mmdet')) for metric in metrics])
    logger = logging.getLogger('test_empty_detections_hook')
    return SimpleNamespace(
        val_evaluator=evaluator, test_evaluator=evaluator, logger=logger, cfg=cfg
    )


@pytest.mark.parametrize('stage', ['val', 'test'])
def test_zero_for_each_missing_metric_and_one_warning(stage, caplog):
    metrics = {}
    coco = dict(type='CocoMetric', metric=['bbox', 'segm'])
    getattr(EmptyDetectionsHook(), f'after_{stage}_epoch')(runner(coco), metrics)
    items = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')
    assert metrics == {f'coco/{kind}_{item}': 0.0 for kind in ('bbox', 'segm') for item in items}
    (record,) = caplog.records
    assert record.levelname == 'WARNING'
    assert 'model.test_cfg.rcnn.score_thr=0.05' in record.getMessage()


def test_own_items_and_prefix():
    metrics = {'loss': 1.0}
    coco = dict(type='CocoMetric', metric='bbox', metric_items=['mAP_50'], prefix='drawn')
    EmptyDetectionsHook().after_test_epoch(runner(coco), metrics)
    assert metrics == {'loss': 1.0, 'drawn/bbox_mAP_50': 0.0}


def test_results_are_not_touched(caplog):
    coco = dict(type='CocoMetric', metric='bbox', metric_items=['mAP', 'mAP_50'])
    metrics = {'coco/bbox_mAP': 0.41, 'coco/bbox_mAP_50': -1.0}
    EmptyDetectionsHook().after_test_epoch(runner(coco), metrics)
    assert metrics == {'coco/bbox_mAP': 0.41, 'coco/bbox_mAP_50': -1.0}
    assert not caplog.records


@pytest.mark.parametrize(
    'metric',
    [
        dict(type='CocoMetric', format_only=True, outfile_prefix='results'),
        dict(type='CocoMetric', metric='proposal'),
        dict(type='VOCMetric'),
    ],
)
def test_no_ap_expected(metric, caplog):
    metrics = {}
    EmptyDetectionsHook().after_test_epoch(runner(metric), metrics)
    assert metrics == {}
    assert not caplog.records


@pytest.mark.parametrize('wrap', [lambda model: model, lambda model: dict(module=model)])
def test_names_the_threshold_of_a_single_stage_detector(wrap, caplog):
    cfg = dict(model=wrap(dict(test_cfg=dict(score_thr=0.3))))
    EmptyDetectionsHook().after_test_epoch(runner(dict(type='CocoMetric'), cfg=cfg), {})
    assert 'model.test_cfg.score_thr=0.3' in caplog.text


def test_runs_before_the_hook_that_logs_the_metrics():
    hook = HOOKS.build(dict(type='mala_mm.EmptyDetectionsHook'))
    assert get_priority(hook.priority) < get_priority(RuntimeInfoHook.priority)
