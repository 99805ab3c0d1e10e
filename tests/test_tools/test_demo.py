from pathlib import Path
from types import ModuleType

import cv2
import pytest
import torch
from mmengine.config import Config

ITERATIONS, TRAIN, VAL = 2, 6, 8


@pytest.fixture(scope='module')
def demo(tool) -> ModuleType:
    return tool('demo')


@pytest.fixture(scope='module')
def untrained(demo, tmp_path_factory) -> Path:
    """A checkpoint of the demo's model as it is before training."""
    from mmdet.registry import MODELS
    from mmengine.registry import init_default_scope

    torch.manual_seed(0)
    init_default_scope('mmdet')
    model = MODELS.build(Config.fromfile(demo.CONFIG).model)
    model.init_weights()
    path = tmp_path_factory.mktemp('untrained') / 'untrained.pth'
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, path)
    return path


def test_untrained_model_finds_nothing(demo, tool, untrained, tmp_path):
    tool('make_demo_data').make_demo_data(tmp_path / 'data', seed=0, train=TRAIN, val=VAL)
    metrics = demo.evaluate(untrained, tmp_path)
    assert 0 <= metrics['coco/segm_mAP_50'] < 0.05
    assert 0 <= metrics['coco/bbox_mAP_50'] < 0.05


def test_whole_demo_in_small(demo, tmp_path, monkeypatch, capfd):
    config = tmp_path / 'small.py'
    config.write_text(
        f'_base_ = {demo.CONFIG!r}\n'
        f'train_cfg = dict(max_iters={ITERATIONS})\n'
        f'default_hooks = dict(checkpoint=dict(interval={ITERATIONS}), logger=dict(interval=1))\n'
    )
    monkeypatch.setattr(demo, 'CONFIG', str(config))
    monkeypatch.setattr(demo, 'IMAGES', ('--train', str(TRAIN), '--val', str(VAL)))
    folder = tmp_path / 'a folder, with [unusual] name'
    monkeypatch.setattr('sys.argv', ['demo.py', '--work-dir', str(folder)])
    demo.main()
    shown = capfd.readouterr().out

    for step in ('demo 1/3', 'demo 2/3', 'demo 3/3'):
        assert step in shown
    assert f'[{ITERATIONS}/{ITERATIONS}]' in shown
    assert 'eta: ' in shown
    summary = shown[shown.index('held-out images ') :].splitlines()
    assert summary[0].split()[-2:] == ['AP', 'AP50']
    for line, name in zip(summary[1:3], ('box', 'mask'), strict=True):
        assert line.split()[0] == name
        assert all(0 <= float(value) <= 1 for value in line.split()[1:])

    assert (folder / f'train/iter_{ITERATIONS}.pth').is_file()
    pictures = list((folder / 'pictures').glob('*.jpg'))
    assert len(pictures) == VAL
    for picture in pictures:  # ground truth and prediction side by side
        assert cv2.imread(str(picture)).shape == (288, 2 * 384, 3)


def test_failing_step_ends_the_demo(demo, tmp_path, monkeypatch, capfd):
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/thesis.tex').write_text('mine')
    monkeypatch.setattr('sys.argv', ['demo.py', '--work-dir', str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        demo.main()
    assert exit_.value.code not in (0, None)
    shown = capfd.readouterr()
    assert 'demo 2/3' not in shown.out
    assert 'make_demo_data.py failed' in shown.err
