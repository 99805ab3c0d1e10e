"""Metrics of a detector that detects nothing."""

from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mala_mm.registry import HOOKS


@HOOKS.register_module()
class EmptyDetectionsHook(Hook):
    """Report 0.0 for box and mask AP when no detection passes the score threshold.

    mmdet's CocoMetric then returns no metric at all, so that nothing is printed and `save_best`
    fails. Metrics that are there are never changed. A size class without objects gets 0.0 too,
    where COCO says -1; entries of `classwise` are not added.
    """

    # Ahead of RuntimeInfoHook (VERY_HIGH), which hands the metrics to the log.
    priority = 'HIGHEST'

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self._fill(runner, runner.val_evaluator, metrics)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self._fill(runner, runner.test_evaluator, metrics)

    def _fill(self, runner: Runner, evaluator: Evaluator, metrics: dict[str, float] | None) -> None:
        from mmdet.evaluation import CocoMetric  # here, since segmentation runs without mmdet

        for metric in evaluator.metrics:
            if not isinstance(metric, CocoMetric) or metric.format_only:
                continue
            items = metric.metric_items or ['mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l']
            kinds = [kind for kind in metric.metrics if kind in ('bbox', 'segm')]
            names = [f'{metric.prefix}/{kind}_{item}' for kind in kinds for item in items]
            missing = [name for name in names if name not in metrics]
            if missing:
                metrics.update(dict.fromkeys(missing, 0.0))
                runner.logger.warning(
                    f'No detection scored above {_score_threshold(runner.cfg)}, so mmdet '
                    f'evaluated nothing: 0.0 stands for {", ".join(missing)}.'
                )


def _score_threshold(cfg: dict) -> str:
    model = cfg['model'].get('module', cfg['model'])  # the detector inside a tta_model
    test_cfg = model.get('test_cfg') or {}
    path = 'model.test_cfg.rcnn' if 'rcnn' in test_cfg else 'model.test_cfg'
    return f'{path}.score_thr={test_cfg.get("rcnn", test_cfg).get("score_thr")}'
