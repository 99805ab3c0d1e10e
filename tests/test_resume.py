"""Which checkpoint a resumed training takes."""

import os
from pathlib import Path

import pytest
import torch

from mala_mm.checkpoint import CheckpointError
from mala_mm.resume import check_training_checkpoint, newest_training_checkpoint


def save(path: Path, age: int, **changes: object) -> str:
    """A training's checkpoint, written `age` seconds ago."""
    path.parent.mkdir(exist_ok=True)
    state = dict(meta=dict(epoch=0, iter=1), message_hub=dict(a=1), optimizer=dict(a=1))
    checkpoint = dict(state, state_dict=dict(w=torch.ones(99)))
    torch.save({**checkpoint, **changes}, path)
    return aged(path, age)


def aged(path: Path, age: int) -> str:
    os.utime(path, (1e9 - age, 1e9 - age))
    return str(path)


@pytest.mark.parametrize('pointer', [None, '', 'gone.pth', 'epoch_9.pth'])
def test_newest_whatever_last_checkpoint_says(tmp_path, pointer):
    save(tmp_path / 'epoch_9.pth', age=2)
    newest = save(tmp_path / 'epoch_10.pth', age=1)
    (tmp_path / 'epoch_11.pth.partial').write_bytes(b'half')
    if pointer is not None:
        (tmp_path / 'last_checkpoint').write_text(pointer)
    found, warnings = newest_training_checkpoint(str(tmp_path))
    assert found == newest
    told = [w.endswith(f'written last; last_checkpoint names {pointer}.') for w in warnings]
    assert told == ([True] if pointer else [])


def test_copy_of_a_work_dir_keeps_to_itself(tmp_path):
    original = save(tmp_path / 'original' / 'iter_5.pth', age=1)
    own = save(tmp_path / 'copy' / 'iter_3.pth', age=2)
    (tmp_path / 'copy' / 'last_checkpoint').write_text(original)
    found, (warning,) = newest_training_checkpoint(str(tmp_path / 'copy'))
    assert found == own
    assert warning.endswith(f'takes {own}, written last; last_checkpoint names {original}.')


@pytest.mark.parametrize('meta', [dict(iter=1), dict(epoch=1)])
def test_meta_without_a_position(tmp_path, meta):
    path = save(tmp_path / 'epoch_1.pth', age=0, meta=meta)
    with pytest.raises(CheckpointError, match=r'cannot be resumed, it has no meta\.(epoch|iter)'):
        check_training_checkpoint(path)


@pytest.mark.parametrize(
    ('changes', 'told'),
    [
        (dict(meta='text'), "meta is 'text', expected a value of type dict"),
        (dict(meta=dict(epoch=0, iter='7')), "meta.iter is '7', expected a value of type int"),
        (dict(message_hub=[1]), 'message_hub is [1], expected a value of type dict'),
        (dict(optimizer='x' * 99), f"optimizer is '{'x' * 39}, expected a value of type dict"),
        (dict(resume_state=3), 'resume_state is 3, expected a value of type dict'),
        (
            dict(resume_state=dict(generators={1: 2}, epoch_batches=0)),
            'resume_state.generators is {1: 2}, expected a value of type list',
        ),
    ],
)
def test_state_of_another_type(tmp_path, changes, told):
    path = save(tmp_path / 'epoch_1.pth', age=0, **changes)
    with pytest.raises(CheckpointError) as error:
        check_training_checkpoint(path)
    assert str(error.value) == f'checkpoint {path} cannot be resumed, its {told}'


def test_resume_state_without_entries(tmp_path):
    path = save(tmp_path / 'epoch_1.pth', age=0, resume_state=dict(epoch_batches=0))
    with pytest.raises(CheckpointError, match=r'it has no resume_state\.generators: start from'):
        check_training_checkpoint(path)


def test_last_checkpoint_that_cannot_be_read(tmp_path, monkeypatch):
    save(tmp_path / 'epoch_1.pth', age=0)
    (tmp_path / 'last_checkpoint').write_text('x')

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(Path, 'read_text', refuse)  # root may read everything
    with pytest.raises(CheckpointError, match=r'last_checkpoint cannot be read: Permission denied'):
        newest_training_checkpoint(str(tmp_path))


def test_last_checkpoint_of_other_bytes(tmp_path):
    newest = save(tmp_path / 'epoch_1.pth', age=0)
    (tmp_path / 'last_checkpoint').write_bytes(b'\xff\xfe\0\x80')
    assert newest_training_checkpoint(str(tmp_path))[0] == newest


def test_folder_that_last_checkpoint_names(tmp_path):
    save(tmp_path / 'work' / 'epoch_1.pth', age=2)
    newest = save(tmp_path / 'elsewhere' / 'epoch_2.pth', age=1)
    (tmp_path / 'work' / 'epoch_1.pth').unlink()
    (tmp_path / 'work' / 'last_checkpoint').write_text(newest)
    assert newest_training_checkpoint(str(tmp_path / 'work')) == (newest, [])


def test_damaged_file_is_named_and_the_one_before_is_taken(tmp_path):
    whole = save(tmp_path / 'epoch_1.pth', age=3)
    damaged = Path(save(tmp_path / 'epoch_2.pth', age=2))
    damaged.write_bytes(damaged.read_bytes()[:-300])
    aged(damaged, age=2)
    empty = tmp_path / 'epoch_3.pth'
    empty.touch()
    found, warnings = newest_training_checkpoint(str(tmp_path))
    assert found == whole
    assert [str(path) in warning for path, warning in zip((empty, damaged), warnings, strict=True)]
    reasons = [warning.rpartition('.pth ')[2] for warning in warnings]
    assert reasons == [
        'cannot be read: it is empty.',
        'cannot be read: it is damaged or cut off.',
    ]


def test_nothing_but_damaged_files_is_an_error(tmp_path):
    (tmp_path / 'epoch_3.pth').touch()
    with pytest.raises(CheckpointError, match=r'none of 1 checkpoints in .* it is empty; without'):
        newest_training_checkpoint(str(tmp_path))


def test_pointer_to_an_object_store(tmp_path):
    (tmp_path / 'last_checkpoint').write_text('s3://bucket/epoch_3.pth')
    assert newest_training_checkpoint(str(tmp_path)) == ('s3://bucket/epoch_3.pth', [])


def test_pointer_that_is_no_text(tmp_path):
    whole = save(tmp_path / 'epoch_1.pth', age=3)
    (tmp_path / 'last_checkpoint').write_bytes(b'\xff\xfe\0')
    assert newest_training_checkpoint(str(tmp_path))[0] == whole


def test_weights_only_are_passed_over(tmp_path):
    whole = save(tmp_path / 'epoch_1.pth', age=2)
    torch.save(dict(state_dict={}), tmp_path / 'published.pth')
    found, (warning,) = newest_training_checkpoint(str(tmp_path))
    assert found == whole
    assert 'published.pth cannot be resumed, it has no meta, message_hub, optimizer' in warning


@pytest.mark.parametrize('folder', ['empty', 'missing'])
def test_nothing_to_resume(tmp_path, folder):
    (tmp_path / 'empty').mkdir()
    assert newest_training_checkpoint(str(tmp_path / folder)) == (None, [])


def test_checkpoint_without_optimizer_is_one_line(tmp_path):
    path = tmp_path / 'best.pth'
    torch.save(dict(meta=dict(iter=1), message_hub=dict(a=1), state_dict={}), path)
    with pytest.raises(CheckpointError, match=r'best\.pth cannot be resumed, it has no optimizer'):
        check_training_checkpoint(str(path))
