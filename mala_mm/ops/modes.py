"""What else looks on while an operator runs: tracers, compilers, transforms of functions."""

import torch
from torch.autograd import forward_ad

# PyTorch 2.6 lacks it, and has a Triton too old for the kernel
_is_exporting = getattr(torch.compiler, 'is_exporting', torch.jit.is_tracing)


def is_traced() -> bool:
    """Whether a graph is written down that has to do with PyTorch's own operators."""
    return torch.jit.is_tracing() or _is_exporting()


def has_forward_mode() -> bool:
    """Whether forward-mode derivatives are asked for."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether ``torch.func`` is at work; not asked under torch.compile, which keeps it away."""
    return not torch.compiler.is_compiling() and bool(torch._C._functorch.peek_interpreter_stack())


def is_eager() -> bool:
    """Whether nothing looks on but reverse-mode autograd: no fake tensors, no counter either."""
    return not (
        is_traced()
        or torch.compiler.is_compiling()
        or has_forward_mode()
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()
    )
