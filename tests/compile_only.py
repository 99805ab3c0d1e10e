"""Prints, as JSON, what Triton's compiler makes of the kernels, without a GPU.

Usage: python compile_only.py TOOLS resources | variants | grids
"""

import json
import sys
from unittest import mock

import torch
import triton

from mala_mm.ops import mala_kernels, rotary_angles

sys.path.insert(0, sys.argv[1])
import kernel_resources


def resources() -> list[list]:
    rows = []
    for capability in (80, 90):
        for head_dim in (64, 96):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                case = (capability, head_dim, str(dtype).removeprefix('torch.'))
                rows += [
                    [*case, *row] for row in kernel_resources.resources(capability, head_dim, dtype)
                ]
    return rows


def variants() -> dict[str, int]:
    """How often each kernel would be compiled for 60 image sizes, 1 or 2 heads, 1 to 3 images."""
    triton.runtime.driver.set_active(kernel_resources.CompileOnlyDriver(90))
    keys = {}

    def do_compile(self, key, *args, **kwargs):
        keys.setdefault(self.fn.__name__, set()).add(key)

    with mock.patch.object(triton.JITFunction, '_do_compile', do_compile):
        for height in (1, 2, 7, 8, 16, 25, 31, 32, 40, 63):
            for width in (1, 3, 8, 16, 33, 64):
                batch, heads = 1 + width % 3, 1 + height % 2
                qkvo = torch.empty(batch, height * width, 4, heads, 64, dtype=torch.bfloat16)
                q, k, v, gate = qkvo.permute(2, 0, 3, 1, 4)
                options = (height, width, rotary_angles(64), q, gate)
                out, state = mala_kernels.mala_fwd(q, k, v, *options)
                mala_kernels.mala_bwd(out, q, k, v, state, *options)
    return {name: len(found) for name, found in keys.items()}


def grids() -> list[tuple[int, ...]]:
    """Of a forward with 70,000 heads."""
    found = []

    class Recorder:
        def __getitem__(self, grid):
            found.append(grid)
            return lambda *args, **kwargs: None

    names = ('mala_fwd_kv_kernel', 'mala_reduce_kernel', 'mala_fwd_out_kernel')
    with mock.patch.multiple(mala_kernels, **dict.fromkeys(names, Recorder())):
        q = torch.empty(700, 100, 1, 16)
        mala_kernels.mala_fwd(q, q, q, 1, 1, None, None, None)
    return found


print(json.dumps(globals()[sys.argv[2]]()))
