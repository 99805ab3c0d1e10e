"""Tests of the kernel in Triton's interpreter: numbers without a GPU.

The interpreter must be chosen before Triton is imported, so these run in a process of their own,
which `test_kernel.py` starts: ``TRITON_INTERPRET=1 python -m pytest tests/test_ops/interpret``.
"""

import os
from dataclasses import replace

import pytest
import torch

INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'
if not INTERPRETING:
    collect_ignore_glob = ['test_*.py']


@pytest.fixture(autouse=True, scope='session')
def interpreter():
    """All precisions of the GPU compiler; memory that nobody wrote is NaN."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    names = (*options.allowed_dot_input_precisions, 'bf16x3')
    interpreter_builder.options = replace(options, allowed_dot_input_precisions=names)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def large_tiles(monkeypatch):
    """Larger pieces than a GPU gets: the interpreter's time goes by their number and size.

    Returns a function that sets the tokens of a tile, 64 if it is not called.
    """
    from mala_mm.ops import mala_kernels

    def set_tokens(tokens):
        launches = dict.fromkeys(mala_kernels.LAUNCHES, (mala_kernels.Launch(tokens, 4, 1),) * 2)
        monkeypatch.setattr(mala_kernels, 'LAUNCHES', launches)

    set_tokens(64)
    monkeypatch.setattr(mala_kernels, 'ELEMENTS_PER_PROGRAM', 4096)
    return set_tokens


@pytest.fixture
def short_runs(monkeypatch):
    """Several programs for a few tokens."""
    from mala_mm.ops import mala_kernels

    monkeypatch.setattr(mala_kernels, 'MIN_RUN', 50)
