"""The MALA operator and what goes with it. Imports only torch, and triton for the kernel."""

from .depthwise import depthwise_conv2d
from .mala import BACKENDS, mala_attention
from .pointwise import pointwise_conv2d
from .rotary import apply_rotary, rotary_angles, rotary_tables

__all__ = [
    'BACKENDS',
    'apply_rotary',
    'depthwise_conv2d',
    'mala_attention',
    'pointwise_conv2d',
    'rotary_angles',
    'rotary_tables',
]
