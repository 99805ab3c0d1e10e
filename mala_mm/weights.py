"""Fitting weights to a model: they fit as a whole, or one error says what does not."""

import re
from collections import Counter, defaultdict

from mmengine.logging import print_log
from torch import Tensor, nn

from .checkpoint import CheckpointError, first_few, read_checkpoint, weights_of
from .models import MAViT

CLASSIFIER = ('proj.', 'norm.', 'head.')  # of the published ImageNet models
BACKBONE_NAME = re.compile(r'(.*?)(?:patch_embed\.proj|layers\.\d+\.blocks\.\d+|extra_norms)\.')


def load_backbone(backbone: MAViT, filename: str, prefix: str | None = None) -> None:
    """Load a MAViT from a published ImageNet model, a detector, a segmentor or a backbone.

    Args:
        backbone (MAViT): Its ``extra_norms`` keep their initial values where the file has none.
        filename (str): A path or a URL, see :func:`mala_mm.checkpoint.read_checkpoint`.
        prefix (str, optional): Take the tensors under this prefix only. Defaults to None, the
            prefix that the file's MAViT has.

    Raises:
        CheckpointError: If the file cannot be used, or another tensor than a classifier's is
            missing, left over or of another shape. Nothing is loaded then.
    """
    weights = weights_of(read_checkpoint(filename), filename)
    backbone.load_state_dict(fit_backbone(backbone, weights, filename, prefix), strict=False)


def fit_backbone(
    backbone: MAViT, weights: dict[str, Tensor], filename: str, prefix: str | None = None
) -> dict[str, Tensor]:
    """What :func:`load_backbone` loads, under the backbone's own names."""
    if prefix is None:
        prefix = backbone_prefix(weights, filename)
    elif prefix:
        prefix = prefix.rstrip('.') + '.'
    weights = without_prefix(weights, prefix or '')
    if not weights:
        raise CheckpointError(f'checkpoint {filename} has no tensor under the prefix {prefix}')
    classifier = [name for name in weights if name.startswith(CLASSIFIER)]
    weights = {name: value for name, value in weights.items() if name not in classifier}
    norms = {name for name in backbone.state_dict() if name.startswith('extra_norms.')}
    fitted = _fit(backbone, weights, filename, optional=norms)
    if classifier:
        _log(f'left out the classifier: {", ".join(classifier)}')
    if kept := norms - fitted.keys():
        _log(f'keep their initial values: {", ".join(sorted(kept))}')
    return fitted


def fit_model(
    model: nn.Module, weights: dict[str, Tensor], filename: str, fine_tune: bool = False
) -> dict[str, Tensor]:
    """The weights of a whole detector or segmentor, under the model's own names.

    Args:
        model (nn.Module): Without wrappers such as DistributedDataParallel.
        weights (dict[str, Tensor]): Of a file, with ``module.`` before the names or without.
        filename (str): Named in errors and in the log.
        fine_tune (bool): Leave out layers that differ by nothing but the number of classes; they
            keep their initial values. Defaults to False.

    Raises:
        CheckpointError: If any other tensor is missing, left over or of another shape.
    """
    own = model.state_dict()
    if not own.keys() & weights.keys():
        weights = {name.removeprefix('module.'): value for name, value in weights.items()}
    if not own.keys() & weights.keys():
        prefix = backbone_prefix(weights, filename)
        if prefix is not None and not prefix.endswith('backbone.'):
            raise CheckpointError(
                f'checkpoint {filename} holds a backbone alone: start from it with '
                'model.backbone.init_cfg.type=Pretrained '
                f'model.backbone.init_cfg.checkpoint={filename}'
            )
        outer = (prefix or '').removesuffix('backbone.')
        weights = {name.removeprefix(outer): value for name, value in weights.items()}
    class_layers = _class_layers(model, weights) if fine_tune else {}
    weights = {name: value for name, value in weights.items() if name not in class_layers}
    fitted = _fit(model, weights, filename, optional=set(class_layers))
    if class_layers:
        names = defaultdict(list)
        for name, counts in class_layers.items():
            names[counts].append(name)
        told = (f'{old} -> {new} classes: {", ".join(n)}' for (old, new), n in names.items())
        _log(f're-initialised, {"; ".join(told)}')
    return fitted


def without_prefix(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names start with the prefix, without it."""
    return {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)}


def backbone_prefix(weights: dict[str, Tensor], filename: str) -> str | None:
    """What stands before a MAViT's own names, such as ``module.backbone.``; None without a MAViT.

    Raises:
        CheckpointError: If there are several MAViTs.
    """
    found = Counter(match[1] for match in map(BACKBONE_NAME.match, weights) if match)
    if not found:
        return None
    (prefix, _), *others = found.most_common()
    if others:
        raise CheckpointError(
            f'checkpoint {filename} holds several backbones, such as {prefix}* and '
            f'{others[0][0]}*: choose one with init_cfg.prefix'
        )
    return prefix


def published_arch(weights: dict[str, Tensor]) -> str | None:
    """The arch whose widths and depths the weights have: 't', 's', 'b', 'l' or None."""
    blocks = defaultdict(list)  # the width of each, by stage
    for name, value in weights.items():
        if match := re.search(r'layers\.(\d)\.blocks\.\d+\.gamma_1$', name):
            blocks[int(match[1])].append(value.numel())
    for arch, settings in MAViT.arch_settings.items():
        stages = zip(settings['embed_dims'], settings['depths'], strict=True)
        expected = {stage: [width] * depth for stage, (width, depth) in enumerate(stages)}
        if blocks and all(expected.get(stage) == widths for stage, widths in blocks.items()):
            return arch
    return None


def _fit(
    model: nn.Module, weights: dict[str, Tensor], filename: str, optional: set[str]
) -> dict[str, Tensor]:
    own = model.state_dict()
    fitted = _without_unbuilt(model, weights)
    optional = optional | {name for name in own if name.endswith('RoPE.angle')}
    common = [name for name in own if name in fitted]
    problems = {
        'missing': [name for name in own if name not in fitted and name not in optional],
        'left over': [name for name in fitted if name not in own],
        'of another shape': [
            f'{name} {tuple(fitted[name].shape)} instead of {tuple(own[name].shape)}'
            for name in common
            if fitted[name].shape != own[name].shape
        ],
        'of another dtype': [
            f'{name} {fitted[name].dtype} instead of {own[name].dtype}'
            for name in common
            if own[name].is_floating_point() and not fitted[name].is_floating_point()
        ],
    }
    told = [
        f'{len(found)} {kind} ({first_few(found)})' for kind, found in problems.items() if found
    ]
    if told:
        arch = published_arch(weights)
        if arch and arch != published_arch(own):
            told.append(f'this looks like MAViT-{arch.upper()}')
        raise CheckpointError(
            f'checkpoint {filename} does not fit this {type(model).__name__} of {len(own)} '
            f'tensors: {"; ".join(told)}'
        )
    _log(f'{type(model).__name__}: {len(fitted)} of {len(own)} tensors from {filename}')
    return fitted


def _without_unbuilt(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without those that a MAViT in the model would have with other out_indices."""
    for path, module in model.named_modules():
        if isinstance(module, MAViT):
            prefix = path and f'{path}.'
            unbuilt = {
                prefix + n for n in without_prefix(weights, prefix) if _is_unbuilt(module, n)
            }
            if unbuilt:
                _log(
                    f'left out {len(unbuilt)} tensors that out_indices={module.out_indices} does '
                    f'not build: {first_few(name for name in weights if name in unbuilt)}'
                )
            weights = {name: value for name, value in weights.items() if name not in unbuilt}
    return weights


def _is_unbuilt(backbone: MAViT, name: str) -> bool:
    match = re.match(r'(layers|extra_norms)\.([0-3])\.(downsample)?', name)
    if match is None:
        return False
    stage, last = int(match[2]), backbone.out_indices[-1]
    if match[1] == 'extra_norms':
        return stage not in backbone.out_indices
    return stage > last or (stage == last < 3 and match[3] is not None)


def _class_layers(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Tensors that differ by nothing but the number of classes, with the file's and the model's.

    A layer of a head has so many rows for each class, and some layers have rows for the background
    too. What differs must do so for one and the same number of classes in the file.
    """
    heads = {
        name: module.num_classes
        for name, module in model.named_modules()
        if 'rpn' not in name and isinstance(getattr(module, 'num_classes', None), int)
    }
    readings = {}
    for name, value in model.state_dict().items():
        loaded = weights.get(name)
        head = next((head for head in heads if name.startswith(f'{head}.')), None)
        if loaded is None or loaded.shape == value.shape or head is None:
            continue
        if loaded.ndim != value.ndim or loaded.shape[1:] != value.shape[1:]:
            continue
        readings[name] = {}
        for background in (0, 1):
            count = heads[head] + background
            rows, rest = divmod(len(value), count)
            if rows and not rest and len(loaded) % rows == 0:
                readings[name][len(loaded) // rows - background] = (len(loaded) // rows, count)
    shared = set.intersection(*map(set, readings.values())) if readings else set()
    has_classifier = any(re.search('cls|seg|logits', name) for name in readings)
    if not (has_classifier and shared):
        return {}
    return {name: counts[max(shared)] for name, counts in readings.items()}


def _log(message: str) -> None:
    print_log(message, logger='current')
