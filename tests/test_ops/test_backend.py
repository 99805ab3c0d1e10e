"""Which implementation the operator takes, and what it says where the kernel cannot serve."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from mala_mm.models import MAViT
from mala_mm.ops import mala, mala_attention

pytest.importorskip('triton')


def tokens(head_dim=8, dtype=torch.float32):
    return [torch.zeros(1, 1, 6, head_dim, dtype=dtype)] * 3


@pytest.mark.parametrize(
    ('inputs', 'message'),
    [
        (tokens(), 'the kernel takes CUDA tensors, got cpu'),
        (tokens(dtype=torch.float64), 'takes float32, float16 and bfloat16, got torch.float64'),
        (tokens(6), 'head dims that are multiples of 4 up to 128, got 6'),
        (tokens(132), 'head dims that are multiples of 4 up to 128, got 132'),
        ([torch.zeros(0, 1, 6, 8)] * 3, r'at least one head, got the shape \(0, 1, 6, 8\)'),
    ],
)
def test_forced_kernel_that_cannot_serve(inputs, message):
    expected = f"backend='triton' cannot serve: .*{message}; use 'auto' or 'torch'"
    with pytest.raises(RuntimeError, match=expected):
        mala_attention(*inputs, (2, 3), backend='triton')
    assert mala_attention(*inputs, (2, 3)).shape == inputs[0].shape


def test_forced_kernel_gives_no_gradient_for_angles():
    angle = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match='the kernel gives no gradient for angle'):
        mala_attention(*tokens(), (2, 3), angle, backend='triton')
    mala_attention(*tokens(), (2, 3), angle).sum().backward()
    assert angle.grad is not None


def test_forced_kernel_has_no_forward_mode():
    with pytest.raises(RuntimeError, match='the kernel has no forward-mode derivative'):
        torch.func.jvp(
            lambda q: mala_attention(q, q, q, (2, 3), backend='triton'),
            (torch.ones(1, 1, 6, 8),),
            (torch.ones(1, 1, 6, 8),),
        )


@pytest.mark.parametrize(('tokens', 'size'), [(0, (4, 0)), (0, (0, 4)), (4, (-2, -2))])
def test_empty_grid(tokens, size):
    x = torch.zeros(1, 1, tokens, 8)
    with pytest.raises(ValueError, match=f'size must hold the {tokens} tokens of q'):
        mala_attention(x, x, x, size)


def test_no_channels():
    x = torch.zeros(1, 1, 6, 0)
    with pytest.raises(ValueError, match='q must have a channel at least'):
        mala_attention(x, x, x, (2, 3))


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton, got 'cuda'"):
        mala_attention(*tokens(), (2, 3), backend='cuda')
    with pytest.raises(ValueError, match='attn_backend must be one of auto, torch, triton, got 0'):
        MAViT(attn_backend=0)


def test_backbone_passes_its_backend_on():
    model = MAViT(out_indices=(0,), attn_backend='triton')
    with pytest.raises(RuntimeError, match='the kernel takes CUDA tensors, got cpu'):
        model(torch.zeros(1, 3, 8, 8))


@pytest.fixture
def on_cuda():
    """A stand-in for a CUDA tensor, as far as the choice looks at it; nothing remembered."""
    remembering = mala.find_triton_obstacle, mala._warn_of_torch_path
    for function in remembering:
        function.cache_clear()
    yield SimpleNamespace(
        is_cuda=True, device='cuda:0', dtype=torch.float16, shape=torch.Size((1, 1, 6, 8))
    )
    for function in remembering:
        function.cache_clear()


def takes_kernel(tensor, backend='auto'):
    return mala._takes_kernel(backend, tensor, None)


def test_cuda_tensors_take_the_kernel(on_cuda, monkeypatch):
    monkeypatch.setattr(mala, 'find_triton_obstacle', lambda *args: None)
    assert takes_kernel(on_cuda)
    assert not takes_kernel(on_cuda, 'torch')
    on_cuda.dtype = torch.float64
    assert not takes_kernel(on_cuda)


def break_triton(monkeypatch, how):
    if how == 'absent':
        monkeypatch.setitem(sys.modules, 'triton', None)
        return 'import of triton halted'
    if how == 'old':
        monkeypatch.setattr('triton.__version__', '3.5.1')
        return 'the kernel needs Triton 3.6 or newer, found 3.5.1'

    def launch(*args):
        raise RuntimeError('Failed to find C compiler.\nPlease specify via CC')

    # there is no GPU
    monkeypatch.setattr(torch, 'zeros', lambda *args, **kwargs: None)
    monkeypatch.setattr('mala_mm.ops.mala_kernels.mala_fwd', launch)
    return r'Triton does not work here: Failed to find C compiler\.$'


@pytest.mark.parametrize('how', ['absent', 'old', 'no compiler'])
def test_unusable_triton_is_told_once(on_cuda, monkeypatch, how):
    reason = break_triton(monkeypatch, how)
    with pytest.warns(UserWarning, match=f'takes the slower PyTorch path. .*{reason}'):
        assert not takes_kernel(on_cuda)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not takes_kernel(on_cuda)
    with pytest.raises(RuntimeError, match=f"backend='triton' cannot serve: .*{reason[:40]}"):
        takes_kernel(on_cuda, 'triton')


def test_out_of_memory_is_not_remembered(on_cuda, monkeypatch):
    zeros = torch.zeros

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(torch, 'zeros', no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        takes_kernel(on_cuda)
    monkeypatch.setattr(torch, 'zeros', lambda *args, device, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr('mala_mm.ops.mala_kernels.mala_fwd', lambda *args: (None, None))
    monkeypatch.setattr('mala_mm.ops.mala_kernels.mala_bwd', lambda *args: None)
    assert takes_kernel(on_cuda)


def test_operator_needs_torch_alone():
    code = """
import sys
for name in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'triton', 'numpy'):
    sys.modules[name] = None
import torch
from mala_mm.ops import mala_attention, rotary_angles
x = torch.ones(1, 1, 6, 8)
print(mala_attention(x, x, x, (2, 3), rotary_angles(8)).shape)
"""
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True
    )
    assert done.stdout.strip() == 'torch.Size([1, 1, 6, 8])', done.stderr
