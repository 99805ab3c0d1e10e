"""An interrupted and resumed training against an uninterrupted one, bit for bit."""

import copy
import errno
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.fileio import LocalBackend
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS

from mala_mm import cli
from mala_mm.checkpoint import CheckpointError
from mala_mm.engine import whole_file

LAST = 6  # iterations of every run: three epochs of two, or six
RUNS = itertools.count()


class Stopped(BaseException):
    """The end of a run that was interrupted. Like kill -9, it lets nothing clean up."""


@HOOKS.register_module()
class StopHook(Hook):
    priority = 'LOWEST'

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter + 1 == self.iteration:
            raise Stopped


@pytest.fixture(scope='module')
def detection(tiny_mask_rcnn: Path) -> Config:
    """Epoch-based, of few regions."""
    return _random(
        tiny_mask_rcnn,
        {
            'train_cfg.max_epochs': LAST // 2,
            'train_cfg.val_interval': 2,
            'model.train_cfg.rpn_proposal.nms_pre': 50,
            'model.train_cfg.rcnn.sampler.num': 16,
            'model.test_cfg.rpn.nms_pre': 50,
            'model.test_cfg.rcnn.score_thr': 0.999,
        },
    )


@pytest.fixture(scope='module')
def segmentation(tiny_semfpn: Path) -> Config:
    """Iteration-based, a checkpoint after each iteration."""
    return _random(
        tiny_semfpn,
        {
            'train_dataloader.batch_size': 1,
            'train_cfg.max_iters': LAST,
            'train_cfg.val_interval': 2,
            'default_hooks.checkpoint.interval': 1,
        },
    )


def _random(path: Path, options: dict[str, Any]) -> Config:
    """Stochastic depth and random transforms."""
    cfg = Config.fromfile(path)
    cfg.merge_from_dict({**options, 'model.backbone.arch.drop_path_rate': 0.5})
    cfg.randomness = dict(seed=3)
    *first, pack = cfg.train_dataloader.dataset.pipeline
    transforms = [dict(type='RandomFlip', prob=0.5), dict(type='PhotoMetricDistortion')]
    cfg.train_dataloader.dataset.pipeline = [*first, *transforms, pack]
    return cfg


@pytest.fixture(scope='module')
def whole_detection(detection: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of an uninterrupted run."""
    work_dir = tmp_path_factory.mktemp('whole_detection')
    train(detection, work_dir)
    return work_dir / 'epoch_3.pth'


@pytest.fixture(scope='module')
def whole_segmentation(segmentation: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of an uninterrupted run."""
    work_dir = tmp_path_factory.mktemp('whole_segmentation')
    train(segmentation, work_dir)
    return work_dir / 'iter_6.pth'


def train(cfg: Config, work_dir: Path, stop: int = 0, resume: str = '', **options: Any) -> None:
    """Train as tools/train.py does, until the end or iteration `stop`.

    The double underscores in names of options stand for dots.
    """
    cfg = copy.deepcopy(cfg)
    cfg.merge_from_dict({name.replace('__', '.'): value for name, value in options.items()})
    cfg.work_dir = str(work_dir)
    cfg.experiment_name = f'run{next(RUNS)}'  # mmengine's own is the same within a second
    cfg.custom_hooks = [dict(type='StopHook', iteration=stop)]
    warnings = []
    if resume:
        warnings = cli.set_resume(cfg, resume)
        cfg.randomness = dict(seed=None)  # the checkpoint knows the first run's
    cli.add_empty_detections_hook(cfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, 'pretty_text', '')  # formatting it takes longer than training
        with pytest.raises(Stopped) if stop else nullcontext():
            cli.run(cfg, 'train', warnings)


def assert_same(found: Any, expected: Any, where: str = '') -> None:
    if isinstance(expected, HistoryBuffer):
        found, expected = found.data, expected.data
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f'{where}.{key}')
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f'{where}.{i}')
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected, where)
    else:
        assert found == expected or (math.isnan(found) and math.isnan(expected)), where


def assert_same_training(found: Path, expected: Path) -> None:
    """Weights, optimizer, schedulers, generators and every logged learning rate and loss."""
    checkpoints = [torch.load(path, weights_only=True) for path in (found, expected)]
    for checkpoint in checkpoints:
        assert checkpoint['meta']['iter'] == LAST
        scalars = checkpoint['message_hub']['log_scalars']
        assert len(scalars['train/lr'].data[0]) == len(scalars['train/loss'].data[0]) == LAST
        for name in list(scalars):
            if 'time' in name or name.startswith('val'):
                del scalars[name]
        checkpoint['message_hub'] = scalars
        del checkpoint['meta']
    assert_same(*checkpoints)


def test_detection_goes_on_after_the_last_finished_epoch(detection, whole_detection, tmp_path):
    train(detection, tmp_path, stop=5)
    train(detection, tmp_path, resume='auto')
    assert_same_training(tmp_path / 'epoch_3.pth', whole_detection)


def test_detection_goes_on_within_an_epoch(detection, whole_detection, tmp_path):
    options = dict(default_hooks__checkpoint__by_epoch=False, default_hooks__checkpoint__interval=1)
    train(detection, tmp_path, stop=4, **options)
    for iteration in (3, 4):  # in the middle of an epoch, and at its end
        train(detection, tmp_path, resume=str(tmp_path / f'iter_{iteration}.pth'))
        assert_same_training(tmp_path / 'epoch_3.pth', whole_detection)


@pytest.mark.parametrize(('stop', 'workers'), [(4, 0), (1, 1)])
def test_segmentation_goes_on_with_the_next_iteration(
    segmentation, whole_segmentation, tmp_path, stop, workers
):
    """A worker loads the same data as the process itself."""
    options = dict(
        train_dataloader__num_workers=workers, train_dataloader__persistent_workers=workers > 0
    )
    train(segmentation, tmp_path, stop=stop)
    train(segmentation, tmp_path, resume='auto', **options)
    assert_same_training(tmp_path / 'iter_6.pth', whole_segmentation)


def test_validation_changes_no_number(segmentation, whole_segmentation, tmp_path):
    train(segmentation, tmp_path, val_cfg=None, val_dataloader=None, val_evaluator=None)
    assert_same_training(tmp_path / 'iter_6.pth', whole_segmentation)


KILL_IN_MID_WRITE = """
import os, sys, runpy
from mala_mm.engine import whole_file

def half_written(descriptor):
    path = os.readlink(f'/proc/self/fd/{descriptor}')
    if path.endswith('iter_3.pth.partial'):
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), 9)

whole_file.os.fsync = half_written
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_kill_in_the_middle_of_a_checkpoint(segmentation, whole_segmentation, root, tmp_path):
    segmentation.dump(tmp_path / 'config.py')
    work_dir = tmp_path / 'killed'
    tool = [root / 'tools' / 'train.py', tmp_path / 'config.py', '--work-dir', work_dir]
    keep_one = 'default_hooks.checkpoint.max_keep_ckpts=1'
    killed = subprocess.run(
        [sys.executable, '-c', KILL_IN_MID_WRITE, *tool, '--cfg-options', keep_one],
        # sums of floats depend on the number of threads
        env={**os.environ, 'OMP_NUM_THREADS': str(torch.get_num_threads())},
    )
    assert killed.returncode == -9
    names = sorted(path.name for path in work_dir.glob('iter*'))
    assert names == ['iter_2.pth', 'iter_3.pth.partial']
    train(segmentation, work_dir, resume='auto', default_hooks__checkpoint__max_keep_ckpts=1)
    assert_same_training(work_dir / 'iter_6.pth', whole_segmentation)
    assert [path.name for path in work_dir.glob('iter*')] == ['iter_6.pth']


def test_older_files_go_when_newer_ones_are_there(segmentation, monkeypatch, tmp_path):
    """At no moment last_checkpoint names a file that is not there, nor is there no best one."""
    events = []

    def record(name: str, action: Callable) -> Callable:
        def recorded(*args: Any) -> None:
            action(*args)
            events.append(f'{name} {Path(args[-1]).name}')

        return recorded

    scores = iter([1, 3, 2])
    monkeypatch.setattr(
        'mmseg.evaluation.IoUMetric.compute_metrics', lambda *_: dict(mIoU=next(scores))
    )
    monkeypatch.setattr(whole_file.os, 'replace', record('write', os.replace))
    monkeypatch.setattr(LocalBackend, 'remove', record('remove', LocalBackend.remove))
    train(
        segmentation,
        tmp_path,
        train_cfg__max_iters=3,
        train_cfg__val_interval=1,
        default_hooks__checkpoint__save_best='mIoU',
        default_hooks__checkpoint__max_keep_ckpts=1,
    )
    assert events == [
        *('write iter_1.pth', 'write last_checkpoint'),
        *('write best_mIoU_iter_1.pth', 'write iter_1.pth', 'write last_checkpoint'),
        *('write iter_2.pth', 'write last_checkpoint', 'remove iter_1.pth'),
        *('write best_mIoU_iter_2.pth', 'write iter_2.pth', 'write last_checkpoint'),
        'remove best_mIoU_iter_1.pth',
        *('write iter_3.pth', 'write last_checkpoint', 'remove iter_2.pth'),
    ]


def test_full_disk(segmentation, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        if '_2.pth' in os.readlink(f'/proc/self/fd/{descriptor}'):
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(whole_file.os, 'fsync', full)
    with pytest.raises(CheckpointError, match=r'iter_2\.pth could not be written: No space left'):
        train(segmentation, tmp_path, default_hooks__checkpoint__max_keep_ckpts=1)
    assert [path.name for path in tmp_path.glob('iter*')] == ['iter_1.pth']
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / 'iter_1.pth')


def test_checkpoint_of_mmengine_is_resumed_with_a_warning(segmentation, tmp_path, capsys):
    train(segmentation, tmp_path, stop=2, default_hooks__checkpoint__type='CheckpointHook')
    train(segmentation, tmp_path, resume='auto', train_cfg__max_iters=3)
    assert capsys.readouterr().out.count('not one of ResumableCheckpointHook') == 1
