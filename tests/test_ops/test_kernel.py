"""The Triton kernel without a GPU: in the interpreter, and through the compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip('triton')

INTERPRET = Path(__file__).parent / 'interpret'
FILES = sorted(path.name for path in INTERPRET.glob('test_*.py'))


@pytest.mark.parametrize('file', FILES)
def test_in_the_interpreter(root, file):
    environment = os.environ | {'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', INTERPRET / file]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert ' passed' in done.stdout


def compile_only(root: Path, what: str):
    environment = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    command = [sys.executable, root / 'tests' / 'compile_only.py', root / 'tools', what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5_000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(
    not triton.__version__.startswith('3.8.'), reason='another Triton allocates other registers'
)
def test_no_spilled_registers_and_little_shared_memory(root):
    rows = compile_only(root, 'resources')
    assert len(rows) == 2 * 2 * 3 * 6  # cards, head dims, dtypes, kernels
    for _, head_dim, dtype, kernel, registers, spill_bytes, shared_bytes in rows:
        case = (kernel, head_dim, dtype)
        assert 0 < registers <= 255, case
        allowed = 256 if (head_dim, dtype) == (96, 'float16') else 0
        if kernel == 'mala_rotary_kernel':
            allowed = 32  # not registers: cos and sin of large angles
        assert spill_bytes <= allowed, case
        assert shared_bytes <= 99 * 1024, case


def test_grid_is_flat(root):
    # the other axes of a grid stop at 65,535
    assert compile_only(root, 'grids') == [[70_000], [70_000 * 2], [70_000]]


def test_image_sizes_do_not_recompile(root):
    variants = compile_only(root, 'variants')
    assert len(variants) == 6
    assert set(variants.values()) == {1}, variants
