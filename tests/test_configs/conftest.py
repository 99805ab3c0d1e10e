import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from mmengine.config import Config

import mala_mm  # noqa: F401  # supplies mmcv's ops before mmdet or mmseg is imported

CONFIGS = Path(__file__).parents[2] / 'configs'


@functools.cache
def _read(name: str) -> Config:
    return Config.fromfile(CONFIGS / f'{name}.py')


@pytest.fixture(scope='session')
def load_config() -> Callable[[str], Config]:
    """Returns a function from a config's name, without ``.py``, to a fresh ``Config``."""
    return lambda name: copy.deepcopy(_read(name))
