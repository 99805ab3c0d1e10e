"""The two implementations as PyTorch operators with a gradient.

Custom operators, because torch.compile sees through them without tracing Triton or a loop.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor, library
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula


def define_operator(name: str, module: str) -> Callable:
    """Return the operator ``mala_mm::NAME`` that runs ``mala_fwd`` and ``mala_bwd`` of a module.

    It takes ``q, k, v, height, width, angle, lepe, gate`` as of ``mala_attention`` and returns the
    output and the state ``[B * H, D + 2, D]`` that the backward needs, besides the inputs.

    Args:
        name (str): Name of the operator; its backward is NAME_backward.
        module (str): Name of the module in this package, imported when the operator is first run.
    """

    @library.custom_op(f'mala_mm::{name}', mutates_args=())
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        height: int,
        width: int,
        angle: Tensor | None,
        lepe: Tensor | None,
        gate: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        implementation = import_module(f'.{module}', __package__)
        return implementation.mala_fwd(q, k, v, height, width, angle, lepe, gate)

    @library.custom_op(f'mala_mm::{name}_backward', mutates_args=())
    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        height: int,
        width: int,
        angle: Tensor | None,
        lepe: Tensor | None,
        gate: Tensor | None,
    ) -> list[Tensor]:
        implementation = import_module(f'.{module}', __package__)
        return implementation.mala_bwd(dout, q, k, v, state, height, width, angle, lepe, gate)

    def gradients(ctx: FunctionCtx, dout: Tensor | None, dstate: None) -> tuple:
        if dout is None:
            return (None,) * 8
        q, k, v, state, angle, lepe, gate = ctx.saved_tensors
        dq, dk, dv, *rest = backward(dout, q, k, v, state, *ctx.size, angle, lepe, gate)
        dgate = rest[0] if gate is not None else None
        dlepe = None
        if ctx.has_lepe:
            dlepe = rest[1] if gate is not None else dout
        return dq, dk, dv, None, None, None, dlepe, dgate

    forward.register_fake(_fake_forward)
    forward.register_autograd(gradients, setup_context=_save_for_backward)
    backward.register_fake(_fake_backward)
    backward.register_autograd(_refuse_second_derivative)
    register_flop_formula(getattr(torch.ops.mala_mm, name))(_forward_flops)
    register_flop_formula(getattr(torch.ops.mala_mm, f'{name}_backward'))(_backward_flops)
    return forward


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    height: int,
    width: int,
    angle: Tensor | None,
    lepe: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, _, head_dim = q.shape
    shape = (batch * heads, head_dim + 2, head_dim)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(shape, dtype=dtype)


def _fake_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    height: int,
    width: int,
    angle: Tensor | None,
    lepe: Tensor | None,
    gate: Tensor | None,
) -> list[Tensor]:
    inputs = [q, k, v] if gate is None else [q, k, v, gate]
    if gate is not None and lepe is not None:
        inputs.append(lepe)
    return [torch.empty_like(x) for x in inputs]


def _save_for_backward(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, height, width, angle, lepe, gate = inputs
    ctx.size = height, width
    ctx.has_lepe = lepe is not None
    if gate is None:  # lepe's gradient is then that of the output
        lepe = None
    ctx.save_for_backward(q, k, v, output[1], angle, lepe, gate)
    ctx.set_materialize_grads(False)  # the state has none


def _refuse_second_derivative(ctx: FunctionCtx, *gradients: Tensor) -> None:
    raise RuntimeError(
        "mala_attention has a second derivative with backend='torch' only "
        "(attn_backend='torch' of MAViT)"
    )


# As FlopCounterMode counts the PyTorch path: z, KV and R phi(q) KV, and twice that backward.
def _forward_flops(q_shape: torch.Size, *args, **kwargs) -> int:
    batch, heads, num_tokens, head_dim = q_shape
    return 2 * batch * heads * num_tokens * head_dim * (2 * head_dim + 1)


def _backward_flops(dout_shape: torch.Size, *args, **kwargs) -> int:
    return 2 * _forward_flops(dout_shape)
