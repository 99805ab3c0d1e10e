"""The MALA operator. Imports only torch, and triton for the kernel."""

from .mala import BACKENDS, mala_attention
from .rotary import apply_rotary, rotary_angles, rotary_tables

__all__ = ['BACKENDS', 'apply_rotary', 'mala_attention', 'rotary_angles', 'rotary_tables']
