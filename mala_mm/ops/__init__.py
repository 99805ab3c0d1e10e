"""The MALA operator. Needs torch alone."""

from .mala import mala_attention
from .rotary import apply_rotary, rotary_angles, rotary_tables

__all__ = ['apply_rotary', 'mala_attention', 'rotary_angles', 'rotary_tables']
