import os
import resource

import pytest
from mmengine.fileio import get_file_backend

from mala_mm.checkpoint import CheckpointError
from mala_mm.engine import whole_file
from mala_mm.engine.whole_file import write_whole


def test_backend_writes_and_replaces(tmp_path):
    backend = get_file_backend(backend_args=dict(backend='mala_mm.WholeFileBackend'))
    for content in (b'first', b'second'):
        backend.put(content, tmp_path / 'folder' / 'file.pth')
        assert (tmp_path / 'folder' / 'file.pth').read_bytes() == content
    assert os.listdir(tmp_path / 'folder') == ['file.pth']


def test_write_that_fails_in_the_middle_leaves_the_old_file(tmp_path):
    """The system itself stops the write after 1000 bytes, as a full disk would."""
    path = tmp_path / 'file.pth'
    write_whole(path, b'old')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r'file\.pth could not be written: File too large'
        ):
            write_whole(path, bytes(3000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b'old'
    assert os.listdir(tmp_path) == ['file.pth']


@pytest.mark.parametrize('step', ['fsync', 'replace'])
def test_end_of_the_process_at_any_step_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / 'file.pth'
    write_whole(path, b'old')

    def end(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(whole_file.os, step, end)
    with pytest.raises(SystemExit):
        write_whole(path, b'new')
    assert path.read_bytes() == b'old'
    assert os.listdir(tmp_path) == ['file.pth']


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(whole_file.os, 'fsync', lambda _: steps.append('fsync'))
    monkeypatch.setattr(whole_file.os, 'replace', lambda *_: steps.append('replace'))
    write_whole(tmp_path / 'file.pth', b'new')
    assert steps == ['fsync', 'replace', 'fsync']
