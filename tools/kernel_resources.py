"""Print what each of mala_attention's kernels takes of an NVIDIA GPU, without having one.

Compiles every launch configuration that mala_mm ships, for compute capabilities 8.0 and 9.0, and
reads registers of a thread, bytes of spilled registers of a thread and shared memory of a program
from the result. About a minute the first time; compiled kernels come from Triton's cache later.
"""

import argparse
import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from mala_mm.ops import mala_kernels, rotary_angles

CAPABILITIES = (80, 90)
HEAD_DIMS = (64, 96)  # of the published models' MALA stages
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Row(NamedTuple):
    """``registers`` and ``spill_bytes`` of a thread, ``shared_bytes`` of a program."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int


class CompileOnlyDriver:
    """What Triton asks a GPU's driver when it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnlyKernel:
    """Compiles where a kernel would be launched."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel
        self.compiled = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.compile, grid=grid)

    def compile(self, *args, **options) -> None:
        self.compiled = self.kernel.warmup(*args, **options)


def resources(capability: int, head_dim: int, dtype: torch.dtype) -> list[Row]:
    """Compile the forward and backward kernels with rotation, lepe and gate.

    Replaces Triton's driver for good: call it in a process that launches no kernel.

    Args:
        capability (int): Compute capability of the GPU, 80 for 8.0.
        head_dim (int): ``D``.
        dtype (torch.dtype): Of the inputs.

    Returns:
        list[Row]: One for each kernel, in the order of ``mala_kernels``.
    """
    triton.runtime.driver.set_active(CompileOnlyDriver(capability))
    kernels = {
        name: CompileOnlyKernel(value)
        for name, value in vars(mala_kernels).items()
        if name.endswith('_kernel')
    }
    height, width, heads = 32, 32, 2
    qkvo = torch.empty(2, height * width, 4, heads, head_dim, dtype=dtype)
    q, k, v, gate = qkvo.permute(2, 0, 3, 1, 4)
    lepe = torch.empty(2, height * width, heads, head_dim, dtype=dtype).transpose(1, 2)
    options = (height, width, rotary_angles(head_dim), lepe, gate)
    with mock.patch.multiple(mala_kernels, **kernels):
        out, state = mala_kernels.mala_fwd(q, k, v, *options)
        mala_kernels.mala_bwd(out, q, k, v, state, *options)
    return [read_resources(name, kernel.compiled) for name, kernel in kernels.items()]


def read_resources(name: str, compiled: triton.compiler.CompiledKernel) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, 'kernel.cubin')
        cubin.write_bytes(compiled.asm['cubin'])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, '-res-usage', cubin],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    # nothing is kept on the stack but registers that did not fit, and what cos and sin need
    registers, stack = re.search(r'REG:(\d+) STACK:(\d+)', usage).groups()
    return Row(name, int(registers), int(stack), compiled.metadata.shared)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.exit(2, f'{parser.prog}: error: TRITON_INTERPRET is set: unset it to compile\n')
    print(f'Triton {triton.__version__}: registers / spilled bytes / KiB of shared memory\n')
    heading = None
    for capability in CAPABILITIES:
        for head_dim in HEAD_DIMS:
            for dtype in DTYPES:
                rows = resources(capability, head_dim, dtype)
                if heading is None:
                    names = [row.kernel.removesuffix('_kernel') for row in rows]
                    heading = ['GPU', 'D', 'dtype', *names]
                    print_markdown(heading)
                    print_markdown(['---'] * len(heading))
                cells = [
                    f'{row.registers} / {row.spill_bytes} / {math.ceil(row.shared_bytes / 1024)}'
                    for row in rows
                ]
                print_markdown([f'sm_{capability}', head_dim, f'{dtype}'[len('torch.') :], *cells])


def print_markdown(cells: list) -> None:
    print('|', *(f'{cell} |' for cell in cells), flush=True)


if __name__ == '__main__':
    main()
