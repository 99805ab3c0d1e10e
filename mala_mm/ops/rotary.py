"""2-D rotary position embedding (MALA, arXiv 2507.00698; RoFormer, arXiv 2104.09864).

The first half of a head's channels turns with the token's row, the second half with its column,
in feature pixels counted from 0. Each angle serves one pair of neighbouring channels.
"""

import torch
from torch import Tensor

from .modes import is_eager


def rotary_angles(head_dim: int) -> Tensor:
    """``10000^(-j / (D/4 - 1))`` for ``j = 0 .. D/4 - 1``, each twice: float32 ``[D/2]``.

    Args:
        head_dim (int): ``D``, a multiple of 4. ``D = 4`` has the one angle 1.
    """
    theta = 1 / 10000 ** torch.linspace(0, 1, head_dim // 4)
    return theta.repeat_interleave(2)


def rotary_tables(
    angle: Tensor, height: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the ``D/2`` channel pairs of every token.

    Args:
        angle (Tensor): ``[D/2]`` as :func:`rotary_angles` gives it.
        height (int): Rows of the token grid.
        width (int): Columns of the token grid.
        dtype (torch.dtype): float32 or float64, the dtype to compute and return.

    Returns:
        tuple[Tensor, Tensor]: cosines and sines, each ``[height * width, D/2]``.
    """
    rows, columns = _axis_angles(angle, height, width, dtype)
    return tuple(_grid(function(rows), function(columns)) for function in (torch.cos, torch.sin))


def rotary_turns(angle: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """The tables of :func:`rotary_tables` as one, complex ``[height * width, D/2]``."""
    return _grid(
        *(torch.polar(torch.ones_like(x), x) for x in _axis_angles(angle, height, width, dtype))
    )


def _axis_angles(angle: Tensor, height: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """``[height, D/4]`` of the rows and ``[width, D/4]`` of the columns."""
    theta = angle[::2].to(dtype)
    return [
        torch.arange(length, device=angle.device, dtype=dtype)[:, None] * theta
        for length in (height, width)
    ]


def _grid(rows: Tensor, columns: Tensor) -> Tensor:
    """Join ``[height, D/4]`` and ``[width, D/4]`` to ``[height * width, D/2]``."""
    size = (len(rows), len(columns), -1)
    return torch.cat([rows[:, None].expand(size), columns[None].expand(size)], dim=-1).flatten(0, 1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs ``(2j, 2j + 1)`` of ``x [..., N, D]`` by tables ``[N, D/2]``."""
    if is_eager():
        # one pass; exporters and compilers do not take complex numbers
        turned = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * torch.complex(
            cos, sin
        )
        return torch.view_as_real(turned).flatten(-2)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
