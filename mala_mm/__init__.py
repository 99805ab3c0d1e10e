"""MAViT backbones with Magnitude-Aware Linear Attention (MALA) for OpenMMLab.

Importing this package makes the last mmengine, mmcv, mmdet and mmsegmentation releases usable on
current PyTorch (see :mod:`mala_mm.compat`); it loads neither mmdet nor mmseg nor Triton.
"""

from pathlib import Path

from . import compat
from .version import __version__

__all__ = ['__version__', 'config_path']


def config_path(name: str) -> str:
    """Absolute path of a config that mala_mm ships, for use as a ``_base_``.

    Args:
        name (str): File name such as ``'cascade_mavit_b_coco.py'``.

    Raises:
        FileNotFoundError: If mala_mm ships no config of that name.
    """
    configs = Path(__file__).resolve().parent / '.mim' / 'configs'
    path = configs / name
    if not path.is_file() or '..' in path.parts or configs not in path.parents:
        shipped = ', '.join(sorted(p.name for p in configs.glob('*.py')))
        raise FileNotFoundError(f'mala_mm ships no config {name!r}; it has: {shipped}')
    return str(path)


compat.apply()
