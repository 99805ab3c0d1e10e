"""Memory traffic and memory, counted."""

import numpy as np
import pytest
import torch
from operator_cases import draw
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter
from triton.runtime.interpreter import interpreter_builder

from mala_mm.ops import mala_kernels, rotary_angles


class Accesses:
    """Addresses that a call of the launchers reads or writes, launch by launch."""

    def __init__(self, monkeypatch) -> None:
        self.launches = []
        load, store = (
            interpreter_builder.create_masked_load,
            interpreter_builder.create_masked_store,
        )
        execute = interpreter.GridExecutor.__call__

        def counted_load(ptrs, mask, *args):
            self.launches[-1].append(ptrs.data[mask.data])
            return load(ptrs, mask, *args)

        def counted_store(ptrs, value, mask, *args):
            self.launches[-1].append(ptrs.data[mask.data])
            return store(ptrs, value, mask, *args)

        def counted_execute(executor, *args, **kwargs):
            self.launches.append([])
            return execute(executor, *args, **kwargs)

        monkeypatch.setattr(interpreter_builder, 'create_masked_load', counted_load)
        monkeypatch.setattr(interpreter_builder, 'create_masked_store', counted_store)
        monkeypatch.setattr(interpreter.GridExecutor, '__call__', counted_execute)

    def count(self, tokens: list[torch.Tensor]) -> tuple[int, int]:
        """Accesses to token tensors, and distinct other elements per launch."""
        ranges = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tokens]
        of_tokens, others = 0, 0
        for launch in self.launches:
            addresses = np.concatenate(launch)
            inside = np.zeros(len(addresses), dtype=bool)
            for start, size in ranges:
                inside |= (addresses >= start) & (addresses < start + size)
            of_tokens += int(inside.sum())
            others += len(np.unique(addresses[~inside]))
        return of_tokens, others


@pytest.mark.parametrize('head_dim', [64, pytest.param(96, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    'size', [(64, 64), pytest.param((128, 128), marks=pytest.mark.slow)], ids=['4096', '16384']
)
def test_interpret_traffic(head_dim, size, monkeypatch, large_tiles):
    large_tiles(512)
    # as many programs as an H200 gets
    monkeypatch.setattr(mala_kernels, 'INTERPRETER_PROCESSORS', 132)
    inputs, dout = draw(1, 1, size, head_dim, torch.float32)
    q, k, v, lepe, gate = inputs
    angle = rotary_angles(head_dim)
    elements = q.numel()

    accesses = Accesses(monkeypatch)
    out, state = mala_kernels.mala_fwd(q, k, v, *size, angle, lepe, gate)
    tokens, others = accesses.count([*inputs, out])
    assert tokens == 6 * elements
    if size == (128, 128):
        assert others <= elements

    accesses.launches.clear()
    gradients = mala_kernels.mala_bwd(dout, q, k, v, state, *size, angle, lepe, gate)
    tokens, others = accesses.count([*inputs, dout, *gradients])
    assert tokens == 11 * elements
    if size == (128, 128):
        assert others <= 2 * elements


class Allocations(TorchDispatchMode):
    """Sizes of the tensors that come into being outside the kernels."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.tensors = []  # kept, so that no later one gets the memory of an earlier one
        execute = interpreter.GridExecutor.__call__

        def uncounted_execute(*args, **kwargs):  # the interpreter handles its arguments as tensors
            with _disable_current_modes():
                return execute(*args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, '__call__', uncounted_execute)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.tensors.append(result)
        return result

    def elements(self) -> list[int]:
        storages = {x.untyped_storage().data_ptr(): x for x in self.tensors}
        return [x.untyped_storage().nbytes() // x.element_size() for x in storages.values()]


def test_interpret_allocates_results_and_small_sums_alone(monkeypatch, large_tiles):
    large_tiles(512)
    size, head_dim = (64, 64), 64
    (q, k, v, lepe, gate), dout = draw(1, 1, size, head_dim, torch.float32)
    angle = rotary_angles(head_dim)
    with Allocations(monkeypatch) as forward:
        _, state = mala_kernels.mala_fwd(q, k, v, *size, angle, lepe, gate)
    with Allocations(monkeypatch) as backward:
        mala_kernels.mala_bwd(dout, q, k, v, state, *size, angle, lepe, gate)
    for allocations, results in ((forward, 1), (backward, 5)):
        large = [n for n in allocations.elements() if n > q.numel() // 4]
        assert large == [q.numel()] * results
