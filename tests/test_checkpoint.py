"""Reading files: what comes out of every wrapping, and the one line for what cannot be used."""

import argparse
import os
import re
import socket
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from mmengine.runner import CheckpointLoader
from safetensors.torch import save_file

from mala_mm.checkpoint import CheckpointError, read_checkpoint, weights_of


class Call:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


WEIGHTS = dict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.ones(2))


def assert_weights(weights: dict) -> None:
    assert weights.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        assert torch.equal(weights[name], value), name


def test_training_file(tmp_path):
    """Optimizer, scheduler, random state, arguments and NumPy scalars do not stop the weights."""
    path = tmp_path / 'epoch_3.pth'
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    torch.save(
        dict(
            model=WEIGHTS,
            model_ema=dict(weight=torch.zeros(2, 3), bias=torch.zeros(2)),
            optimizer=optimizer.state_dict(),
            lr_scheduler=scheduler.state_dict(),
            rng=[torch.get_rng_state(), np.random.get_state()],
            args=argparse.Namespace(lr=0.1, output_dir='out'),
            max_accuracy=np.float64(85.7),
            epoch=3,
        ),
        path,
    )
    checkpoint = read_checkpoint(str(path))
    assert checkpoint['args'].lr == 0.1
    assert checkpoint['max_accuracy'] == 85.7
    assert_weights(weights_of(checkpoint, 'f'))


@pytest.mark.parametrize(
    'checkpoint',
    [
        WEIGHTS,
        dict(model=WEIGHTS),
        dict(state_dict=WEIGHTS, meta={}),
        dict(state_dict={}, model=WEIGHTS),
        dict(model=WEIGHTS, model_ema=dict(weight=torch.zeros(1))),
        dict(state_dict=WEIGHTS, state_dict_ema=dict(weight=torch.zeros(1))),
        {name: value.numpy() for name, value in WEIGHTS.items()},
        {name: value.numpy().astype('>f4') for name, value in WEIGHTS.items()},
    ],
    ids=['bare', 'model', 'state_dict', 'empty', 'beside EMA', 'beside EMA 2', 'numpy', 'big-end'],
)
def test_wrappings(checkpoint, tmp_path):
    torch.save(checkpoint, tmp_path / 'w.pth')
    assert_weights(weights_of(read_checkpoint(str(tmp_path / 'w.pth')), 'f'))


@pytest.mark.parametrize('wrapping', ['model_ema', 'state_dict_ema'])
def test_averaged_weights_are_taken_on_demand_only(wrapping):
    checkpoint = {'model': dict(weight=torch.zeros(1)), wrapping: WEIGHTS}
    assert_weights(weights_of(checkpoint, 'f', ema=True))
    with pytest.raises(CheckpointError, match=rf'f holds EMA weights only \({wrapping}\).*--ema'):
        weights_of({wrapping: WEIGHTS, 'epoch': 3}, 'f')
    with pytest.raises(CheckpointError, match='f holds no EMA weights'):
        weights_of(dict(model=WEIGHTS), 'f', ema=True)


def test_safetensors(tmp_path):
    path = tmp_path / 'w.safetensors'
    save_file(WEIGHTS, path, dict(arch='t'))
    checkpoint = read_checkpoint(str(path))
    assert checkpoint['meta'] == dict(arch='t')
    assert_weights(weights_of(checkpoint, 'f'))


@pytest.mark.parametrize(
    ('checkpoint', 'reason'),
    [
        ({}, 'holds no weights, .*; its entries: none'),
        (dict(net=WEIGHTS, epoch=3), 'holds no weights, .*; its entries: net, epoch'),
        (dict(model={}), 'holds no weights, .*; its entries: model'),
        (
            dict(model=dict(WEIGHTS, step=3, groups=[1])),
            r'holds 2 entries among its 4 weights that are no plain tensors '
            r'\(step: int, groups: list\)',
        ),
        ({0: 'a', 1: 'b'}, 'holds no weights, .*; its entries: 0, 1'),
    ],
)
def test_what_holds_no_weights(checkpoint, reason):
    with pytest.raises(CheckpointError, match=f'^checkpoint f {reason}$'):
        weights_of(checkpoint, 'f')


def test_numbers_as_names_are_names():
    assert weights_of({0: torch.ones(1)}, 'f').keys() == {'0'}


def cut(path):
    torch.save(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-200])


def cut_safetensors(path):
    save_file(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-4])


def evil(path):
    torch.save(dict(model=WEIGHTS, epoch=Call(os.system, f'touch {path}.ran')), path)


BAD_FILES = {
    'nothing': ('w.pth', lambda path: None, 'does not exist'),
    'no safetensors': ('w.safetensors', lambda path: None, 'does not exist'),
    'a directory': ('w.pth', lambda path: path.mkdir(), 'is a directory, expected a file'),
    'empty': ('w.pth', lambda path: path.touch(), 'cannot be read: it is empty'),
    'empty safetensors': ('w.safetensors', lambda p: p.touch(), 'cannot be read: it is empty'),
    'cut off': ('w.pth', cut, 'cannot be read: it is damaged or cut off'),
    'cut off safetensors': (
        'w.safetensors',
        cut_safetensors,
        'cannot be read: it is damaged or cut off',
    ),
    'text': (
        'w.pth',
        lambda path: path.write_text('version https://git-lfs.github.com/spec/v1'),
        "cannot be read: it is no checkpoint, it begins with b'version https://git-'",
    ),
    'a tensor': ('w.pth', lambda path: torch.save(torch.ones(1), path), 'holds a Tensor'),
    'code': ('w.pth', evil, 'was refused: it names posix.system, where only weights'),
    'code of a newer protocol': (
        'w.pth',
        lambda path: torch.save(Call(os.system, f'touch {path}.ran'), path, pickle_protocol=4),
        'was refused: it holds more than weights',
    ),
    'a model object': (
        'w.pth',
        lambda path: torch.save(dict(model=torch.nn.Linear(1, 1)), path),
        'was refused: it names torch.nn.modules.linear.Linear',
    ),
}


def test_no_environment_variable_lets_code_run(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    path = tmp_path / 'w.pth'
    torch.save(dict(model=WEIGHTS, epoch=Call(os.system, f'touch {path}.ran')), path)
    with pytest.raises(CheckpointError, match='was refused'):
        read_checkpoint(str(path))
    assert not (tmp_path / 'w.pth.ran').exists()


def test_full_memory_is_not_the_files_fault(tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(torch, 'load', load)
    with pytest.raises(torch.OutOfMemoryError):
        read_checkpoint(str(tmp_path / 'w.pth'))


@pytest.mark.parametrize(('name', 'write', 'reason'), BAD_FILES.values(), ids=BAD_FILES.keys())
@pytest.mark.parametrize('map_location', ['cpu', 'meta'])
def test_bad_file(tmp_path, name, write, reason, map_location):
    path = tmp_path / name
    write(path)
    with pytest.raises(CheckpointError, match=re.escape(f'checkpoint {path} {reason}')) as error:
        read_checkpoint(str(path), map_location)
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'w.pth.ran').exists()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The URL of a folder; what is fetched from it is kept in the test's own cache."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    (tmp_path / 'www').mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / 'www')
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{httpd.server_port}'
        httpd.shutdown()


def test_url(server, tmp_path):
    torch.save(dict(model=WEIGHTS), tmp_path / 'www' / 'w.pth')
    save_file(WEIGHTS, tmp_path / 'www' / 'w.safetensors')
    for name in ('w.pth', 'w.safetensors'):
        assert_weights(weights_of(read_checkpoint(f'{server}/{name}'), 'f'))


def test_code_behind_a_url_is_refused(server, tmp_path):
    evil(tmp_path / 'www' / 'evil.pth')
    url = f'{server}/evil.pth'
    with pytest.raises(CheckpointError, match=f'{url} was refused: it names posix.system'):
        read_checkpoint(url)
    with pytest.raises(Exception, match=r'posix\.system'):  # the way of mmdet's and mmseg's tools
        CheckpointLoader.load_checkpoint(url)
    assert not list(tmp_path.rglob('*.ran'))


def test_url_that_cannot_be_fetched(server, tmp_path):
    (tmp_path / 'www' / 'page.pth').write_text('<html>')
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        dead = f'http://127.0.0.1:{unused.getsockname()[1]}'
        for url, reason in (
            (f'{server}/gone.pth', 'could not be fetched: HTTP Error 404'),
            (f'{server}/gone.safetensors', 'could not be fetched: HTTP Error 404'),
            (f'{dead}/w.pth', 'could not be fetched: .*refused'),
            (f'{server}/page.pth', f'cannot be read: .* {tmp_path}/cache/hub'),
        ):
            with pytest.raises(CheckpointError, match=f'checkpoint {url} {reason}') as error:
                read_checkpoint(url)
            assert '\n' not in str(error.value)
