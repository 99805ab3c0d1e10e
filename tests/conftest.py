from pathlib import Path

import pytest

import mala_mm  # noqa: F401 - compat has to act before a test imports mmdet or mmseg

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='session')
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope='session')
def shared() -> Path:
    """Reference values and real data sets that lie beside a developer's checkout."""
    folder = ROOT.parent / 'shared'
    if not folder.is_dir():
        pytest.skip(f'no reference data at {folder.name}/ beside the checkout')
    return folder
