"""torch.load in its safe mode: what mmengine writes is read, code is refused."""

import argparse
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.runner.checkpoint import load_from_local


def test_what_mmengine_saves_is_read(tmp_path):
    hub = MessageHub.get_instance('test_what_mmengine_saves_is_read')
    hub.update_scalar('train/loss', 2.5)
    hub.update_scalar('train/loss', 1.5)
    hub.update_info('iter', np.int64(7))
    saved = dict(
        meta=dict(args=argparse.Namespace(lr=0.1), best=np.float32(0.25)),
        message_hub=hub.state_dict(),
        arrays=[np.arange(3.0), np.array([True, False]), np.array(['a', 'b']), np.str_('c')],
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
    """Pickles as a call of ``function``."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    'poison',
    [
        lambda flag: Call(os.system, f'touch {flag}'),
        lambda flag: Call(eval, f'open({str(flag)!r}, "w")'),
        lambda flag: Call(getattr, HistoryBuffer, '__init__'),
        lambda flag: Call(getattr, HistoryBuffer, 'register_statistics'),
        lambda flag: Call(getattr, argparse.Namespace, '__class__'),
        lambda flag: Call(getattr, np.ndarray, 'tofile'),
        lambda flag: Call(getattr, 'text', 'format'),
    ],
    ids=['os.system', 'eval', 'init', 'register', 'class', 'tofile', 'format'],
)
def test_code_is_refused(tmp_path, poison):
    flag, path = tmp_path / 'ran', tmp_path / 'poisoned.pth'
    saved = dict(state_dict=dict(weight=torch.ones(2)), meta=poison(flag))
    torch.save(saved, path)
    with pytest.raises(
        (pickle.UnpicklingError, AttributeError), match=r'refused in a checkpoint|Weights only'
    ):
        load_from_local(str(path), 'cpu')
    assert not flag.exists()


def test_safe_mode_is_not_turned_off_by_the_environment():
    code = 'import os, mala_mm; print([k for k in os.environ if "WEIGHTS_ONLY" in k])'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == '[]'
