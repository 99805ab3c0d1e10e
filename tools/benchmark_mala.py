"""Measure mala_attention on an NVIDIA GPU: correctness first, then time, traffic and memory.

Needs torch, triton and mala_mm.ops alone; docs/benchmarks.md explains what it prints.

Times are the GPU's own, between two events: medians of runs that alternate between the variants.
Before each run 512 MiB are read, often enough to last until the host has queued the whole run.
That empties the L2 cache, as the rest of a model does, leaves no written line in it whose
write-back would fall into the measured time, and keeps waits for the host out of it.
"""

import argparse
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mala_mm.ops import mala_attention, rotary_angles
from mala_mm.ops.naive import naive_mala_attention

DTYPES = dict(bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32)
HEAD_DIMS = dict(b=96, t=64)
IMAGES = ((800, 1280, 8), (800, 1280, 2), (512, 512, 16), (224, 224, 128))  # height, width, batch
# Tensors of N C elements that each kernel has to read or write.
FORWARD_TRAFFIC = dict(mala_fwd_kv_kernel=2, mala_fwd_out_kernel=4)
BACKWARD_TRAFFIC = dict(mala_bwd_q_kernel=7, mala_bwd_kv_kernel=4)
RESULTS = ('out', 'dq', 'dk', 'dv', 'dlepe', 'dgate')
MODES = ('inference', 'training')
PASSES = ('forward', 'backward', 'both')
FLUSH_BYTES = 512 << 20
WARM_UP_RUNS, WARM_UP_SECONDS = 5, 0.5
MIN_RUNS, MAX_RUNS = 3, 100
# BN, num_warps, num_stages; more than 8 tokens for a warp compile slowly, and spill.
TUNE_CHOICES = [c for c in product((16, 32, 64), (4, 8), (1, 2, 3)) if c[0] <= 8 * c[1]]


class Shape(NamedTuple):
    """Tokens of one MALA stage, ``size`` rows and columns of them for each image of the batch."""

    name: str
    batch: int
    heads: int
    size: tuple[int, int]
    head_dim: int

    @property
    def elements(self) -> int:
        """Of one tensor such as q: ``N C`` times the batch."""
        return self.batch * self.heads * math.prod(self.size) * self.head_dim


def benchmark_shapes() -> dict[str, Shape]:
    """Stages 1 and 2 (1 and 2 heads, 1/4 and 1/8 of the image's size) of MAViT-B and MAViT-T."""
    shapes = {}
    for image, (arch, head_dim), stage in product(IMAGES, HEAD_DIMS.items(), (1, 2)):
        height, width, batch = image
        stride = 2 << stage
        size = (math.ceil(height / stride), math.ceil(width / stride))
        name = f'{arch}{stage}-{height}x{width}-b{batch}'
        shapes[name] = Shape(name, batch, stage, size, head_dim)
    return shapes


def check_shapes() -> list[Shape]:
    """Odd sizes: a single tile, a few programs of one head, and many."""
    return [
        Shape(f'D {head_dim}, {size[0]}x{size[1]}', batch, heads, size, head_dim)
        for head_dim in HEAD_DIMS.values()
        for batch, heads, size in ((2, 2, (7, 9)), (2, 2, (25, 38)), (1, 1, (201, 323)))
    ]


def traffic_bytes(shape: Shape, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that each pass has to move: 6 N C elements forward, 11 N C backward."""
    forward, backward = sum(FORWARD_TRAFFIC.values()), sum(BACKWARD_TRAFFIC.values())
    tensor = shape.elements * dtype.itemsize
    return dict(
        forward=forward * tensor, backward=backward * tensor, both=(forward + backward) * tensor
    )


class Case:
    """Random inputs of a shape and the output's gradient, laid out as in the model.

    q, k, v and gate are views of one projection ``[B, N, 4 C]``; lepe is ``[B, N, C]``.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        randn = partial(torch.randn, generator=generator, dtype=dtype, device=device)
        tokens, heads = (shape.batch, math.prod(shape.size)), (shape.heads, shape.head_dim)
        q, k, v, gate = randn(*tokens, 4, *heads).permute(2, 0, 3, 1, 4)
        lepe = randn(*tokens, *heads).transpose(1, 2)
        self.dout = randn(*tokens, *heads).transpose(1, 2)
        self.inputs = [x.detach().requires_grad_() for x in (q, k, v, lepe, gate)]
        self.size, self.angle = shape.size, rotary_angles(shape.head_dim).to(device)

    def forward(self, attend: Callable) -> Tensor:
        q, k, v, lepe, gate = self.inputs
        return attend(q, k, v, self.size, self.angle, lepe, gate)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.dout)

    def results(self, attend: Callable) -> tuple[Tensor, ...]:
        """Output and gradients, as ``RESULTS``."""
        out = self.forward(attend)
        return out.detach(), *self.backward(out)

    def to_double(self) -> None:
        self.inputs = [x.detach().double().requires_grad_() for x in self.inputs]
        self.dout = self.dout.double()


kernel_attention = partial(mala_attention, backend='triton')


# Correctness


class Check(NamedTuple):
    """Relative RMS errors against float64 by result; ``failures`` in words, none if all is well."""

    case: str
    dtype: str
    errors: dict[str, float]
    naive_errors: dict[str, float]
    failures: list[str]


def relative_rms(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def error_limit(dtype: torch.dtype, num_tokens: int, naive_error: float) -> float:
    """Largest relative RMS error allowed where plain PyTorch in the same dtype has another."""
    if dtype == torch.float32:
        return 1e-5
    return naive_error * (2 if dtype == torch.float16 and num_tokens >= 512 else 4)


def check(shape: Shape, dtype: torch.dtype, device: str) -> Check:
    """Compare the kernel with float64, run it twice, and give it extreme queries."""
    case = Case(shape, dtype, device)
    first, second = case.results(kernel_attention), case.results(kernel_attention)
    naive = case.results(naive_mala_attention)
    with torch.no_grad():  # underflow of phi, large scores, all features equal
        for i, value in enumerate((-20, 30, 0.5)):
            case.inputs[0][..., i::3, :] = value
    extreme = case.results(kernel_attention)
    case = Case(shape, dtype, device)
    case.to_double()
    exact = case.results(naive_mala_attention)

    errors, naive_errors, failures = {}, {}, []
    for name, x, again, y, z, truth in zip(
        RESULTS, first, second, naive, extreme, exact, strict=True
    ):
        errors[name], naive_errors[name] = relative_rms(x, truth), relative_rms(y, truth)
        limit = error_limit(dtype, math.prod(shape.size), naive_errors[name])
        if not errors[name] <= limit:  # a nan neither
            failures.append(f'{name} has the error {errors[name]:.2e}, allowed {limit:.2e}')
        if not torch.equal(x, again):
            failures.append(f'{name} differs between two runs')
        if not z.isfinite().all():
            failures.append(f'{name} is not finite with queries of -20, 30 and 0.5')
    return Check(shape.name, str(dtype).removeprefix('torch.'), errors, naive_errors, failures)


def check_cells(result: Check) -> list[str]:
    errors = [
        f'{result.errors[name]:.1e} ({result.errors[name] / result.naive_errors[name]:.1f}x)'
        for name in RESULTS
    ]
    return [result.dtype, result.case, *errors, '; '.join(result.failures) or 'ok']


def run_checks() -> list[Check]:
    table = Table(dtype=8, case=13, **dict.fromkeys(RESULTS, 14), verdict=7)
    checks = []
    for shape, dtype in product(check_shapes(), DTYPES.values()):
        checks.append(check(shape, dtype, 'cuda'))
        table.row(*check_cells(checks[-1]))
    return checks


# Time and memory


class Variant(NamedTuple):
    """One way to do the work; ``backward`` takes what ``forward`` returns."""

    forward: Callable[[], object]
    backward: Callable[[object], object]


class Stopwatch:
    """GPU times of single runs."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(FLUSH_BYTES // 4, device='cuda')
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        flush = Variant(self.buffer.sum, lambda out: None)
        self.flush_seconds = min(self.time(flush, train=False)['forward'] for _ in range(5)) / 1000

    def queue(self, variant: Variant, train: bool) -> None:
        with torch.set_grad_enabled(train):
            self.marks[0].record()
            out = variant.forward()
            self.marks[1].record()
            if train:
                variant.backward(out)
                self.marks[2].record()

    def time(self, variant: Variant, train: bool) -> dict[str, float]:
        """Milliseconds of each pass of one run."""
        self.queue(variant, train)
        torch.cuda.synchronize()
        start, middle, end = self.marks
        if not train:
            return dict(forward=start.elapsed_time(middle))
        return dict(backward=middle.elapsed_time(end), both=start.elapsed_time(end))

    def flush(self, host_ms: float) -> None:
        """Empty the L2 cache, for long enough to queue a run meanwhile."""
        for _ in range(math.ceil(1.5 * host_ms / 1000 / self.flush_seconds)):
            self.buffer.sum()

    def warm_up(self, variant: Variant, train: bool) -> dict[str, float]:
        """Compile, then tell the host's time to queue a run and the most memory it allocates."""
        self.time(variant, train)
        started = time.perf_counter()
        for _ in range(WARM_UP_RUNS):
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
            queued = time.perf_counter()
            self.queue(variant, train)
            host_ms = 1000 * (time.perf_counter() - queued)
            torch.cuda.synchronize()
            if time.perf_counter() - started > WARM_UP_SECONDS:
                break
        return dict(host_ms=host_ms, peak_bytes=torch.cuda.max_memory_allocated() - allocated)


def measure(
    stopwatch: Stopwatch, variants: dict[str, Variant], train: bool, seconds: float
) -> dict[str, dict]:
    """By variant: median ``ms`` of each pass, number of ``runs``, ``host_ms`` and ``peak_bytes``.

    The runs alternate; each variant gets about ``seconds``, but 3 to 100 runs. Where one cannot
    run (no memory left, no flash attention for the dtype) there is the reason as ``error``.
    """
    results, samples, spent = {}, {}, {}
    for name, variant in variants.items():
        try:
            results[name] = stopwatch.warm_up(variant, train)
            samples[name], spent[name] = [], 0.0
        except Exception as error:  # compilers raise whatever they meet
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            results[name] = dict(error=reason)
        if 'error' in results[name]:
            torch.cuda.empty_cache()
    running = list(samples)
    while running:
        for name in running:
            started = time.perf_counter()
            stopwatch.flush(results[name]['host_ms'])
            samples[name].append(stopwatch.time(variants[name], train))
            spent[name] += time.perf_counter() - started
        running = [
            name
            for name in running
            if len(samples[name]) < MIN_RUNS
            or (spent[name] < seconds and len(samples[name]) < MAX_RUNS)
        ]
    for name, runs in samples.items():
        results[name]['runs'] = len(runs)
        results[name]['ms'] = {key: median(run[key] for run in runs) for key in runs[0]}
    return results


def make_variants(shape: Shape, dtype: torch.dtype, with_compile: bool) -> dict[str, Variant]:
    case = Case(shape, dtype, 'cuda')
    attends = dict(kernel=kernel_attention, eager=naive_mala_attention)
    if with_compile:
        torch.compiler.reset()  # after eight shapes it would run the ninth without compiling
        attends['compile'] = torch.compile(naive_mala_attention, dynamic=False)
    variants = {
        name: Variant(partial(case.forward, attend), case.backward)
        for name, attend in attends.items()
    }

    q, k, v = case.inputs[:3]

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    variants['flash'] = Variant(flash, lambda out: torch.autograd.grad(out, (q, k, v), case.dout))

    moved = traffic_bytes(shape, dtype)  # a copy reads one half and writes the other
    half, options = moved['forward'] // 2, dict(dtype=torch.uint8, device='cuda')
    source, target = torch.randint(256, (2, moved['backward'] // 2), **options)
    variants['copy'] = Variant(
        lambda: target[:half].copy_(source[:half]), lambda out: target.copy_(source)
    )
    return variants


def run_shape(
    stopwatch: Stopwatch, shape: Shape, dtype: torch.dtype, with_compile: bool, seconds: float
) -> dict[str, dict]:
    """Results of :func:`measure`, as ``inference`` and as ``training``."""
    variants = make_variants(shape, dtype, with_compile)
    return {mode: measure(stopwatch, variants, mode == 'training', seconds) for mode in MODES}


TIMING_COLUMNS = dict(
    shape=17,
    run=8,
    ms=8,
    **{'GB/s': 6, 'of copy': 7},
    **{'vs eager': 8, 'vs compile': 10, 'vs flash': 8},
    **{'MiB': 7, 'eager MiB': 9, 'compile MiB': 11, 'flash MiB': 9},
)


def timing_rows(shape: Shape, dtype: torch.dtype, results: dict[str, dict]) -> list[list[str]]:
    """Cells of ``TIMING_COLUMNS`` for each pass of the kernel; ``-`` where there is no figure."""
    rows = []
    for name in PASSES:
        by_variant = results['inference' if name == 'forward' else 'training']
        ms = {variant: r['ms'][name] for variant, r in by_variant.items() if 'ms' in r}
        peaks = {variant: r['peak_bytes'] for variant, r in by_variant.items() if 'ms' in r}
        if 'kernel' not in ms:
            continue
        kernel_ms = ms['kernel']
        rate = traffic_bytes(shape, dtype)[name] / (kernel_ms * 1e6)
        cells = [shape.name, name, f'{kernel_ms:.3f}', f'{rate:.0f}']
        cells.append(f'{ms["copy"] / kernel_ms:.0%}' if 'copy' in ms else '-')
        for variant in ('eager', 'compile', 'flash'):
            cells.append(f'{ms[variant] / kernel_ms:.1f}x' if variant in ms else '-')
        for variant in ('kernel', 'eager', 'compile', 'flash'):
            shown = variant in peaks and name != 'backward'
            cells.append(f'{peaks[variant] / 2**20:.0f}' if shown else '-')
        rows.append(cells)
    return rows


# Launch configurations


def recorded_launches(case: Case) -> dict[str, Callable[[], None]]:
    """The token kernels' launches of one forward and backward, by kernel, to be repeated."""
    from mala_mm.ops import mala_kernels

    launches, launch = {}, mala_kernels.launch

    def record(kernel: Callable, *args, **flags) -> None:
        launches[kernel.__name__] = partial(launch, kernel, *args, **flags)
        launches[kernel.__name__]()

    with mock.patch.object(mala_kernels, 'launch', record):
        case.results(kernel_attention)
    return launches


def tune(stopwatch: Stopwatch, shape: Shape, dtype: torch.dtype, seconds: float) -> dict:
    """Time every kernel with each of ``TUNE_CHOICES``: milliseconds or the error, by choice."""
    from mala_mm.ops import mala_kernels

    shipped = mala_kernels.LAUNCHES[dtype][shape.head_dim > 64]
    choices = list(dict.fromkeys([tuple(shipped), *TUNE_CHOICES]))
    print(f'{shape.name}: BN, num_warps, num_stages; shipped {tuple(shipped)}\n')
    table = Table(kernel=19, best=10, ms=8, **{'GB/s': 6, 'shipped ms': 10, 'next best': 40})
    times = {}
    for name, run in recorded_launches(Case(shape, dtype, 'cuda')).items():
        times[name] = {}
        for choice in choices:
            config = mala_kernels.Launch(*choice)
            with mock.patch.dict(mala_kernels.LAUNCHES, {dtype: (config, config)}):
                result = measure(stopwatch, {name: Variant(run, lambda out: None)}, False, seconds)
            times[name][str(choice)] = (
                result[name].get('ms', {}).get('forward', result[name].get('error'))
            )
        ranking = sorted((t, c) for c, t in times[name].items() if isinstance(t, float))
        (best_ms, best), *others = ranking
        traffic = {**FORWARD_TRAFFIC, **BACKWARD_TRAFFIC}[name] * shape.elements * dtype.itemsize
        shipped_ms = times[name][str(tuple(shipped))]
        table.row(
            name.removesuffix('_kernel'),
            best,
            f'{best_ms:.3f}',
            f'{traffic / (best_ms * 1e6):.0f}',
            f'{shipped_ms:.3f}',
            ', '.join(f'{c} {t:.3f}' for t, c in others[:2]),
        )
    return times


# Output


class Table:
    """A Markdown table printed row by row, from headings and their columns' widths."""

    def __init__(self, **columns: int) -> None:
        self.widths = [max(len(name), width) for name, width in columns.items()]
        self.row(*columns)
        self.row(*('-' * width for width in self.widths))

    def row(self, *cells: str) -> None:
        padded = (f'{c:{w}}' for c, w in zip(cells, self.widths, strict=True))
        print('| ' + ' | '.join(padded) + ' |', flush=True)


def environment() -> dict[str, str]:
    import triton

    try:
        query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
        driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        driver = 'unknown'
    return dict(
        date=datetime.now(timezone.utc).isoformat(timespec='seconds'),
        card=torch.cuda.get_device_name(),
        driver=driver.split('\n')[0],
        cuda=torch.version.cuda,
        torch=torch.__version__,
        triton=triton.__version__,
        python=platform.python_version(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = benchmark_shapes()
    parser.add_argument(
        '--shapes',
        nargs='+',
        choices=shapes,
        metavar='SHAPE',
        help=f'default: all of {", ".join(shapes)}',
    )
    parser.add_argument('--dtype', choices=DTYPES, default='bfloat16', help='default: bfloat16')
    parser.add_argument(
        '--quick',
        action='store_true',
        help='only the first shape unless --shapes says more, few runs, no torch.compile',
    )
    parser.add_argument(
        '--tune',
        action='store_true',
        help="instead, try other launch configurations for each kernel, at --shapes' first shape",
    )
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('benchmark_mala.json'),
        metavar='FILE',
        help='all figures as JSON, default: %(default)s',
    )
    return parser


def gpu_obstacle() -> str | None:
    """Why there is nothing to measure here, None if there is."""
    if not torch.cuda.is_available():
        return f'needs an NVIDIA GPU, but PyTorch {torch.__version__} finds none'
    token = torch.zeros(1, 1, 1, 16, device='cuda')
    try:
        kernel_attention(token, token, token, (1, 1))
    except RuntimeError as error:
        return str(error)
    return None


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    obstacle = gpu_obstacle()
    if obstacle is not None:
        parser.exit(2, f'{parser.prog}: error: {obstacle}\n')
    shapes, dtype = benchmark_shapes(), DTYPES[args.dtype]
    names = args.shapes or list(shapes)[: 1 if args.quick else None]
    seconds = 0.05 if args.quick or args.tune else 0.2
    report = dict(environment(), dtype=args.dtype)

    def save(**figures: object) -> None:
        report.update(figures)
        args.out.write_text(json.dumps(report, indent=1))

    try:
        save()  # before the measurement, not after
    except OSError as error:
        parser.exit(2, f'{parser.prog}: error: --out {args.out}: {error.strerror}\n')
    print(', '.join(f'{key} {value}' for key, value in report.items()), '\n')

    if args.tune:
        shape = shapes[names[0]]
        save(tuned_at=shape.name, tuning=tune(Stopwatch(), shape, dtype, seconds))
        return

    checks = run_checks()
    save(checks=[c._asdict() for c in checks])
    if any(c.failures for c in checks):
        parser.exit(1, f'\n{parser.prog}: error: the kernel is not correct, see above\n')

    print()
    stopwatch, table, timings = Stopwatch(), Table(**TIMING_COLUMNS), {}
    for name in names:
        results = run_shape(stopwatch, shapes[name], dtype, not args.quick, seconds)
        timings[name] = dict(results, traffic_bytes=traffic_bytes(shapes[name], dtype))
        save(timings=timings)  # what is measured stays, whatever comes
        for row in timing_rows(shapes[name], dtype, results):
            table.row(*row)
        for mode, variant in product(results, results['inference']):
            if 'error' in results[mode][variant]:
                print(f'{name}, {mode}, no {variant}: {results[mode][variant]["error"]}')
    if any('error' in results[mode]['kernel'] for results in timings.values() for mode in MODES):
        parser.exit(1, f'{parser.prog}: error: the kernel failed, see above\n')


if __name__ == '__main__':
    main()
