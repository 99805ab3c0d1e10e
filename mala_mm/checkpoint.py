"""Reading weights: whatever does not fit is one error that names the file, never a log line."""

import pickle
import re
from typing import Any

from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from torch import nn

CLASSIFIER = ('proj.', 'norm.', 'head.')  # of the published ImageNet models


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, told in one line."""


def read_checkpoint(filename: str, map_location: str = 'cpu') -> dict[str, Any]:
    """Load a checkpoint from a path or a URL, in PyTorch's safe mode.

    Raises:
        CheckpointError: If the file does not exist, is damaged, is no checkpoint or holds code.
    """
    try:
        checkpoint = CheckpointLoader.load_checkpoint(filename, map_location, logger='silent')
    except FileNotFoundError:
        raise CheckpointError(f'checkpoint {filename} does not exist') from None
    except pickle.UnpicklingError as error:
        found = re.search(r'GLOBAL (\S+)', str(error))
        reason = f'it names {found[1]}' if found else 'it is damaged or no checkpoint'
        raise CheckpointError(
            f'checkpoint {filename} was refused: {reason}, where only weights and plain values '
            'are loaded'
        ) from None
    except Exception as error:  # what unpickling a damaged file raises depends on the damage
        raise CheckpointError(
            f'checkpoint {filename} cannot be read: it is damaged or no checkpoint '
            f'({type(error).__name__})'
        ) from None
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f'checkpoint {filename} holds a {type(checkpoint).__name__}, expected a dict of weights'
        )
    return checkpoint


def load_backbone(backbone: nn.Module, filename: str, prefix: str | None = None) -> None:
    """Load a MAViT from a published ImageNet model, a detector, a segmentor or a backbone.

    Takes ``{'model': ...}``, ``{'state_dict': ...}`` or bare weights, with the prefixes
    ``module.`` and ``backbone.`` or without. A classifier is left out; ``extra_norms``, which an
    ImageNet model lacks, keep their initial values; stages that are not built are skipped.

    Args:
        backbone (nn.Module): A :class:`mala_mm.models.MAViT`.
        filename (str): A path or a URL.
        prefix (str, optional): Take the tensors under this prefix only. Defaults to None,
            ``backbone.`` where there is such a prefix.

    Raises:
        CheckpointError: If any other tensor is missing, left over or of another shape. Nothing is
            loaded then.
    """
    weights = read_checkpoint(filename)
    for wrapping in ('state_dict', 'model'):
        if isinstance(weights.get(wrapping), dict):
            weights = weights[wrapping]
            break
    weights = {str(name).removeprefix('module.'): tensor for name, tensor in weights.items()}
    if prefix is None and any(name.startswith('backbone.') for name in weights):
        prefix = 'backbone.'
    if prefix is not None:
        weights = {
            name.removeprefix(prefix).lstrip('.'): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
    own = backbone.state_dict()
    unbuilt = _unbuilt_names(backbone)
    weights = {
        name: tensor
        for name, tensor in weights.items()
        if not name.startswith(CLASSIFIER) and not (unbuilt.match(name) and name not in own)
    }
    problems = {
        'missing': [n for n in own if n not in weights and not n.startswith('extra_norms.')],
        'left over': [n for n in weights if n not in own],
        'of another shape': [
            n for n in own if n in weights and getattr(weights[n], 'shape', None) != own[n].shape
        ],
    }
    told = [f'{len(n)} {kind} ({", ".join(n[:3])})' for kind, n in problems.items() if n]
    if told:
        raise CheckpointError(
            f'checkpoint {filename} does not fit this MAViT of {len(own)} tensors: '
            f'{"; ".join(told)}. Check arch and the file'
        )
    backbone.load_state_dict(weights, strict=False)
    print_log(f'MAViT: {len(weights)} of {len(own)} tensors from {filename}', logger='current')


def _unbuilt_names(backbone: nn.Module) -> re.Pattern:
    """Stages after the last one that is built, its downsampling, and output norms."""
    built = len(backbone.layers)
    later = '|'.join(map(str, range(built, len(backbone.embed_dims)))) or '-'
    return re.compile(rf'layers\.({later})\.|layers\.{built - 1}\.downsample\.|extra_norms\.')
