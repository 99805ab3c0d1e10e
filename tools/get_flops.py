"""Print parameters and multiply-adds of a detector or a segmentor, part by part.

One image passes through the model as in testing, by default on the device 'meta', where nothing is
computed: it takes no data set, no weights and no GPU. There are two counts of multiply-adds: all of
them, matrix products of attention included, and those of convolutions and linear layers, which
papers publish. Norms, activations, resizing and RoIAlign are in neither. Box heads get 1000 RoIs,
mask heads 100, at each stage, whatever the weights. Auxiliary heads rest, as in testing.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from mala_mm import cli

DEFAULT_SHAPE = {cli.DETECTION: (800, 1280), cli.SEGMENTATION: (512, 2048)}
aten = torch.ops.aten

BOX_ROIS, MASK_ROIS = 1000, 100  # as the published figures have them


class Cost(NamedTuple):
    """Of a model or a part of it; multiply-adds for one image."""

    parameters: int
    multiply_adds: int
    layer_multiply_adds: int  # of convolutions and linear layers


def extract_no_values(extractor: nn.Module, maps: tuple, rois: Tensor, *args, **kwargs) -> Tensor:
    """RoI features of the right shape; the extractor itself asks boxes for their sizes."""
    return rois.new_zeros(len(rois), extractor.out_channels, *extractor.roi_layers[0].output_size)


class ForwardPass(nn.Module):
    """One image through a model. The counter names modules from here, whatever is called first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> None:
        if getattr(self.model, 'with_roi_head', False):
            self.two_stages(image)
        else:
            shape = tuple(image.shape[-2:])
            names = ('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape')
            sample = BaseDataElement(metainfo=dict.fromkeys(names, shape))
            self.model(image, [sample], mode='tensor')

    def two_stages(self, image: Tensor) -> None:
        from mmdet.models.roi_heads import CascadeRoIHead, SingleRoIExtractor, StandardRoIHead

        roi_head = self.model.roi_head
        if type(roi_head).forward is CascadeRoIHead.forward:
            stages = [(stage,) for stage in range(roi_head.num_stages)]
        elif type(roi_head).forward is StandardRoIHead.forward:
            stages = [()]
        else:
            raise cli.UsageError(
                'the RoI head must be StandardRoIHead, CascadeRoIHead or one with the forward of '
                f'these, got {type(roi_head).__name__}'
            )
        maps = self.model.extract_feat(image)
        if self.model.with_rpn:
            self.model.rpn_head(maps)
        rois = image.new_zeros(BOX_ROIS, 5)
        with mock.patch.object(SingleRoIExtractor, 'forward', extract_no_values):
            for stage in stages:
                roi_head._bbox_forward(*stage, maps, rois)
                if roi_head.with_mask:
                    roi_head._mask_forward(*stage, maps, rois[:MASK_ROIS])


def count(model: nn.Module, shape: tuple[int, int]) -> dict[str, Cost]:
    """Count parameters and multiply-adds of a detector or a segmentor.

    Args:
        model (nn.Module): Built from a config of mmdet or mmseg. The image is on its device. It is
            left in eval mode.
        shape (tuple[int, int]): Height and width of the image in pixels, not padded.

    Returns:
        dict[str, Cost]: By part, such as 'backbone' or 'roi_head.bbox_head'; then, if not zero,
        'other', what lies outside the parts less what two of them share; then 'total'.

    Raises:
        UsageError: If the model cannot take an image of that shape on its device, or the number of
            its RoIs cannot be fixed.
    """
    forward_pass = ForwardPass(model).eval()
    device = next(model.parameters()).device
    try:
        with (
            torch.no_grad(),
            # for what the model makes on its way; it also keeps nn.MultiheadAttention off its fast
            # path, for which the counter has no formula
            torch.device(device),
            sdpa_kernel(SDPBackend.MATH),  # matrix products, the same on every device
            FlopCounterMode(display=False) as counter,
        ):
            forward_pass(torch.zeros(1, 3, *shape))
    except cli.UsageError:
        raise
    except Exception as error:  # whatever a model raises
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        hint = '; try --device cpu' if device.type == 'meta' else ''
        raise cli.UsageError(
            f'{type(model).__name__} cannot take an image of {shape[0]}x{shape[1]} on {device}: '
            f'{reason}{hint}'
        ) from error

    counts = counter.get_flop_counts()
    parts = {
        name: Cost(
            number_of_parameters(part),
            multiply_adds(counts, f'ForwardPass.model.{name}', part),
            layer_multiply_adds(counts, f'ForwardPass.model.{name}', part),
        )
        for name, part in parts_of(model)
    }
    total = Cost(
        number_of_parameters(model),
        counter.get_total_flops() // 2,
        layer_multiply_adds(counts, 'ForwardPass.model', model),
    )
    parts = {name: cost for name, cost in parts.items() if any(cost)}
    other = Cost(*(whole - sum(each) for whole, *each in zip(total, *parts.values(), strict=True)))
    if any(other):
        parts['other'] = other
    return {**parts, 'total': total}


def parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the model; of a RoI head, its children."""
    parts = []
    for name, part in model.named_children():
        if name == 'roi_head':
            parts += [(f'{name}.{child}', module) for child, module in part.named_children()]
        else:
            parts.append((name, part))
    return parts


def number_of_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def multiply_adds(counts: dict, name: str, module: nn.Module) -> int:
    """Of a module that was called, or else of the modules in it that were."""
    if name in counts:
        return sum(counts[name].values()) // 2
    return sum(
        multiply_adds(counts, f'{name}.{child}', part) for child, part in module.named_children()
    )


def layer_multiply_adds(counts: dict, name: str, module: nn.Module) -> int:
    """As `multiply_adds`, of convolutions and linear layers."""
    if isinstance(module, (_ConvNd, nn.Linear)):
        return multiply_adds(counts, name, module)
    if isinstance(module, nn.MultiheadAttention):  # its linear layers are not called as modules
        return sum(counts.get(name, {}).get(op, 0) for op in (aten.mm, aten.addmm)) // 2
    return sum(
        layer_multiply_adds(counts, f'{name}.{child}', part)
        for child, part in module.named_children()
    )


def build_model(cfg: Config) -> nn.Module:
    """The model of a config, with random weights.

    Raises:
        UsageError: If the config has no model or one that cannot be built.
    """
    if not cfg.get('model'):
        raise cli.UsageError(f'config {cfg.filename} has no model')
    for owner in (cfg.model, cfg.model.get('backbone') or {}):
        owner.pop('pretrained', None)  # some backbones load it while they are built
    try:
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            return MODELS.build(cfg.model)
    except (AssertionError, ImportError, KeyError, TypeError, ValueError) as error:
        reason = ' '.join(str(error.args[0] if error.args else error).split())
        raise cli.UsageError(f'the model of {cfg.filename} cannot be built: {reason}') from error


def move(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise cli.UsageError(f'--device {device} cannot be used: {reason}') from error


def print_table(costs: dict[str, Cost]) -> None:
    print('| part | parameters (M) | multiply-adds (G) | of convolutions and linear layers (G) |')
    print('|---|---|---|---|')
    for name, cost in costs.items():
        print(
            f'| {name} | {cost.parameters / 1e6:.1f} | {cost.multiply_adds / 1e9:.1f} '
            f'| {cost.layer_multiply_adds / 1e9:.1f} |'
        )


def pixels(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f'expected a positive number of pixels, got {text!r}')
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--shape',
        nargs=2,
        type=pixels,
        metavar=('H', 'W'),
        help='height and width of the image [800 1280 in detection, 512 2048 in segmentation]',
    )
    parser.add_argument(
        '--device',
        default='meta',
        help='cpu or cuda, for models whose way depends on values [meta, which computes none]',
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the exact counts as well')
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    try:
        cfg = cli.read_config(args.config)
        shape = tuple(args.shape or DEFAULT_SHAPE[cfg.default_scope])
        costs = count(move(build_model(cfg), args.device), shape)
        print(f'{args.config} at {shape[0]}x{shape[1]}\n')
        print_table(costs)
        if args.json:
            parts = {name: cost._asdict() for name, cost in costs.items()}
            report = dict(config=args.config, shape=shape, parts=parts)
            args.json.write_text(json.dumps(report, indent=1) + '\n')
    except cli.UsageError as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')
    except OSError as error:
        parser.exit(2, f'{parser.prog}: error: --json {args.json}: {error.strerror}\n')


if __name__ == '__main__':
    main()
