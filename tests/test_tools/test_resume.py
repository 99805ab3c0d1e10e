"""An interrupted and resumed training against an uninterrupted one, bit for bit."""

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def detection(tiny_mask_rcnn: Path) -> Config:
    """Epoch-based, of few regions."""
    cfg = Config.fromfile(tiny_mask_rcnn)
    cfg.merge_from_dict(
        {
            'train_cfg.max_epochs': LAST // 2,
            'model.train_cfg.rpn_proposal.nms_pre': 50,
            'model.train_cfg.rcnn.sampler.num': 16,
            'model.test_cfg.rpn.nms_pre': 50,
            'model.test_cfg.rcnn.score_thr': 0.999,
        }
    )
    return _random(cfg)


@pytest.fixture
def segmentation(tiny_semfpn: Path) -> Config:
    """Iteration-based, with a pass over the data every second iteration."""
    cfg = Config.fromfile(tiny_semfpn)
    cfg.merge_from_dict(
        {
            'train_dataloader.batch_size': 1,
            'train_cfg.max_iters': LAST,
            'train_cfg.val_interval': 2,
            'default_hooks.checkpoint.interval': 1,
        }
    )
    return _random(cfg)


def _random(cfg: Config) -> Config:
    """Stochastic depth and random transforms."""
    cfg.randomness = dict(seed=3)
    cfg.model.backbone.arch.drop_path_rate = 0.5
    *first, pack = cfg.train_dataloader.dataset.pipeline
    transforms = [dict(type='RandomFlip', prob=0.5), dict(type='PhotoMetricDistortion')]
    cfg.train_dataloader.dataset.pipeline = [*first, *transforms, pack]
    return cfg


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Train in a folder, as tools/train.py does, until the end or an exception."""
    runs = iter(range(99))

    def train(cfg: Config, folder: str, stop: int = 0, resume: str | None = None) -> Path:
        cfg = copy.deepcopy(cfg)
        cfg.work_dir = str(tmp_path / folder)
        cfg.experiment_name = f'{tmp_path.name}_{next(runs)}'  # mmengine's own ends in the second
        cfg.custom_hooks = [dict(type='StopHook', iteration=stop)]
        warnings = []
        if resume:
            warnings = cli.set_resume(cfg, resume)
            cfg.randomness = dict(seed=None)  # the checkpoint knows the first run's
        cli.add_empty_detections_hook(cfg)
        with monkeypatch.context() as patch:
            patch.setattr(Config, 'pretty_text', '')  # formatting it takes longer than training
            cli.run(cfg, 'train', warnings)
        return Path(cfg.work_dir)

    return train


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


def test_detection_goes_on_after_the_last_finished_epoch(train, detection):
    whole = train(detection, 'whole')
    for stop in (3, 6):
        with pytest.raises(Stopped):
            train(detection, f'stop{stop}', stop)
        parts = train(detection, f'stop{stop}', resume='auto')
        assert_same_training(parts / 'epoch_3.pth', whole / 'epoch_3.pth')


def test_detection_goes_on_within_an_epoch(train, detection):
    detection.default_hooks.checkpoint.update(by_epoch=False, interval=1)
    whole = train(detection, 'whole')
    for iteration in (3, 4):  # in the middle of an epoch, and at its end
        parts = train(detection, f'from{iteration}', resume=str(whole / f'iter_{iteration}.pth'))
        assert_same_training(parts / 'iter_6.pth', whole / 'iter_6.pth')


def test_segmentation_goes_on_with_the_next_iteration(train, segmentation):
    """The worker of the last run loads the same data as a process without workers."""
    whole = train(segmentation, 'whole')
    for stop, num_workers in ((4, 0), (1, 1)):
        with pytest.raises(Stopped):
            train(segmentation, f'stop{stop}', stop)
        segmentation.train_dataloader.update(
            num_workers=num_workers, persistent_workers=num_workers > 0
        )
        parts = train(segmentation, f'stop{stop}', resume='auto')
        assert_same_training(parts / 'iter_6.pth', whole / 'iter_6.pth')


def test_validation_changes_no_number(train, segmentation):
    with_validation = train(segmentation, 'with')
    segmentation.train_cfg.val_interval = 99
    segmentation.val_cfg = segmentation.val_dataloader = segmentation.val_evaluator = None
    without = train(segmentation, 'without')
    assert_same_training(without / 'iter_6.pth', with_validation / 'iter_6.pth')


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


def test_kill_in_the_middle_of_a_checkpoint(train, segmentation, root, tmp_path):
    segmentation.default_hooks.checkpoint.max_keep_ckpts = 1
    whole = train(segmentation, 'whole')
    segmentation.dump(tmp_path / 'config.py')
    tool = [root / 'tools' / 'train.py', tmp_path / 'config.py', '--work-dir', tmp_path / 'killed']
    killed = subprocess.run(
        [sys.executable, '-c', KILL_IN_MID_WRITE, *tool], env={**os.environ, 'OMP_NUM_THREADS': '1'}
    )
    assert killed.returncode == -9
    names = sorted(path.name for path in (tmp_path / 'killed').glob('iter*'))
    assert names == ['iter_2.pth', 'iter_3.pth.partial']
    parts = train(segmentation, 'killed', resume='auto')
    assert_same_training(parts / 'iter_6.pth', whole / 'iter_6.pth')
    assert [path.name for path in parts.glob('iter*')] == ['iter_6.pth']


def test_older_files_go_when_newer_ones_are_there(train, segmentation, monkeypatch):
    """Among them the best one: no moment without a whole checkpoint that last_checkpoint names."""
    events = []

    def record(name: str, action: Callable) -> Callable:
        def recorded(*args: Any) -> None:
            action(*args)
            events.append((name, Path(args[-1]).name))

        return recorded

    monkeypatch.setattr(whole_file.os, 'replace', record('write', os.replace))
    monkeypatch.setattr(LocalBackend, 'remove', record('remove', LocalBackend.remove))
    monkeypatch.setattr(
        'mmseg.evaluation.IoUMetric.compute_metrics',
        lambda metric, results, scores=iter([1, 3, 2]): dict(mIoU=next(scores)),
    )
    segmentation.default_hooks.checkpoint.update(save_best='mIoU', max_keep_ckpts=1)
    segmentation.train_cfg.update(max_iters=3, val_interval=1)
    train(segmentation, 'w')
    assert events == [
        *[('write', name) for name in ('iter_1.pth', 'last_checkpoint')],
        *[('write', name) for name in ('best_mIoU_iter_1.pth', 'iter_1.pth', 'last_checkpoint')],
        *[('write', name) for name in ('iter_2.pth', 'last_checkpoint')],
        ('remove', 'iter_1.pth'),
        *[('write', name) for name in ('best_mIoU_iter_2.pth', 'iter_2.pth', 'last_checkpoint')],
        ('remove', 'best_mIoU_iter_1.pth'),
        *[('write', name) for name in ('iter_3.pth', 'last_checkpoint')],
        ('remove', 'iter_2.pth'),
    ]


def test_full_disk(train, segmentation, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        if '_2.pth' in os.readlink(f'/proc/self/fd/{descriptor}'):
            raise OSError(28, 'No space left on device')

    segmentation.default_hooks.checkpoint.max_keep_ckpts = 1
    monkeypatch.setattr(whole_file.os, 'fsync', full)
    with pytest.raises(CheckpointError, match=r'iter_2\.pth could not be written: No space left'):
        train(segmentation, 'w')
    work_dir = tmp_path / 'w'
    assert [path.name for path in work_dir.glob('iter*')] == ['iter_1.pth']
    assert (work_dir / 'last_checkpoint').read_text() == str(work_dir / 'iter_1.pth')


def test_checkpoint_of_mmengine_is_resumed_with_a_warning(train, segmentation, tmp_path, capsys):
    segmentation.default_hooks.checkpoint.type = 'CheckpointHook'
    with pytest.raises(Stopped):
        train(segmentation, 'w', stop=2)
    segmentation.default_hooks.checkpoint.type = 'mala_mm.ResumableCheckpointHook'
    train(segmentation, 'w', resume='auto')
    assert capsys.readouterr().out.count('it draws other random numbers') == 1
