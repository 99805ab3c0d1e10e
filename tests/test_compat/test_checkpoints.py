"""torch.load in its safe mode: what mmengine writes is read, code is refused."""

import argparse
import ast
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.runner.checkpoint import load_from_local

from mala_mm import safe_globals


def test_what_mmengine_saves_is_read(tmp_path):
    hub = MessageHub.get_instance('test_what_mmengine_saves_is_read')
    hub.update_scalar('train/loss', 2.5)
    hub.update_scalar('train/loss', 1.5)
    hub.update_info('iter', np.int64(7))
    saved = dict(
        meta=dict(args=argparse.Namespace(lr=0.1), best=np.float32(0.25)),
        message_hub=hub.state_dict(),
        arrays=[
            np.arange(3.0),
            np.array([True, False]),
            np.arange(6, dtype='>i2').reshape(2, 3),
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            np.zeros((0, 3)),
        ],
        state_dict=dict(weight=torch.ones(2)),
    )
    path = tmp_path / 'checkpoint.pth'
    torch.save(saved, path)
    loaded = load_from_local(str(path), 'cpu')
    assert loaded['meta']['args'].lr == 0.1
    assert loaded['meta']['best'] == np.float32(0.25)
    history = loaded['message_hub']['log_scalars']['train/loss']
    assert isinstance(history, HistoryBuffer)
    assert history.mean() == 2.0
    assert history.statistics('min') == 1.5
    for array, original in zip(loaded['arrays'], saved['arrays'], strict=True):
        assert np.array_equal(array, original)
        assert array.dtype == original.dtype.newbyteorder('=')
        assert array.shape == original.shape

    torch.save(loaded, path)
    again = torch.load(path, weights_only=True)['message_hub']['log_scalars']['train/loss']
    again.update(5.0)
    assert again.mean() == 3.0
    assert b'mala_mm' not in path.read_bytes()


def test_names_of_numpy_1_are_read(tmp_path):
    path = tmp_path / 'old.pth'
    torch.save(
        dict(value=np.float64(3), array=np.arange(2)), path, _use_new_zipfile_serialization=False
    )
    content = path.read_bytes()
    assert b'numpy._core.multiarray' in content
    path.write_bytes(content.replace(b'numpy._core.multiarray', b'numpy.core.multiarray'))
    loaded = torch.load(path)
    assert loaded['value'] == 3
    assert loaded['array'].tolist() == [0, 1]


class Call:
    """Pickles as a call of ``function``, whose result is then filled with ``state``."""

    def __init__(self, function, *args, state=None):
        self.call = (function, args, state)

    def __reduce__(self):
        return self.call


def dtype_with(state: tuple) -> Call:
    return Call(np.dtype, 'f8', False, True, state=state)


def array_with(dtype: object, content: bytes, shape: tuple = (1,)) -> Call:
    reconstruct = np.empty(0).__reduce__()[0]
    state = (1, shape, dtype, False, content)
    return Call(reconstruct, np.ndarray, (0,), b'b', state=state)


def forged_interface() -> argparse.Namespace:
    """numpy would take it for an array at address 16."""
    interface = dict(shape=(4,), typestr='<u8', data=(16, True), version=3)
    return argparse.Namespace(__array_interface__=interface)


def forged_history() -> HistoryBuffer:
    buffer = HistoryBuffer()
    buffer._log_history = [forged_interface()]
    return buffer


FORGED = 8 * b'A'
PLAIN = (3, '<', None, None, None, -1, -1, 0)
POISONS = {
    'os.system': lambda flag: Call(os.system, f'touch {flag}'),
    'eval': lambda flag: Call(eval, f'open({str(flag)!r}, "w")'),
    'getattr of __init__': lambda flag: Call(getattr, HistoryBuffer, '__init__'),
    'getattr of a setter': lambda flag: Call(getattr, HistoryBuffer, 'register_statistics'),
    'getattr of Namespace': lambda flag: Call(getattr, argparse.Namespace, '__class__'),
    'getattr of ndarray': lambda flag: Call(getattr, np.ndarray, 'tofile'),
    'getattr of str': lambda flag: Call(getattr, 'text', 'format'),
    'bytes': lambda flag: Call(bytes, 10**6),
    'ndarray over memory': lambda flag: Call(np.ndarray, (1,), 'O', bytearray(FORGED)),
    'object dtype': lambda flag: array_with(Call(np.dtype, 'O', False, True), FORGED),
    'struct dtype': lambda flag: array_with(Call(np.dtype, 'O,O', False, True), FORGED),
    'dtype with fields': lambda flag: array_with(
        dtype_with((3, '<', None, ('a',), {'a': ('O', 0)}, -1, -1, 0)), FORGED, (2,)
    ),
    'too little content': lambda flag: array_with(dtype_with(PLAIN), FORGED, (1000,)),
    'negative shape': lambda flag: array_with(dtype_with(PLAIN), FORGED, (-1, -1)),
    'HistoryBuffer called': lambda flag: Call(HistoryBuffer, [forged_interface()], [1]),
    'HistoryBuffer of other': lambda flag: forged_history(),
    'Namespace with an interface': lambda flag: forged_interface(),
    'Namespace as another class': lambda flag: Call(
        argparse.Namespace, state=({}, {'__class__': HistoryBuffer})
    ),
    'scalar of an object': lambda flag: Call(
        np.float64(0).__reduce__()[0], Call(np.dtype, 'O', False, True), FORGED
    ),
}


@pytest.mark.parametrize('poison', POISONS.values(), ids=POISONS.keys())
def test_code_is_refused(tmp_path, poison):
    flag, path = tmp_path / 'ran', tmp_path / 'poisoned.pth'
    saved = dict(state_dict=dict(weight=torch.ones(2)), meta=poison(flag))
    torch.save(saved, path)
    with pytest.raises(pickle.UnpicklingError, match=r'GLOBAL|unsupported'):
        load_from_local(str(path), 'cpu')
    assert not flag.exists()


def test_statistics_of_a_file_stay_out_of_the_class(tmp_path):
    path, buffer = tmp_path / 'poison.pth', HistoryBuffer([1.0, 5.0], [1, 1])
    buffer._statistics_methods = dict(mean=HistoryBuffer.min, current='boom')
    torch.save(buffer, path)
    loaded = torch.load(path, weights_only=True)
    assert type(loaded) is HistoryBuffer
    assert loaded.statistics('mean') == 3.0
    assert HistoryBuffer([2.0, 4.0], [1, 1]).statistics('mean') == 3.0


def test_an_array_is_filled_once():
    array = safe_globals.empty_array()
    state = (1, (1,), safe_globals.NumberDtype('f8'), False, FORGED)
    array.__setstate__(state)
    with pytest.raises(pickle.UnpicklingError, match='not allowed'):
        array.__setstate__(state)


def test_a_dtype_is_saved_as_a_dtype(tmp_path):
    path, dtype = tmp_path / 'dtype.pth', np.dtype('>i4')
    for _ in range(2):
        torch.save(dtype, path)
        dtype = torch.load(path, weights_only=True)
        assert dtype.numpy == np.dtype('>i4')


def test_forged_fields_of_a_dtype_come_to_nothing(tmp_path):
    path = tmp_path / 'forged.pth'
    fields = (3, '<', None, ('a',), {'a': ('O', 0)}, -1, -1, 63)
    torch.save(array_with(dtype_with(fields), np.float64(2).tobytes()), path)
    array = torch.load(path, weights_only=True)
    assert array.dtype == np.dtype('f8')
    assert array.dtype.fields is None
    assert array.tolist() == [2.0]


def test_safe_mode_is_not_turned_off_by_the_environment():
    code = 'import os, mala_mm; print([k for k in os.environ if "WEIGHTS_ONLY" in k])'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == '[]'


def test_downloads_are_safe_where_mmengine_was_imported_first():
    code = """
import mmengine.runner.checkpoint as checkpoint, mala_mm, torch
torch.hub.load_state_dict_from_url = lambda url, **options: print(options)
for url in ('https://a.org/x/w.pth', 'https://b.org/w.pth?download=true'):
    checkpoint.load_url(url)
"""
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    first, second = map(ast.literal_eval, out.stdout.strip().splitlines())
    assert first['weights_only'] is second['weights_only'] is True
    assert first['file_name'] != second['file_name']
    assert first['file_name'].endswith('-w.pth')
    assert second['file_name'].endswith('-w.pth')
