"""Reading checkpoints: a file that cannot be used is one error that names it and the reason."""

import pickle
import re
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.fileio import get_local_path
from mmengine.runner import CheckpointLoader
from safetensors import safe_open
from torch import Tensor

WRAPPINGS = ('state_dict', 'model')
EMA_WRAPPINGS = ('state_dict_ema', 'model_ema')


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, told in one line."""


def read_checkpoint(filename: str | Path, map_location: str = 'cpu') -> dict[str, Any]:
    """Load a checkpoint in PyTorch's safe mode, or a safetensors file.

    Args:
        filename (str | Path): A path or a URL; safetensors where it ends in ``.safetensors``.
        map_location (str): The device of the tensors, as of ``torch.load``; safetensors go to the
            CPU. Defaults to 'cpu'.

    Returns:
        dict: The file's content; of safetensors ``{'state_dict': tensors, 'meta': texts}``.

    Raises:
        CheckpointError: If the file does not exist, cannot be fetched, is damaged, is no
            checkpoint or holds code.
    """
    filename = str(filename)
    is_remote = '://' in filename
    path = Path(filename).expanduser()
    if not is_remote and path.is_dir():
        raise CheckpointError(f'checkpoint {filename} is a directory, expected a file')
    try:
        if filename.endswith('.safetensors'):
            checkpoint = _read_safetensors(filename if is_remote else str(path))
        else:
            checkpoint = _read_pickle(filename if is_remote else path, map_location)
    except (MemoryError, torch.OutOfMemoryError):
        raise  # nothing is wrong with the file
    except FileNotFoundError:
        raise CheckpointError(f'checkpoint {filename} does not exist') from None
    except (OSError, HTTPException, ImportError) as error:  # ImportError: a storage client's
        if not is_remote and _is_cut_off(path):
            raise CheckpointError(
                f'checkpoint {filename} {_refusal(error, path, is_remote)}'
            ) from None
        verb = 'fetched' if is_remote else 'read'
        raise CheckpointError(f'checkpoint {filename} could not be {verb}: {error}') from None
    except Exception as error:  # what unpickling a damaged file raises depends on the damage
        raise CheckpointError(f'checkpoint {filename} {_refusal(error, path, is_remote)}') from None
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f'checkpoint {filename} holds a {type(checkpoint).__name__}, expected a dict of weights'
        )
    return checkpoint


def _read_pickle(source: str | Path, map_location: str) -> Any:
    if isinstance(source, Path):
        # said here, since an environment variable can turn PyTorch's default around
        return torch.load(source, map_location, weights_only=True)
    return CheckpointLoader.load_checkpoint(source, map_location, logger='silent')


def _is_cut_off(path: Path) -> bool:
    """Whether the file begins as an archive of PyTorch and does not end as one."""
    with suppress(OSError), path.open('rb') as file:
        return file.read(2) == b'PK' and not zipfile.is_zipfile(path)
    return False


def _read_safetensors(filename: str) -> dict[str, Any]:
    with get_local_path(filename) as path, safe_open(path, framework='pt') as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        return dict(state_dict=tensors, meta=file.metadata() or {})


def _refusal(error: Exception, path: Path, is_remote: bool) -> str:
    if not is_remote and _is_cut_off(path):
        return 'cannot be read: it is damaged or cut off'
    is_refused = isinstance(error, pickle.UnpicklingError)
    if is_refused and (found := re.search(r'GLOBAL (\S+)', str(error))):
        return f'was refused: it names {found[1]}, where only weights and plain values are loaded'
    if is_remote:
        return (
            'cannot be read: it is damaged or no checkpoint; where it is kept, in '
            f'{torch.hub.get_dir()}, remove it to fetch it anew'
        )
    with path.open('rb') as file:
        beginning = file.read(20)
    if not beginning:
        return 'cannot be read: it is empty'
    if not beginning.startswith((b'PK', b'\x80')) and path.suffix != '.safetensors':
        return f'cannot be read: it is no checkpoint, it begins with {beginning!r}'
    if is_refused:
        return 'was refused: it holds more than weights and plain values'
    return 'cannot be read: it is damaged or cut off'


def wrapping_of(checkpoint: dict[str, Any], filename: str, ema: bool = False) -> str | None:
    """The entry of a checkpoint that holds the weights; None where they lie at the top.

    Args:
        checkpoint (dict): What `read_checkpoint` returned.
        filename (str): Named in errors.
        ema (bool): Take the averaged weights, ``state_dict_ema`` or ``model_ema``. Defaults to
            False: they are never taken by themselves.

    Raises:
        CheckpointError: If there are only the other weights.
    """
    filled = [name for name, value in checkpoint.items() if isinstance(value, dict) and value]
    averaged = next((name for name in EMA_WRAPPINGS if name in filled), None)
    if ema and averaged is None:
        raise CheckpointError(
            f'checkpoint {filename} holds no EMA weights, expected {" or ".join(EMA_WRAPPINGS)}'
        )
    plain = next((name for name in WRAPPINGS if name in filled), None)
    if not ema and plain is None and averaged is not None:
        raise CheckpointError(
            f'checkpoint {filename} holds EMA weights only ({averaged}): convert it with '
            'tools/model_converters/mala_to_mm.py --ema'
        )
    return averaged if ema else plain


def weights_of(checkpoint: dict[str, Any], filename: str, ema: bool = False) -> dict[str, Tensor]:
    """Take the weights out of ``{'state_dict': ...}``, ``{'model': ...}`` or a bare dict.

    Args:
        checkpoint, filename, ema: As of `wrapping_of`.

    Returns:
        dict[str, Tensor]: Names as in the file; NumPy arrays as tensors.

    Raises:
        CheckpointError: If there are no such weights, or other things among them.
    """
    wrapping = wrapping_of(checkpoint, filename, ema)
    entries = checkpoint if wrapping is None else checkpoint[wrapping]
    weights = {str(name): _tensor(value) for name, value in entries.items()}
    others = {n: _kind(value) for n, value in weights.items() if _kind(value) != 'Tensor'}
    if len(others) == len(weights):
        raise CheckpointError(
            f'checkpoint {filename} holds no weights, expected them at the top or in '
            f'{" or ".join(WRAPPINGS)}; its entries: {first_few(map(str, checkpoint)) or "none"}'
        )
    if others:
        told = first_few(f'{name}: {kind}' for name, kind in others.items())
        raise CheckpointError(
            f'checkpoint {filename} holds {len(others)} entries among its {len(weights)} weights '
            f'that are no plain tensors ({told})'
        )
    return weights


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        try:
            return torch.from_numpy(np.array(value, value.dtype.newbyteorder('=')))
        except TypeError:  # a dtype that PyTorch lacks
            return value
    return value


def _kind(value: Any) -> str:
    if torch.is_tensor(value):
        if value.is_quantized or value.layout != torch.strided:
            return f'{value.layout} {value.dtype}'
        return 'Tensor'
    return type(value).__name__


def is_pretrained(init_cfg: dict) -> bool:
    """Whether an entry of ``init_cfg`` names a checkpoint, with a type or without."""
    kind = init_cfg.get('type', 'Pretrained' if 'checkpoint' in init_cfg else '')
    name = getattr(kind, '__name__', str(kind)).rpartition('.')[2]
    return name in ('Pretrained', 'PretrainedInit')


def first_few(names: Iterable[str]) -> str:
    """Up to three names for a message, with dots where there are more."""
    names = list(names)
    return ', '.join(names[:3] + ['...'] * (len(names) > 3))
