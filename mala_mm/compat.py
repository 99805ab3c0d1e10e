"""What the last OpenMMLab releases need on current PyTorch, and nothing else.

Each gap is closed only where the package in question is installed:

* mmcv's compiled operators: where ``mmcv._ext`` is missing (mmcv-lite), the torchvision-backed
  :mod:`mala_mm.mmcv_ext` takes its place. A compiled mmcv is used untouched.
* ``torch.load`` reads nothing but tensors and plain containers by default since PyTorch 2.6:
  :mod:`mala_mm.safe_globals` allows the few data classes that mmengine puts into its checkpoints.
  Pickled code is still refused, in a file that mmengine downloads too: there PyTorch's default is
  another one, and two URLs that end alike would share one download.
* ``_base_ = 'mala_mm::NAME.py'`` in configs: mmengine resolves this form for its own projects
  only.
* An inferencer builds its transforms in the scope of the model that was made last, mmdet's or
  mmseg's: the test pipelines of a config that is read name their own.
* mmengine imports ``pkg_resources`` anew for every ``_base_`` out of a wheel: its deprecation
  warning, which a user can do nothing about, is silenced.
"""

import sys
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlparse
from zlib import crc32

import torch


def apply() -> None:
    """Close the gaps; calling it again changes nothing."""
    if find_spec('mmcv') is not None:
        _supply_mmcv_ext()
    if find_spec('mmengine') is not None:
        from .safe_globals import allow_mmengine_checkpoints

        allow_mmengine_checkpoints()
        _load_urls_safely()
        _resolve_mala_mm_bases()
        _scope_test_pipelines()
        warnings.filterwarnings('ignore', 'pkg_resources is deprecated', UserWarning)


def _supply_mmcv_ext() -> None:
    if 'mmcv._ext' in sys.modules:
        return
    locations = find_spec('mmcv').submodule_search_locations
    if PathFinder.find_spec('mmcv._ext', locations) is None:
        from . import mmcv_ext

        sys.modules['mmcv._ext'] = mmcv_ext


def _load_urls_safely() -> None:
    from mmengine.utils import dl_utils

    def load_url(url: str, **options: Any) -> Any:
        # PyTorch keeps a download by the end of its URL alone, and takes it for others that end so
        parsed = urlparse(url)
        name = f'{crc32(url.encode()):08x}-{PurePosixPath(parsed.path).name}'
        options = dict(options, file_name=options.get('file_name') or name, weights_only=True)
        return torch.hub.load_state_dict_from_url(url, **options)

    dl_utils.load_url = load_url
    if 'mmengine.runner.checkpoint' in sys.modules:  # it has taken its own reference
        sys.modules['mmengine.runner.checkpoint'].load_url = load_url


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


def _scope_test_pipelines() -> None:
    from mmengine.config import Config

    read = Config.fromfile
    if read.__module__ == __name__:
        return

    def read_and_scope(*args: Any, **kwargs: Any) -> Config:
        cfg = read(*args, **kwargs)
        dataset = cfg.get('test_dataloader')
        while isinstance(dataset, dict) and 'dataset' in dataset:  # a loader or a wrapper
            dataset = dataset['dataset']
        inner = dataset.get('pipeline') if isinstance(dataset, dict) else None
        for pipeline in (cfg.get('test_pipeline'), inner):
            for transform in pipeline if isinstance(pipeline, list | tuple) else ():
                if cfg.get('default_scope') and isinstance(transform, dict):
                    transform.setdefault('_scope_', cfg.default_scope)
        return cfg

    Config.fromfile = staticmethod(read_and_scope)
