"""States of several processes; tests/test_tools/test_resume.py has whole runs of one."""

import logging
from types import SimpleNamespace

import pytest
import torch

from mala_mm.engine import resumable_checkpoint_hook
from mala_mm.engine.generator_states import get_generator_states
from mala_mm.registry import HOOKS


@pytest.fixture
def hook():
    return HOOKS.build(dict(type='mala_mm.ResumableCheckpointHook'))


@pytest.fixture
def states():
    states = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        states.append(get_generator_states())
    return states


@pytest.fixture
def runner():
    return SimpleNamespace(logger=logging.getLogger('test_resumable_checkpoint_hook'))


@pytest.mark.parametrize(('rank', 'seed'), [(0, 7), (1, 8)])
def test_each_process_continues_its_own(hook, runner, states, monkeypatch, rank, seed):
    monkeypatch.setattr(resumable_checkpoint_hook, 'get_rank', lambda: rank)
    monkeypatch.setattr(resumable_checkpoint_hook, 'get_world_size', lambda: 2)
    hook._restore_generators(runner, states)
    drawn = torch.rand(3)
    torch.manual_seed(seed)
    assert torch.equal(drawn, torch.rand(3))


def test_another_number_of_processes_is_told(hook, runner, states, caplog):
    state = torch.get_rng_state()
    hook._restore_generators(runner, states)
    assert torch.equal(torch.get_rng_state(), state)
    (record,) = caplog.records
    assert 'generator states of 2 processes, this run has 1' in record.getMessage()
