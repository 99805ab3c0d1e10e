"""The parts of tools/benchmark_mala.py that need no GPU, and its checks in the interpreter."""

import json
import os
import subprocess
import sys

import pytest
import torch

# Rows and columns of tokens by image size and batch, stage 1 and stage 2.
TOKENS = {
    '800x1280-b8': (8, (200, 320), (100, 160)),
    '800x1280-b2': (2, (200, 320), (100, 160)),
    '512x512-b16': (16, (128, 128), (64, 64)),
    '224x224-b128': (128, (56, 56), (28, 28)),
}

IN_INTERPRETER = """
import itertools
import json
import benchmark_mala as b
import torch

shape = b.Shape('tiny', 1, 2, (3, 5), 16)
right = b.check(shape, torch.float32, 'cpu')
launches = list(b.recorded_launches(b.Case(shape, torch.float32, 'cpu')))
kernel, run = b.kernel_attention, itertools.count()
def broken(q, *args):
    out = kernel(q, *args).clamp(max=0.5) * (1 + 1e-6 * next(run))
    return out / (q != 30).all()
b.kernel_attention = broken
print(json.dumps([right, b.check(shape, torch.float32, 'cpu').failures, launches]))
"""


@pytest.fixture(scope='module')
def bench(tool):
    return tool('benchmark_mala')


@pytest.fixture
def run_main(bench, monkeypatch, capsys, tmp_path):
    """Run main with options, tell exit code and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str) -> tuple[int, str]:
        monkeypatch.setattr('sys.argv', ['benchmark_mala.py', *options])
        with pytest.raises(SystemExit) as error:
            bench.main()
        return error.value.code, capsys.readouterr().err

    return run


def test_shapes(bench):
    shapes = bench.benchmark_shapes()
    assert next(iter(shapes)) == 'b1-800x1280-b8'
    assert len(shapes) == 16
    for image, (batch, first, second) in TOKENS.items():
        assert shapes[f't1-{image}'][1:] == (batch, 1, first, 64)
        assert shapes[f't2-{image}'][1:] == (batch, 2, second, 64)
        assert shapes[f'b1-{image}'][1:] == (batch, 1, first, 96)
        assert shapes[f'b2-{image}'][1:] == (batch, 2, second, 96)


def test_traffic(bench):
    shape = bench.Shape('', 2, 3, (5, 7), 4)
    assert shape.elements == 840
    assert bench.traffic_bytes(shape, torch.float16) == dict(
        forward=10080, backward=18480, both=28560
    )
    assert bench.traffic_bytes(shape, torch.float32)['forward'] == 20160


def test_inputs_are_laid_out_as_in_the_model(bench):
    case = bench.Case(bench.Shape('', 2, 3, (5, 7), 4), torch.bfloat16, 'cpu')
    q, k, v, lepe, gate = case.inputs
    tokens, channels = 35, 12
    for i, x in enumerate((q, k, v, gate)):
        assert x.shape == (2, 3, tokens, 4)
        assert x.stride() == (tokens * 4 * channels, 4, 4 * channels, 1)
        assert x.storage_offset() == i * channels
        assert x.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    for x in (lepe, case.dout):
        assert x.stride() == (tokens * channels, 4, channels, 1)
    assert case.size == (5, 7)
    assert all(x.dtype == torch.bfloat16 and x.requires_grad for x in case.inputs)


@pytest.mark.parametrize(
    ('dtype', 'num_tokens', 'limit'),
    [
        (torch.float32, 63, 1e-5),
        (torch.float16, 511, 0.4),
        (torch.float16, 512, 0.2),
        (torch.bfloat16, 512, 0.4),
    ],
)
def test_error_limit(bench, dtype, num_tokens, limit):
    assert bench.error_limit(dtype, num_tokens, naive_error=0.1) == pytest.approx(limit)


def test_relative_rms(bench):
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert bench.relative_rms(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)


def test_timing_rows(bench):
    def result(peak_mib: int, **ms: float) -> dict:
        return dict(ms=ms, peak_bytes=peak_mib << 20)

    absent = dict(error='no flash attention')
    rows = bench.timing_rows(
        bench.Shape('name', 1, 1, (125, 125), 64),  # a million elements
        torch.bfloat16,
        dict(
            inference=dict(
                kernel=result(2, forward=0.012),
                eager=result(30, forward=0.12),
                flash=result(4, forward=1.2),
                copy=result(0, forward=0.006),
            ),
            training=dict(
                kernel=result(10, backward=0.044, both=0.068),
                eager=result(90, backward=0.22, both=0.34),
                flash=absent,
                copy=result(0, backward=0.033, both=0.051),
            ),
        ),
    )
    assert rows == [
        'name forward 0.012 1000 50% 10.0x - 100.0x 2 30 - 4'.split(),
        'name backward 0.044 500 75% 5.0x - - - - - -'.split(),
        'name both 0.068 500 75% 5.0x - - 10 90 - -'.split(),
    ]
    assert len(rows[0]) == len(bench.TIMING_COLUMNS)


def test_no_rows_of_a_kernel_that_failed(bench):
    failed = dict(kernel=dict(error='x'), copy=dict(ms=dict(forward=1, backward=1, both=1)))
    for result in failed.values():
        result['peak_bytes'] = 0
    shape = bench.Shape('', 1, 1, (1, 1), 64)
    assert bench.timing_rows(shape, torch.float32, dict.fromkeys(bench.MODES, failed)) == []


def test_measure_alternates_and_takes_medians(bench):
    class Stopwatch:
        order = []

        def warm_up(self, variant, train):
            if variant == 'broken':
                raise RuntimeError('no memory\nand more')
            return dict(host_ms=1.0, peak_bytes=5)

        def flush(self, host_ms):
            self.order.append('flush')

        def time(self, variant, train):
            self.order.append(variant)
            return dict(forward={1: 30.0, 2: 10.0, 3: 20.0}[self.order.count(variant)])

    variants = dict(a='first', b='broken', c='second')
    results = bench.measure(Stopwatch(), variants, train=False, seconds=0)
    figures = dict(host_ms=1.0, peak_bytes=5, runs=3, ms=dict(forward=20.0))
    assert results == dict(a=figures, b=dict(error='no memory'), c=figures)
    assert Stopwatch.order == ['flush', 'first', 'flush', 'second'] * 3


def test_table(bench, capsys):
    bench.Table(a=3, bcd=1).row('1', '2')
    assert capsys.readouterr().out == '| a   | bcd |\n| --- | --- |\n| 1   | 2   |\n'


def test_without_gpu_it_says_so(run_main, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    code, message = run_main()
    assert code == 2
    assert 'needs an NVIDIA GPU' in message
    assert message.count('\n') == 1


class TestWithGpu:
    @pytest.fixture(autouse=True)
    def gpu(self, bench, monkeypatch):
        monkeypatch.setattr(bench, 'gpu_obstacle', lambda: None)
        monkeypatch.setattr(bench, 'environment', lambda: dict(card='none'))

    def test_place_without_room_for_the_figures_is_an_error(self, run_main):
        code, message = run_main('--out', 'no/folder/figures.json')
        assert code == 2
        assert 'no/folder/figures.json' in message
        assert message.count('\n') == 1

    def test_wrong_kernel_is_not_timed(self, bench, run_main, monkeypatch, tmp_path):
        wrong = bench.Check('c', 'float32', dict(out=1.0), dict(out=1e-7), ['out is wrong'])
        monkeypatch.setattr(bench, 'run_checks', lambda: [wrong])
        monkeypatch.setattr(bench, 'Stopwatch', lambda: pytest.fail('it was timed'))
        code, message = run_main()
        assert code == 1
        assert 'not correct' in message
        figures = json.loads((tmp_path / 'benchmark_mala.json').read_text())
        assert figures['checks'] == [wrong._asdict()]
        assert (figures['card'], figures['dtype']) == ('none', 'bfloat16')


def test_check_and_launches_in_interpreter(bench, root):
    done = subprocess.run(
        [sys.executable, '-c', IN_INTERPRETER],
        cwd=root / 'tools',
        env={**os.environ, 'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    right, broken, launches = json.loads(done.stdout.splitlines()[-1])
    case, dtype, errors, naive_errors, failures = right
    assert (case, dtype, failures) == ('tiny', 'float32', [])
    for figures in (errors, naive_errors):
        assert tuple(figures) == bench.RESULTS
        assert all(0 < error < 1e-5 for error in figures.values())
    for name in bench.RESULTS:
        assert f'{name} differs between two runs' in broken
    assert any(line.startswith('out has the error') for line in broken)
    assert any(line.startswith('out is not finite') for line in broken)
    assert launches == [*bench.FORWARD_TRAFFIC, *bench.BACKWARD_TRAFFIC]
