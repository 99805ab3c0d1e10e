"""Time and memory of MAViT backbones, their peers and whole detectors or segmentors, in one run.

The variants take turns, so that a busy or throttled machine slows all of them; figures are
medians. docs/benchmarks.md explains the columns and has the commands behind its tables.
"""

import argparse
import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from benchmark_mala import DTYPES, Table
from torch import Tensor, nn

import mala_mm  # before mmdet or mmseg
from mala_mm import cli
from mala_mm.models import MAViT

PEERS = {  # of mmdet, with its defaults and all four outputs
    'resnet50': dict(type='ResNet', depth=50),
    'swin-t': dict(type='SwinTransformer'),
    'pvtv2-b2': dict(
        type='PyramidVisionTransformerV2', embed_dims=64, num_layers=[3, 4, 6, 3], init_cfg=None
    ),
}
MODES = ('forward', 'training')
SHAPES = ((800, 1280), (512, 512))
SWEEP = tuple((side, side) for side in (224, 320, 448, 512, 640, 768, 896, 1024, 1280, 1536))
WARM_UP_RUNS = dict(cpu=1, cuda=3)
PACKAGES = ('torch', 'triton', 'numpy', 'mmengine', 'mmcv-lite', 'mmcv', 'mmdet', 'mmsegmentation')
ENVIRONMENT = ('OMP_', 'KMP_', 'MKL_', 'MALLOC_', 'GLIBC_TUNABLES', 'LD_PRELOAD', 'PYTORCH_')


# Variants


class Variant(NamedTuple):
    """A model and how to run it."""

    build: Callable[[], nn.Module]
    channels_last: bool = False
    compiled: bool = False

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def model(self, args: argparse.Namespace) -> nn.Module:
        """The model on the device, in the dtype and the memory format of its run."""
        torch.manual_seed(0)
        dtype = torch.float32 if args.amp else DTYPES[args.dtype]
        model = self.build().to(args.device, dtype, memory_format=self.memory_format)
        return torch.compile(model, dynamic=False) if self.compiled else model


def build_peer(name: str) -> nn.Module:
    import mmdet.models  # noqa: F401  registers the backbones
    from mmdet.registry import MODELS

    return MODELS.build(PEERS[name])


def build_reference(arch: str) -> nn.Module:
    from reference_mavit import ReferenceMAViT

    return ReferenceMAViT(arch)


def build_config(path: str) -> nn.Module:
    """The detector or segmentor of a config, with random weights.

    Raises:
        UsageError: as of `cli.read_config`.
    """
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import MODELS, DefaultScope

    cfg = cli.read_config(path)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        return revert_sync_batchnorm(MODELS.build(cfg.model))


def make_variants(args: argparse.Namespace) -> dict[str, Variant]:
    """All variants by their names in the results; the reference has no twin."""
    if args.config:
        paths = [args.config, *args.against]
        variants = {Path(path).stem: Variant(partial(build_config, path)) for path in paths}
        if len(variants) < len(paths):
            raise cli.UsageError(f'configs need different names, got {" ".join(paths)}')
    else:
        variants = {f'mavit-{arch}': Variant(partial(MAViT, arch)) for arch in args.arch}
        if args.naive:
            for arch in args.arch:
                naive = partial(MAViT, arch, attn_backend='torch')
                variants[f'mavit-{arch}-naive'] = Variant(naive)
        variants |= {name: Variant(partial(build_peer, name)) for name in args.peers}
    if args.channels_last or args.compile:
        suffix = '-channels-last' * args.channels_last + '-compiled' * args.compile
        for name, variant in list(variants.items()):
            variants[name + suffix] = Variant(variant.build, args.channels_last, args.compile)
    if args.reference:
        for arch in args.arch:
            variants[f'reference-{arch}'] = Variant(partial(build_reference, arch))
    return variants


def make_baseline(args: argparse.Namespace, names: list[str]) -> str:
    """The variant to which all others are compared."""
    if args.baseline is None:
        if args.config:
            return names[1] if args.against else names[0]
        if args.reference:
            return f'reference-{args.arch[0]}'
        return args.peers[0] if args.peers else names[0]
    if args.baseline not in names:
        raise cli.UsageError(f'--baseline {args.baseline}: expected one of {", ".join(names)}')
    return args.baseline


# The work that is timed


def backbone_step(model: nn.Module, mode: str, x: Tensor, autocast: Callable) -> Callable:
    """Forward; or forward and backward, for a fixed random gradient of every output."""
    if mode == 'forward':
        return lambda: model(x)
    gradients = []

    def step() -> None:
        with autocast():
            outs = model(x)
        if not gradients:
            gradients.extend(map(torch.randn_like, outs))
        torch.autograd.backward(outs, gradients)

    return step


def synthetic_samples(scope: str, batch: int, size: tuple[int, int]) -> list:
    """Annotations of images ``size``: eight boxes with masks, or two classes of pixels."""
    height, width = size
    samples = []
    if scope == 'mmseg':
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        for _ in range(batch):
            samples.append(SegDataSample())
            labels = torch.arange(width).remainder(2).expand(1, height, width).clone()
            samples[-1].gt_sem_seg = PixelData(data=labels)
    else:
        import numpy as np
        from mmdet.structures import DetDataSample
        from mmdet.structures.mask import BitmapMasks
        from mmengine.structures import InstanceData

        masks = np.zeros((8, height, width), np.uint8)
        boxes = torch.zeros(8, 4)
        for i in range(8):  # from half of the image down to a sixteenth
            h, w = height // (2 + 2 * i), width // (2 + 2 * i)
            top, left = i * (height - h) // 8, i * (width - w) // 8
            masks[i, top : top + h, left : left + w] = 1
            boxes[i] = torch.tensor([left, top, left + w, top + h])
        for _ in range(batch):
            samples.append(DetDataSample())
            samples[-1].gt_instances = InstanceData(
                bboxes=boxes, labels=torch.zeros(8).long(), masks=BitmapMasks(masks, height, width)
            )
            samples[-1].ignored_instances = InstanceData(
                bboxes=torch.zeros(0, 4), labels=torch.zeros(0).long()
            )
    for sample in samples:
        shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
        sample.set_metainfo(dict(shapes, scale_factor=(1.0, 1.0)))
    return samples


def detector_or_segmentor_step(
    model: nn.Module, mode: str, x: Tensor, autocast: Callable
) -> Callable:
    """Forward of mode 'tensor'; or forward and backward of the summed losses."""
    scope = type(model).__module__.split('.')[0]
    samples = synthetic_samples(scope, len(x), tuple(x.shape[-2:]))
    samples = [sample.to(x.device) for sample in samples]
    if mode == 'forward':
        return lambda: model(x, samples, mode='tensor')

    def step() -> None:
        with autocast():
            loss, _ = model.parse_losses(model(x, samples, mode='loss'))
        loss.backward()

    return step


def make_step(
    variant: Variant, model: nn.Module, mode: str, size: tuple[int, int], args: argparse.Namespace
) -> Callable[[], None]:
    """One run of a model, set to the mode, for images of ``size``; it leaves no gradients."""
    dtype = DTYPES[args.dtype]
    x = torch.randn(args.batch, 3, *size, device=args.device)
    x = x.to(torch.float32 if args.amp else dtype, memory_format=variant.memory_format)
    autocast = partial(torch.autocast, args.device, dtype, enabled=args.amp)
    make = detector_or_segmentor_step if args.config else backbone_step
    model.train(mode == 'training')
    run = make(model, mode, x, autocast)

    def forward() -> None:
        with torch.no_grad(), autocast():
            run()

    def training() -> None:
        run()
        model.zero_grad(set_to_none=True)

    return forward if mode == 'forward' else training


# Memory and time


def limit_memory() -> None:
    """Let this process fail by an error rather than take the machine's last memory."""
    total = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    resource.setrlimit(resource.RLIMIT_AS, (total, resource.getrlimit(resource.RLIMIT_AS)[1]))


def peak_resident() -> int:
    """Most bytes that this process has had in memory.

    Not ``ru_maxrss``, which starts from the parent's.
    """
    status = Path('/proc/self/status').read_text()
    return 1024 * int(status.split('VmHWM:')[1].split()[0])


def reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def measure_in_child(name: str, mode: str, size: tuple[int, int]) -> dict:
    """``peak_bytes`` of a fresh process that runs one variant once, or the ``error``."""
    shape = f'{size[0]}x{size[1]}'
    command = [sys.executable, __file__, *sys.argv[1:], '--child', name, mode, shape]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode < 0:
        return dict(error=f'its process was killed by signal {-child.returncode}')
    if child.returncode:
        return dict(error=child.stderr.strip().splitlines()[-1])
    return dict(peak_bytes=int(child.stdout.split()[-1]))


def run_child(args: argparse.Namespace) -> None:
    """What `measure_in_child` starts: print the peak."""
    name, mode, shape = args.child
    limit_memory()
    if args.peers:
        import mmdet.models  # noqa: F401  so that every variant's process holds the same imports
    try:
        variant = make_variants(args)[name]
        make_step(variant, variant.model(args), mode, parse_shape(shape), args)()
    except Exception as error:  # compilers raise whatever they meet
        sys.exit(reason(error))
    print(peak_resident())


def measure_on_gpu(step: Callable[[], None], model: nn.Module) -> dict:
    """``peak_bytes`` of one run: the model's weights and what is allocated beside them."""
    model_bytes = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    step()
    return dict(peak_bytes=torch.cuda.max_memory_allocated() - allocated + model_bytes)


def timed(step: Callable[[], None], device: str) -> float:
    """Milliseconds of one run."""
    start = perf_counter()
    step()
    if device == 'cuda':
        torch.cuda.synchronize()
    return 1000 * (perf_counter() - start)


def measure(
    variants: dict[str, Variant],
    models: dict[str, nn.Module],
    mode: str,
    size: tuple[int, int],
    args: argparse.Namespace,
) -> dict[str, dict]:
    """By variant: ``peak_bytes``, median ``ms`` and the runs' ``samples_ms``, or the ``error``."""
    results, steps = {}, {}
    for name, model in models.items():
        results[name] = measure_in_child(name, mode, size) if args.device == 'cpu' else {}
        if 'error' in results[name]:
            continue
        try:
            step = make_step(variants[name], model, mode, size, args)
            for _ in range(WARM_UP_RUNS[args.device]):
                step()
            if args.device == 'cuda':
                results[name] = measure_on_gpu(step, model)
            steps[name] = step
        except Exception as error:  # compilers raise whatever they meet
            results[name] = dict(error=reason(error))
            model.zero_grad(set_to_none=True)
            if args.device == 'cuda':
                torch.cuda.empty_cache()
    samples = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            samples[name].append(timed(step, args.device))
    for name, times in samples.items():
        ms = median(times)
        results[name].update(ms=ms, images_per_second=1000 * args.batch / ms, samples_ms=times)
    return results


# Output


def read_machine() -> dict:
    """Processor, cores, threads and memory; the card where there is one."""
    cpu = platform.processor()
    if Path('/proc/cpuinfo').exists():
        names = [x for x in Path('/proc/cpuinfo').read_text().splitlines() if 'model name' in x]
        cpu = names[0].split(':')[1].strip() if names else cpu
    machine = dict(
        system=platform.platform(),
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_bytes=os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'),
        capability=torch.backends.cpu.get_cpu_capability(),
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)},
    )
    if torch.cuda.is_available():
        machine |= dict(gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda)
    return machine


def read_versions() -> dict[str, str]:
    versions = dict(python=platform.python_version(), mala_mm=mala_mm.__version__)
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def add_ratios(results: dict[str, dict], baseline: str) -> None:
    """Add ``ms_ratio`` and ``peak_ratio`` to the results where both have figures."""
    base = results[baseline]
    for result in results.values():
        if 'ms' in result and 'ms' in base:
            result['ms_ratio'] = result['ms'] / base['ms']
            result['peak_ratio'] = result['peak_bytes'] / base['peak_bytes']


def describe(results: dict[str, dict], shape: str, mode: str) -> list[dict]:
    return [dict(shape=shape, mode=mode, variant=name, **r) for name, r in results.items()]


def make_table(names: list[str], baseline: str) -> Table:
    widths = {'shape': 9, 'mode': 8, 'variant': max(map(len, names)), 'ms': 8, 'images/s': 8}
    ratio = f'of {baseline}'
    return Table(**widths, **{'MiB': 7, f'ms {ratio}': 8, f'MiB {ratio}': 8})


def cells(shape: str, mode: str, name: str, result: dict) -> list[str]:
    """A row of the table, ``-`` where there is no figure."""
    formats = dict(ms='.1f', images_per_second='.2f', peak_mib='.0f', ms_ratio='.2f')
    formats['peak_ratio'] = '.2f'
    values = dict(result)
    if 'peak_bytes' in result:
        values['peak_mib'] = result['peak_bytes'] / 2**20
    shown = [format(values[key], spec) if key in values else '-' for key, spec in formats.items()]
    return [shape, mode, name, *shown]


def draw(results: list[dict], path: Path) -> None:
    """Latency above and memory below against the side of the image; a panel for each mode."""
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(result['mode'] for result in results))
    names = list(dict.fromkeys(result['variant'] for result in results))
    figure = Figure(figsize=(6 * len(modes), 8), layout='constrained')
    axes = figure.subplots(2, len(modes), squeeze=False, sharex=True)
    for column, mode in enumerate(modes):
        for row, (key, unit, label) in enumerate(
            (('ms', 1, 'milliseconds'), ('peak_bytes', 2**30, 'peak memory, GiB'))
        ):
            panel = axes[row, column]
            for name in names:
                points = [
                    (math.sqrt(math.prod(parse_shape(result['shape']))), result[key] / unit)
                    for result in results
                    if (result['mode'], result['variant']) == (mode, name) and key in result
                ]
                panel.plot([x for x, _ in points], [y for _, y in points], marker='o', label=name)
            panel.set(xlabel='side of the image, pixels', ylabel=label, yscale='log', title=mode)
            panel.grid(alpha=0.3, which='both')
    axes[0, 0].legend()
    figure.savefig(path)


def parse_shape(text: str) -> tuple[int, int]:
    """``HEIGHTxWIDTH`` in pixels."""
    height, separator, width = text.partition('x')
    if not (separator and height.isdecimal() and width.isdecimal() and int(height) * int(width)):
        raise argparse.ArgumentTypeError(f'expected HEIGHTxWIDTH such as 800x1280, got {text!r}')
    return int(height), int(width)


def parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'expected a number from 1, got {text!r}')
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    variants = parser.add_argument_group('what is measured')
    variants.add_argument(
        '--arch', nargs='+', choices=MAViT.arch_settings, default=['t'], help='MAViTs [t]'
    )
    variants.add_argument(
        '--reference', action='store_true', help='each --arch as it is usually written too'
    )
    variants.add_argument(
        '--naive', action='store_true', help="each --arch with attn_backend='torch' too"
    )
    variants.add_argument(
        '--peers', nargs='+', choices=PEERS, default=[], help="backbones of mmdet's"
    )
    variants.add_argument(
        '--config', help='instead of backbones, the whole detector or segmentor of a config file'
    )
    variants.add_argument(
        '--against', nargs='+', default=[], metavar='CONFIG', help='compare --config with these'
    )
    variants.add_argument(
        '--channels-last',
        action='store_true',
        help='every variant but the reference once more with channels-last weights and images',
    )
    variants.add_argument(
        '--compile',
        action='store_true',
        help='the same under torch.compile; with --channels-last one more variant with both',
    )
    variants.add_argument(
        '--baseline',
        metavar='VARIANT',
        help='what the ratios compare with [the reference, else the first peer or --against]',
    )
    conditions = parser.add_argument_group('how')
    conditions.add_argument(
        '--shapes',
        nargs='+',
        type=parse_shape,
        metavar='HEIGHTxWIDTH',
        help='images in pixels [800x1280 512x512]',
    )
    conditions.add_argument(
        '--sweep',
        action='store_true',
        help='squares of 224 to 1536 pixels (or --shapes), and a plot beside --out',
    )
    conditions.add_argument('--batch', type=parse_count, default=1, help='images [1]')
    conditions.add_argument('--modes', nargs='+', choices=MODES, default=MODES, help='[both]')
    conditions.add_argument('--device', choices=WARM_UP_RUNS, default='cpu', help='[cpu]')
    conditions.add_argument('--dtype', choices=DTYPES, default='float32', help='[float32]')
    conditions.add_argument(
        '--amp',
        action='store_true',
        help='float32 weights, --dtype under autocast, as in mixed-precision training',
    )
    conditions.add_argument('--repeats', type=parse_count, default=5, help='timed runs [5]')
    conditions.add_argument(
        '--out',
        type=Path,
        default=Path('benchmark.json'),
        metavar='FILE.json',
        help='all figures [%(default)s]',
    )
    parser.add_argument('--child', nargs=3, help=argparse.SUPPRESS)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise a UsageError where options contradict each other or the machine."""
    if args.device == 'cuda' and not torch.cuda.is_available():
        raise cli.UsageError(f'--device cuda: PyTorch {torch.__version__} finds no GPU')
    if args.amp and args.dtype == 'float32':
        raise cli.UsageError('--amp needs --dtype bfloat16 or float16')
    if args.against and not args.config:
        raise cli.UsageError('--against needs a --config to compare with')
    if args.config and (args.peers or args.reference or args.naive):
        raise cli.UsageError('--config takes neither --peers nor --reference nor --naive')
    if args.out.suffix != '.json':
        raise cli.UsageError(f'--out {args.out}: expected a name that ends in .json')


def build_models(variants: dict[str, Variant], args: argparse.Namespace) -> dict[str, nn.Module]:
    models = {}
    for name, variant in variants.items():
        try:
            models[name] = variant.model(args)
        except cli.UsageError:
            raise
        except Exception as error:  # whatever a config's model raises
            raise cli.UsageError(f'{name} cannot be built: {reason(error)}') from None
    return models


def run(args: argparse.Namespace) -> bool:
    """Measure, print and write everything; whether there are figures."""
    check_arguments(args)
    variants = make_variants(args)
    baseline = make_baseline(args, list(variants))
    models = build_models(variants, args)
    report = dict(
        date=datetime.now(timezone.utc).isoformat(timespec='seconds'),
        command=shlex.join(['tools/benchmark.py', *sys.argv[1:]]),
        machine=read_machine(),
        versions=read_versions(),
        settings={key: getattr(args, key) for key in ('device', 'dtype', 'amp', 'batch')},
        baseline=baseline,
        peak_bytes='of the CUDA allocator, without the images'
        if args.device == 'cuda'
        else 'resident set of a fresh process, Python and imports included',
        parameters={name: sum(p.numel() for p in m.parameters()) for name, m in models.items()},
        results=[],
    )

    def save() -> None:
        try:
            args.out.write_text(json.dumps(report, indent=1))
        except OSError as error:
            raise cli.UsageError(f'--out {args.out}: {error.strerror}') from None

    save()  # before the measurement, not after
    table = make_table(list(variants), baseline)
    for size in args.shapes or (SWEEP if args.sweep else SHAPES):
        torch.compiler.reset()  # after eight shapes it would run the ninth without compiling
        shape = f'{size[0]}x{size[1]}'
        for mode in args.modes:
            results = measure(variants, models, mode, size, args)
            add_ratios(results, baseline)
            report['results'] += describe(results, shape, mode)
            save()  # what is measured stays, whatever comes
            for name, result in results.items():
                table.row(*cells(shape, mode, name, result))
    for result in report['results']:
        if 'error' in result:
            print('no {variant} at {shape}, {mode}: {error}'.format(**result))
    if args.sweep:
        draw(report['results'], args.out.with_suffix('.png'))
    return any('ms' in result for result in report['results'])


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    if args.child:
        run_child(args)
        return
    try:
        measured = run(args)
    except cli.UsageError as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')
    if not measured:
        parser.exit(1, f'{parser.prog}: error: nothing could be measured, see above\n')


if __name__ == '__main__':
    main()
