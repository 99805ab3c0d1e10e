"""The random number generators of Python, NumPy, PyTorch and CUDA."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def get_generator_states() -> dict[str, Any]:
    """Return the states of this process as tensors and plain values, which load safely."""
    name, keys, *position = np.random.get_state()
    states = dict(
        python=random.getstate(),
        numpy=(name, keys.tolist(), *position),
        torch=torch.get_rng_state(),
    )
    if torch.cuda.is_initialized():  # False in a loader's worker, which must not touch the GPU
        states['cuda'] = torch.cuda.get_rng_state()
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Put the generators back to what :func:`get_generator_states` returned."""
    random.setstate(states['python'])
    np.random.set_state(states['numpy'])
    torch.set_rng_state(states['torch'].cpu())
    if 'cuda' in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states['cuda'].cpu())


@contextmanager
def seeded_generators(*seed: int) -> Iterator[None]:
    """Draw from generators seeded with these numbers (>= 0), then put the old states back.

    CUDA's generator is left alone.
    """
    states = get_generator_states()
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.default_generator.manual_seed(mixed)
    try:
        yield
    finally:
        set_generator_states(states)
