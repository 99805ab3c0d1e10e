import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import mala_mm  # noqa: F401 - compat has to act before a test imports mmdet or mmseg

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='session')
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope='session')
def tool(root: Path) -> Callable[[str], ModuleType]:
    """Import tools/NAME.py."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f'tool_{name}', root / 'tools' / f'{name}.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope='session')
def shared() -> Path:
    """Reference values and real data sets that lie beside a developer's checkout."""
    folder = ROOT.parent / 'shared'
    if not folder.is_dir():
        pytest.skip(f'no reference data at {folder.name}/ beside the checkout')
    return folder
