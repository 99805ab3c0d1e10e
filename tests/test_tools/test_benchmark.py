"""tools/benchmark.py at sizes of no interest, with a clock of the test where figures matter."""

import json
import sys
from importlib import metadata

import pytest
import torch
from matplotlib.image import imread

from mala_mm.models import MAViT

ARCH_T_PARAMETERS = 13_347_328


@pytest.fixture(scope='module')
def bench(tool, root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / 'tools')  # as when it runs as a script
        yield tool('benchmark')


@pytest.fixture
def parse(bench):
    return lambda *options: bench.build_parser().parse_args(options)


@pytest.fixture
def run_main(bench, monkeypatch, capsys, tmp_path):
    """Run main with options in an empty folder, tell exit code, output and figures."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str) -> tuple[int, str, dict | None]:
        monkeypatch.setattr('sys.argv', ['benchmark.py', *options])
        code = 0
        try:
            bench.main()
        except SystemExit as error:
            code = error.code
        streams = capsys.readouterr()
        out = tmp_path / 'benchmark.json'
        figures = json.loads(out.read_text()) if out.exists() else None
        return code, streams.out if code == 0 else streams.err, figures

    return run


@pytest.fixture
def no_children(bench, monkeypatch):
    """Peaks without processes: 4 MiB, for the reference 8 MiB."""

    def peak(name, mode, size):
        return dict(peak_bytes=(8 if 'reference' in name else 4) << 20)

    monkeypatch.setattr(bench, 'measure_in_child', peak)


@pytest.fixture
def clock(bench, monkeypatch):
    """Time stands still but in steps that call it with the seconds they take."""
    now = [0.0]
    monkeypatch.setattr(bench, 'perf_counter', lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


def test_runs_alternate_and_figures_are_medians(bench, parse, monkeypatch, clock, no_children):
    seconds = dict(a=[9, 0.5, 0.1, 0.2], b=[9, 2, 4, 3])  # the first warms up
    order = []

    def make_step(variant, model, mode, size, args):
        if variant == 'broken':
            raise RuntimeError('no memory\nand more')

        def step():
            clock(seconds[variant][order.count(variant)])
            order.append(variant)

        return step

    monkeypatch.setattr(bench, 'make_step', make_step)
    names = dict(a='a', b='b', c='broken')
    models = dict.fromkeys(names, torch.nn.Identity())
    args = parse('--repeats', '3', '--batch', '4')
    results = bench.measure(names, models, 'forward', (8, 8), args)
    assert order == ['a', 'b'] + ['a', 'b'] * 3
    assert results['a'] == dict(
        peak_bytes=4 << 20,
        ms=pytest.approx(200),
        images_per_second=pytest.approx(20),
        samples_ms=pytest.approx([500, 100, 200]),
    )
    assert results['b']['ms'] == pytest.approx(3000)
    assert results['c'] == dict(error='no memory')


def test_every_figure_is_written(run_main, no_children):
    options = '--reference --naive --shapes 32x48 33x32 --batch 2 --repeats 2'.split()
    code, output, figures = run_main(*options)
    assert code == 0
    assert figures['command'] == 'tools/benchmark.py ' + ' '.join(options)
    assert figures['baseline'] == 'reference-t'
    assert figures['settings'] == dict(device='cpu', dtype='float32', amp=False, batch=2)
    names = ['mavit-t', 'mavit-t-naive', 'reference-t']
    assert figures['parameters'] == dict.fromkeys(names, ARCH_T_PARAMETERS)
    assert figures['versions']['torch'] == metadata.version('torch')
    assert figures['machine']['threads'] == torch.get_num_threads()
    results = figures['results']
    assert [(r['shape'], r['mode'], r['variant']) for r in results] == [
        (shape, mode, name)
        for shape in ('32x48', '33x32')
        for mode in ('forward', 'training')
        for name in names
    ]
    for i, result in enumerate(results):
        low, high = sorted(result['samples_ms'])
        assert low <= result['ms'] <= high
        assert result['images_per_second'] == pytest.approx(2000 / result['ms'])
        base = results[i - i % 3 + 2]
        assert result['ms_ratio'] == pytest.approx(result['ms'] / base['ms'])
        assert result['peak_ratio'] == (1 if result is base else 0.5)
    rows = [line.split('|')[1:-1] for line in output.splitlines()]
    assert [cell.strip() for cell in rows[0]][-2:] == ['ms of reference-t', 'MiB of reference-t']
    assert len(rows) == 2 + len(results)
    assert rows[2][5].split() + rows[2][7].split() == ['4', '0.50']


def test_variant_that_fails_keeps_its_row_and_tells_why(bench, run_main, no_children, monkeypatch):
    class Failing(torch.nn.Linear):
        def forward(self, x):
            raise RuntimeError('no memory left')

    monkeypatch.setitem(bench.PEERS, 'resnet50', dict())
    monkeypatch.setattr(bench, 'build_peer', lambda name: Failing(1, 1))
    options = '--peers resnet50 --shapes 32x32 --repeats 1 --modes forward'.split()
    code, output, figures = run_main(*options)
    assert code == 0
    ours, peer = figures['results']
    assert peer == dict(shape='32x32', mode='forward', variant='resnet50', error='no memory left')
    assert 'ms_ratio' not in ours
    assert '-' in output.splitlines()[3].split('|')[4]
    assert output.splitlines()[-1] == 'no resnet50 at 32x32, forward: no memory left'


def test_sweep_draws_what_it_measured(run_main, no_children, tmp_path):
    options = '--sweep --shapes 32x32 64x64 --modes forward --repeats 1 --out s.json'.split()
    assert run_main(*options)[0] == 0
    assert imread(tmp_path / 's.png').std() > 0


def test_sizes_of_sweep(bench):
    sides = [height for height, width in bench.SWEEP if height == width]
    assert (len(sides), sides[0], sides[-1]) == (len(bench.SWEEP), 224, 1536)


def test_twins(bench, parse):
    variants = bench.make_variants(parse('--channels-last', '--compile', '--reference'))
    assert {name: variant[1:] for name, variant in variants.items()} == {
        'mavit-t': (False, False),
        'mavit-t-channels-last-compiled': (True, True),
        'reference-t': (False, False),
    }
    model = variants['mavit-t-channels-last-compiled']._replace(compiled=False).model(parse())
    assert model.patch_embed.proj[3].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('amp', [False, True])
def test_dtype(bench, parse, amp):
    args = parse('--dtype', 'bfloat16', *['--amp'] * amp)
    variant = bench.Variant(lambda: MAViT('t'))
    model = variant.model(args)
    assert model.patch_embed.proj[0].weight.dtype == (torch.float32 if amp else torch.bfloat16)
    dtypes = []
    model.layers[0].blocks[0].attn.proj.register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype)
    )
    bench.make_step(variant, model, 'training', (64, 64), args)()
    assert dtypes == [torch.bfloat16]


def test_training_step(bench, parse):
    """Gradients reach every parameter, for the same output gradients each time, and are gone."""
    variant, args = bench.Variant(lambda: MAViT('t', drop_path_rate=0.0)), parse()
    model = variant.model(args)
    seen = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.norm()))
    step = bench.make_step(variant, model, 'training', (64, 64), args)
    step()
    assert model.training
    count = len(seen)
    assert count == len(list(model.parameters()))
    step()
    assert torch.equal(torch.stack(seen[:count]), torch.stack(seen[count:]))
    assert all(parameter.grad is None for parameter in model.parameters())
    bench.make_step(variant, model, 'forward', (32, 32), args)()
    assert not model.training


@pytest.mark.parametrize('fixture', ['tiny_mask_rcnn', 'tiny_semfpn'])
def test_whole_config(bench, parse, request, fixture):
    path = request.getfixturevalue(fixture)
    args = parse('--config', str(path), '--batch', '2')
    (variant,) = bench.make_variants(args).values()
    model = variant.model(args)
    trained = set()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: trained.add(name.split('.')[0]))
    bench.make_step(variant, model, 'forward', (64, 96), args)()
    assert not trained
    bench.make_step(variant, model, 'training', (64, 96), args)()
    assert trained == {name for name, _ in model.named_children()} - {'data_preprocessor'}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_child_measures_its_own_peak(bench, monkeypatch):
    """In a process beside one that holds a lot."""
    ballast = torch.ones(1 << 28)  # 1 GiB
    options = ['--shapes', '32x32', '--modes', 'forward']
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', *options])
    peak = bench.measure_in_child('mavit-t', 'forward', (32, 32))['peak_bytes']
    assert ballast.nbytes > peak > 4 * ARCH_T_PARAMETERS
    assert bench.peak_resident() > ballast.nbytes


def test_child_that_fails(bench, monkeypatch):
    def child(script: str) -> dict:
        monkeypatch.setattr(bench, '__file__', '-c')
        monkeypatch.setattr(sys, 'argv', ['benchmark.py', script])
        return bench.measure_in_child('mavit-t', 'forward', (32, 32))

    assert child('raise SystemExit("warning\\nno memory")') == dict(error='no memory')
    assert child('import os; os.kill(os.getpid(), 9)') == dict(
        error='its process was killed by signal 9'
    )


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--shapes', '800'], "expected HEIGHTxWIDTH such as 800x1280, got '800'"),
        (['--shapes', '0x8'], "expected HEIGHTxWIDTH such as 800x1280, got '0x8'"),
        (['--repeats', '0'], "expected a number from 1, got '0'"),
        (['--amp'], '--amp needs --dtype bfloat16 or float16'),
        (['--against', 'a.py'], '--against needs a --config'),
        (['--config', 'a.py', '--reference'], '--config takes neither'),
        (['--config', 'nowhere.py'], 'config nowhere.py cannot be read'),
        (['--config', 'a/x.py', '--against', 'b/x.py'], 'different names, got a/x.py b/x.py'),
        (['--baseline', 'x'], '--baseline x: expected one of mavit-t'),
        (['--out', 'figures.txt'], '--out figures.txt: expected a name that ends in .json'),
        (['--out', 'no/folder/x.json'], '--out no/folder/x.json: No such file'),
    ],
)
def test_bad_arguments(run_main, monkeypatch, options, message):
    code, error, figures = run_main(*options)
    assert code == 2
    assert message in error.splitlines()[-1]
    assert figures is None


def test_no_gpu(run_main, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    code, error, _ = run_main('--device', 'cuda')
    assert code == 2
    assert 'finds no GPU' in error
    assert error.count('\n') == 1


def test_nothing_measured(bench, run_main, monkeypatch):
    monkeypatch.setattr(bench, 'measure_in_child', lambda *args: dict(error='no memory'))
    code, error, _ = run_main('--shapes', '32x32')
    assert code == 1
    assert 'nothing could be measured' in error


@pytest.mark.parametrize(
    ('options', 'baseline'),
    [
        ([], 'mavit-t'),
        (['--peers', 'swin-t', 'resnet50'], 'swin-t'),
        (['--peers', 'swin-t', '--arch', 's', 't', '--reference'], 'reference-s'),
        (['--peers', 'swin-t', '--reference', '--baseline', 'mavit-t'], 'mavit-t'),
        (['--config', 'a.py'], 'a'),
        (['--config', 'a.py', '--against', 'b.py', 'c.py'], 'b'),
    ],
)
def test_baseline(bench, parse, options, baseline):
    args = parse(*options)
    assert bench.make_baseline(args, list(bench.make_variants(args))) == baseline
