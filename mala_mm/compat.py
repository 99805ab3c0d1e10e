"""What the last OpenMMLab releases need on current PyTorch, and nothing else.

Each gap is closed only where the package in question is installed:

* mmcv's compiled operators: where ``mmcv._ext`` is missing (mmcv-lite), the torchvision-backed
  :mod:`mala_mm.mmcv_ext` takes its place. A compiled mmcv is used untouched.
* ``torch.load`` reads nothing but tensors and plain containers by default since PyTorch 2.6:
  the few data classes that mmengine puts into its checkpoints are allowed by name. Pickled code
  is still refused.
* ``_base_ = 'mala_mm::NAME.py'`` in configs: mmengine resolves this form for its own projects
  only.
* mmengine imports ``pkg_resources`` anew for every ``_base_`` out of a wheel: its deprecation
  warning, which a user can do nothing about, is silenced.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import torch


def apply() -> None:
    """Close the gaps; calling it again changes nothing."""
    if find_spec('mmcv') is not None:
        _supply_mmcv_ext()
    if find_spec('mmengine') is not None:
        _allow_mmengine_checkpoints()
        _resolve_mala_mm_bases()
        warnings.filterwarnings('ignore', 'pkg_resources is deprecated', UserWarning)


def _supply_mmcv_ext() -> None:
    if 'mmcv._ext' in sys.modules:
        return
    locations = find_spec('mmcv').submodule_search_locations
    if PathFinder.find_spec('mmcv._ext', locations) is None:
        from . import mmcv_ext

        sys.modules['mmcv._ext'] = mmcv_ext


def _allow_mmengine_checkpoints() -> None:
    import numpy as np
    from mmengine.logging import HistoryBuffer

    array_reduce = np.empty(0).__reduce__()[0]
    scalar_reduce = np.float64(0).__reduce__()[0]
    dtype_classes = {type(np.dtype(code)) for code in '?bhilqBHILQefdgFDGSU'}
    torch.serialization.add_safe_globals(
        [
            HistoryBuffer,
            argparse.Namespace,
            np.ndarray,
            np.dtype,
            *dtype_classes,
            # a file names these by the module of the numpy that wrote it: numpy 1 or numpy 2
            *[
                (function, f'{package}.multiarray.{name}')
                for package in ('numpy.core', 'numpy._core')
                for function, name in ((array_reduce, '_reconstruct'), (scalar_reduce, 'scalar'))
            ],
            (_history_buffer_method, 'builtins.getattr'),
        ]
    )


def _history_buffer_method(owner: Any, name: str) -> Callable:
    """Serve the one use of ``getattr`` in mmengine's checkpoints, HistoryBuffer's statistics.

    The real ``getattr`` would let a pickle reach any attribute of any allowed object.
    """
    from mmengine.logging import HistoryBuffer

    if owner is HistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(HistoryBuffer, name)
    raise AttributeError(f'refused in a checkpoint: getattr({owner!r}, {name!r})')


def _resolve_mala_mm_bases() -> None:
    from mmengine.config import Config

    resolve = Config._get_cfg_path
    if resolve.__module__ == __name__:
        return

    def resolve_with_mala_mm(cfg_path: str, filename: str) -> tuple[str, str | None]:
        package, _, name = cfg_path.partition('::')
        if package == 'mala_mm' and name:
            from . import config_path

            return config_path(name), None
        return resolve(cfg_path, filename)

    Config._get_cfg_path = staticmethod(resolve_with_mala_mm)
