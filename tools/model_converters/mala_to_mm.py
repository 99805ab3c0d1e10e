"""Turn a published classifier, detector or segmentor into a small file of tensors alone.

mmdet 2 and mmseg 0 name the tensors of these models as mmdet 3 and mmseg 1 do, and order classes
and boxes alike. So what goes is the training state, the classifier and prefixes.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import mala_mm  # noqa: F401  prepares current PyTorch for mmengine, mmdet and mmseg
from mala_mm import cli
from mala_mm.checkpoint import CheckpointError, first_few, read_checkpoint, weights_of, wrapping_of
from mala_mm.weights import (
    CLASSIFIER,
    backbone_prefix,
    fit_backbone,
    fit_model,
    published_arch,
    without_prefix,
)

SUFFIXES = ('.pth', '.safetensors')


def convert(loaded: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Drop prefixes and a classifier, and print what was renamed, dropped and kept.

    Returns:
        dict[str, Tensor]: A detector's or segmentor's backbone under ``backbone.``, one that
        stands alone under its own names.

    Raises:
        CheckpointError: If there is no MAViT among the weights, or there are several.
    """
    prefix = backbone_prefix(loaded, source)
    if prefix is None:
        raise CheckpointError(f'checkpoint {source} holds no MAViT, but {first_few(loaded)}')
    outer = prefix.removesuffix('backbone.')
    stands_alone = outer == prefix
    weights = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in without_prefix(loaded, outer).items()
        if not (stands_alone and name.startswith(CLASSIFIER))
    }
    dropped = loaded.keys() - {outer + name for name in weights}
    renamed = f'{len(weights)} tensors, {outer}* -> *' if outer else 'nothing'
    print(f'renamed: {renamed}')
    print(f'dropped: {", ".join(sorted(dropped)) or "no tensors"}')
    values = sum(value.numel() for value in weights.values())
    print(f'kept:    {len(weights)} tensors, {values:,} values')
    return weights


def class_names(meta: dict) -> dict:
    """``dataset_meta`` of a checkpoint's meta, or its form in mmdet 2 and mmseg 0."""
    names = meta.get('dataset_meta')
    if not isinstance(names, dict):
        names = {name.lower(): meta[name] for name in ('CLASSES', 'PALETTE') if name in meta}
    return dict(dataset_meta=plain(names)) if names else {}


def plain(value: Any) -> Any:
    """The value with lists for NumPy arrays, at any depth."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def check(weights: dict[str, Tensor], config: str, source: str) -> None:
    """Build the model of `config` and load the weights strictly.

    Raises:
        CheckpointError: If they do not fit.
    """
    from mmengine.registry import MODELS, init_default_scope

    cfg = cli.read_config(config)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    if backbone_prefix(weights, source):
        model.load_state_dict(fit_model(model, weights, source), strict=False)
    else:
        model = model.backbone
        model.load_state_dict(fit_backbone(model, weights, source), strict=False)


def write(weights: dict[str, Tensor], meta: dict, path: Path) -> None:
    if path.suffix == '.pth':
        torch.save(dict(meta=meta, state_dict=weights), path)
        return
    texts = {n: value if isinstance(value, str) else json.dumps(value) for n, value in meta.items()}
    safetensors.torch.save_file(weights, path, texts)


def run(source: str, destination: str, ema: bool = False, config: str | None = None) -> None:
    """Convert `source` into `destination`, which appears when it is complete and checked.

    Raises:
        cli.UsageError: If the destination cannot be written or is the source.
        CheckpointError: If the source cannot be used or does not fit the config's model.
    """
    source, target = os.path.expanduser(source), Path(destination).expanduser()
    if target.suffix not in SUFFIXES:
        raise cli.UsageError(f'{target}: expected NAME{" or NAME".join(SUFFIXES)}')
    if not target.parent.is_dir() or target.is_dir():
        raise cli.UsageError(f'{target} cannot be written: expected a file in a folder that exists')
    if '://' in source:
        raise cli.UsageError(f'{source}: expected a file, download it first')
    checkpoint = read_checkpoint(source)
    if target.exists() and target.samefile(source):
        raise cli.UsageError(f'{target} is the source itself, give another name')

    wrapping = wrapping_of(checkpoint, source, ema)
    print(f'source:  {source}, {wrapping or "weights at the top"}')
    weights = convert(weights_of(checkpoint, source, ema), source)
    if wrapping is not None:
        others = ', '.join(str(name) for name in checkpoint if name != wrapping)
        print(f'dropped entries of the file: {others or "none"}')
    meta = dict(
        source=Path(source).name,
        sha256=hashlib.sha256(Path(source).read_bytes()).hexdigest(),
        arch=published_arch(weights) or 'custom',
        **class_names(found if isinstance(found := checkpoint.get('meta'), dict) else {}),
    )
    partial = target.with_name(f'.{target.stem}.partial{target.suffix}')
    try:
        try:
            write(weights, meta, partial)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            reason = str(error).partition('\n')[0]
            raise cli.UsageError(f'{target} cannot be written: {reason}') from None
        if config is not None:
            check(weights_of(read_checkpoint(partial), destination), config, source)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    print(f'written: {target}, {target.stat().st_size / 1e6:.1f} MB, MAViT arch {meta["arch"]}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('source', metavar='SRC', help='published checkpoint')
    parser.add_argument('destination', metavar='DST', help='NAME.pth or NAME.safetensors')
    parser.add_argument('--ema', action='store_true', help='take the averaged (EMA) weights')
    parser.add_argument(
        '--check', metavar='CONFIG', help="load the result strictly into this config's model"
    )
    args = parser.parse_args()
    try:
        run(args.source, args.destination, args.ema, args.check)
    except (cli.UsageError, CheckpointError) as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')


if __name__ == '__main__':
    main()
