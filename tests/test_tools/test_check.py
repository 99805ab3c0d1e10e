"""What the checks at the start of tools/train.py and tools/test.py let through."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from mala_mm import cli


@pytest.fixture
def started(tool, tmp_path, monkeypatch) -> Callable[..., list]:
    """Call a tool's main; returns the arguments of `cli.run`, which is left out."""

    def started(name: str, *args: object) -> list:
        calls = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr('sys.argv', [f'{name}.py', *map(str, args)])
        monkeypatch.setattr(cli, 'run', lambda *given: calls.append(given))
        tool(name).main()
        return calls

    return started


@pytest.fixture
def refused(started, capsys) -> Callable[..., list[str]]:
    """Call a tool's main, which ends with exit code 2; returns the lines on stderr."""

    def refused(*args: object) -> list[str]:
        with pytest.raises(SystemExit) as end:
            started(*args)
        assert end.value.code == 2
        return capsys.readouterr().err.splitlines()

    return refused


@pytest.fixture
def bad_data(tiny_semfpn: Path, tmp_path: Path) -> Path:
    """A config on a copy of its data where one validation mask has a value too many."""
    root = tmp_path / 'ade'
    for split in ('training', 'validation'):
        for name, ending in (('images', 'jpg'), ('annotations', 'png')):
            (root / name / split).mkdir(parents=True)
            value = 200 if (split, name) == ('validation', 'annotations') else 1
            mode = 'RGB' if name == 'images' else 'L'
            Image.new(mode, (8, 8), (value,) * len(mode)).save(root / name / split / f'0.{ending}')
    path = tmp_path / 'bad.py'
    loader = f'dict(dataset=dict(data_root={str(root)!r}))'
    loaders = f'train_dataloader = val_dataloader = test_dataloader = {loader}'
    path.write_text(f'_base_ = {str(tiny_semfpn)!r}\n{loaders}\n')
    return path


def test_whole_data_and_config_start(started, tiny_semfpn, tiny_mask_rcnn):
    for config, warnings in ((tiny_semfpn, 0), (tiny_mask_rcnn, 0)):
        ((_, command, found),) = started('train', config)
        assert command == 'train'
        assert len(found) == warnings


def test_all_errors_are_told_and_nothing_is_written(refused, bad_data, tmp_path):
    before = sorted(tmp_path.rglob('*'))
    lines = refused('train', bad_data, '--cfg-options', 'custom_hooks=[EMAHook]', 'train_cfg.a=1')
    assert lines[0].startswith("train.py: error: train_cfg: IterBasedTrainLoop has no argument 'a'")
    assert lines[1].startswith("error: custom_hooks.0 is the text 'EMAHook'")
    assert lines[2].startswith('error: mask values outside the classes of decode_head')
    assert lines[3].strip().endswith('annotations/validation/0.png: values 200 are labels 199')
    assert len(lines) == 4
    assert sorted(tmp_path.rglob('*')) == before


def test_no_check_leaves_everything_to_the_run(started, bad_data):
    assert started('train', bad_data, '--no-check')
    assert started('train', bad_data, '--no-check', '--cfg-options', 'train_cfg.a=1')


def test_test_checks_the_test_data(started, refused, bad_data, tmp_path):
    torch.save(dict(weight=torch.ones(1)), tmp_path / 'w.pth')
    lines = refused('test', bad_data, 'w.pth')
    assert lines[0].startswith('test.py: error: mask values outside the classes')
    images = 'test_dataloader.dataset.data_prefix.img_path=images/training'
    masks = 'test_dataloader.dataset.data_prefix.seg_map_path=annotations/training'
    assert started('test', bad_data, 'w.pth', '--cfg-options', images, masks)


def test_missing_data_root_is_told_once(refused, tiny_semfpn):
    lines = refused(
        *('train', tiny_semfpn, '--cfg-options'),
        *('train_dataloader.dataset.data_root=none', 'val_dataloader.dataset.data_root=none'),
    )
    assert lines[0].startswith('train.py: error: data_root=none is no folder')
    assert [line.strip() for line in lines[1:]] == [
        'train_dataloader.dataset',
        'val_dataloader.dataset',
    ]


def test_warnings_go_to_the_log(started, tiny_semfpn):
    ((_, _, warnings),) = started(
        'train', tiny_semfpn, '--cfg-options', 'model.decode_head.num_classes=151'
    )
    assert len(warnings) == 1
    assert warnings[0].startswith('model.decode_head.num_classes=151')


def test_one_process_reports(tiny_semfpn, monkeypatch, capsys):
    cfg = cli.read_config(str(tiny_semfpn), {'train_cfg.a': 1})
    cfg.launcher = 'pytorch'
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '0')
    with pytest.raises(cli.UsageError, match='train_cfg'):
        cli.check(cfg, 'train')
    monkeypatch.setenv('RANK', '1')
    assert cli.check(cfg, 'train') == []
    assert capsys.readouterr() == ('', '')


REFUSED = [  # by the runner, and by what it builds when it trains
    ({'randomness.sead': 1}, "argument 'sead'"),
    ({'train_dataloader.num_workers': -1}, 'num_workers'),
    ({'optim_wrapper.optimizer.lr': 'a'}, "'str'"),
]


@pytest.mark.parametrize(('options', 'message'), REFUSED)
@pytest.mark.parametrize('shown', [False, True])
def test_what_the_runner_refuses_is_one_line(
    tiny_semfpn, monkeypatch, tmp_path, options, message, shown
):
    cfg = cli.read_config(str(tiny_semfpn), options)
    cfg.launcher = 'none'
    cfg.work_dir = str(tmp_path)
    if shown:
        monkeypatch.setenv('MALA_MM_TRACEBACK', '1')
    with pytest.raises((TypeError, ValueError), match=message) as error:
        cli.run(cfg, 'train', [])
    assert isinstance(error.value, cli.UsageError) != shown


def test_refused_run_of_the_tool(run_tool, bad_data, tmp_path):
    result = run_tool('train', bad_data, cwd=tmp_path)
    assert result.returncode == 2
    assert 'train.py: error: mask values outside the classes of decode_head' in result.stdout
    assert 'Traceback' not in result.stdout
    assert not os.path.exists(tmp_path / 'work_dirs')
