"""Resuming from a state that does not fit, and scopes; the strict loading is in test_loading.py."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.registry import DefaultScope
from toy_training import toy_config

from mala_mm import cli
from mala_mm.checkpoint import CheckpointError
from mala_mm.engine import Runner

RUNS = itertools.count()
SGD = dict(type='SGD', lr=0.1, momentum=0.9)


def train(
    work_dir: Path, optimizer: dict = SGD, resume: Path | None = None, **changes: Any
) -> None:
    cfg = toy_config(
        str(work_dir),
        optim_wrapper=dict(optimizer=optimizer),
        experiment_name=f'runner{next(RUNS)}',
        **changes,
    )
    if resume:
        cli.set_resume(cfg, str(resume))
    cli.run(cfg, 'train', [])


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of SGD with momentum, after two iterations."""
    work_dir = tmp_path_factory.mktemp('checkpoint')
    train(work_dir, iterations=2)
    return work_dir / 'iter_2.pth'


@pytest.mark.parametrize(
    ('optimizer', 'told'),
    [
        ('AdamW', 'it has dampening, momentum, nesterov, not amsgrad, betas,'),
        ('Adagrad', 'it has dampening, momentum, nesterov, not eps, init'),
    ],
)
def test_another_optimizer(checkpoint, tmp_path, optimizer, told):
    with pytest.raises(
        CheckpointError, match=f'it is of another optimizer than {optimizer}: {told}'
    ):
        train(tmp_path, dict(type=optimizer, lr=0.1), resume=checkpoint)


def test_optimizer_with_other_settings_goes_on(checkpoint, tmp_path):
    train(tmp_path, dict(SGD, lr=0.01, nesterov=True), resume=checkpoint)
    assert (tmp_path / 'iter_4.pth').is_file()


DAMAGES = {
    'message_hub without scalars': (
        lambda state: state['message_hub'].pop('log_scalars'),
        'AssertionError: .*log_scalars',
    ),
    'message_hub of text': (
        lambda state: state['message_hub'].update(log_scalars='text'),
        'AttributeError: ',
    ),
    'no groups': (lambda state: state['optimizer'].pop('param_groups'), "KeyError: 'param_groups'"),
    'two groups': (
        lambda state: state['optimizer']['param_groups'].append({'params': []}),
        'ValueError: ',
    ),
    'groups of text': (lambda state: state['optimizer'].update(param_groups=['a']), 'TypeError: '),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_state(checkpoint, tmp_path, damage):
    change, told = DAMAGES[damage]
    state = torch.load(checkpoint)
    change(state)
    torch.save(state, tmp_path / 'damaged.pth')
    with pytest.raises(CheckpointError) as error:
        train(tmp_path, resume=tmp_path / 'damaged.pth')
    assert 'damaged.pth cannot be resumed, its training state does not fit' in str(error.value)
    assert error.match(told)
    assert '\n' not in str(error.value)


def test_each_runner_builds_in_its_own_scope(tmp_path, monkeypatch):
    scopes = []
    monkeypatch.setattr(
        'toy_training.ToyDataset.__len__',
        lambda _: scopes.append(DefaultScope.get_current_instance().scope_name) or 8,
    )
    runners = []
    for scope in ('mmdet', 'mmseg'):
        cfg = toy_config(str(tmp_path), default_scope=scope, experiment_name=f'own_{scope}')
        cfg.train_dataloader.sampler.type = 'DefaultSampler'
        runners.append(Runner.from_cfg(copy.deepcopy(cfg)))
    for runner, scope in zip(runners, ('mmdet', 'mmseg'), strict=True):
        scopes.clear()
        runner.train()
        assert set(scopes) == {scope}
    assert DefaultScope.get_current_instance().scope_name == 'mmseg'
