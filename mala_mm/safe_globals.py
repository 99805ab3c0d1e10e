"""The data classes of mmengine's checkpoints, for ``torch.load`` in its safe mode.

PyTorch calls what is allowed here with arguments out of the file, and fills instances of allowed
classes with state out of the file. numpy trusts both: a forged dtype, array state or
``__array_interface__`` reads foreign memory. So nothing is allowed itself: stand-ins check what
they are given, and turn into the real thing once they are filled.
"""

import argparse
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer


def allow_mmengine_checkpoints() -> None:
    """Register the stand-ins with PyTorch."""
    stand_ins = {
        'mmengine.logging.history_buffer.HistoryBuffer': FilledHistoryBuffer,
        'argparse.Namespace': FilledNamespace,
        'builtins.getattr': history_buffer_method,
        'builtins.bytes': no_bytes,
        'numpy.dtype': NumberDtype,
        'numpy.ndarray': NumberArray,
    }
    # a file names these by the module of the numpy that wrote it: numpy 1 or numpy 2
    for package in ('numpy.core', 'numpy._core'):
        stand_ins[f'{package}.multiarray._reconstruct'] = empty_array
        stand_ins[f'{package}.multiarray.scalar'] = number
    torch.serialization.add_safe_globals([(f, name) for name, f in stand_ins.items()])


class FilledHistoryBuffer(HistoryBuffer):
    """A HistoryBuffer of two arrays of numbers; its statistics methods stay mmengine's own."""

    def __init__(self, *_: Any) -> None:
        raise pickle.UnpicklingError('GLOBAL HistoryBuffer called is not allowed')

    def __setstate__(self, state: dict) -> None:
        arrays = {}
        for name in ('_log_history', '_count_history'):
            if not (isinstance(state, dict) and type(state.get(name)) is NumberArray):
                raise pickle.UnpicklingError(f'GLOBAL HistoryBuffer without {name} is not allowed')
            arrays[name] = np.array(state[name])
        if type(state.get('max_length')) is not int:
            raise pickle.UnpicklingError('GLOBAL HistoryBuffer without max_length is not allowed')
        self.__dict__.update(arrays, max_length=state['max_length'])
        self._set_default_statistics()
        self.__class__ = HistoryBuffer


class FilledNamespace(argparse.Namespace):
    """A Namespace whose attributes are no special ones."""

    def __setstate__(self, state: dict) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError('GLOBAL argparse.Namespace of slots is not allowed')
        for name in state:
            if not (isinstance(name, str) and name.isidentifier()) or name.startswith('__'):
                raise pickle.UnpicklingError(
                    f'GLOBAL argparse.Namespace with {name!r} is not allowed'
                )
        self.__dict__.update(state)
        self.__class__ = argparse.Namespace


def history_buffer_method(owner: Any, name: str) -> Callable:
    """``getattr``, for HistoryBuffer's own statistics only."""
    if owner is FilledHistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(HistoryBuffer, name)
    raise pickle.UnpicklingError(f'GLOBAL builtins.getattr of {name!r} is not allowed')


def no_bytes(*content: Any) -> bytes:
    """``bytes``, for the content of an empty array only."""
    if content:
        raise pickle.UnpicklingError(f'GLOBAL builtins.bytes of {content!r} is not allowed')
    return b''


class NumberDtype:
    """``numpy.dtype`` of bool, int, float or complex, as the code and byte order in the file."""

    def __init__(self, code: str, *_: Any) -> None:
        if not (isinstance(code, str) and code[:1] in 'biufc' and code[1:].isdecimal()):
            raise pickle.UnpicklingError(f'GLOBAL numpy.dtype of {code!r} is not allowed')
        self.numpy = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in ('<', '>'):
            self.numpy = self.numpy.newbyteorder(state[1])

    def __reduce__(self) -> tuple:
        return self.numpy.__reduce__()


class NumberArray(np.ndarray):
    """An array of numbers out of a checkpoint. When it is saved, it is a plain array again.

    It is filled once: a tensor made of it would keep pointing at what a second content replaces.
    """

    def __new__(cls, *_: Any) -> 'NumberArray':
        raise pickle.UnpicklingError('GLOBAL numpy.ndarray called is not allowed')

    def __setstate__(self, state: tuple) -> None:
        version, shape, dtype, is_fortran, content = state
        if not (
            not hasattr(self, 'filled')
            and type(dtype) is NumberDtype
            and isinstance(content, bytes)
            and all(type(length) is int and length >= 0 for length in shape)
            and len(content) == math.prod(shape) * dtype.numpy.itemsize
        ):
            raise pickle.UnpicklingError(
                'GLOBAL numpy.ndarray of other than numbers is not allowed'
            )
        self.filled = True
        super().__setstate__((version, shape, dtype.numpy, is_fortran, content))

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def empty_array(*_: Any) -> NumberArray:
    """``numpy._core.multiarray._reconstruct``: the array that the file's content goes into."""
    return np.empty(0).view(NumberArray)


def number(dtype: NumberDtype, content: bytes) -> np.generic:
    """``numpy._core.multiarray.scalar``."""
    if not (type(dtype) is NumberDtype and isinstance(content, bytes)):
        raise pickle.UnpicklingError('GLOBAL numpy scalar of other than a number is not allowed')
    return np.frombuffer(content, dtype.numpy, count=1)[0]
