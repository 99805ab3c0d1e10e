"""tools/train.py and tools/test.py on a tiny segmentor and four tiny images."""

import numpy as np
import pytest
from PIL import Image
from runs import logged_metrics, logged_steps


@pytest.fixture(scope='module')
def work_dir(tmp_path_factory, run_tool, tiny_semfpn):
    cwd = tmp_path_factory.mktemp('segmentation')
    result = run_tool('train', tiny_semfpn, '--work-dir', 'w', cwd=cwd)
    assert result.returncode == 0, result.stdout
    return cwd / 'w'


def test_train(work_dir):
    assert logged_steps(work_dir) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (work_dir / 'iter_8.pth').is_file()


def test_test_writes_what_it_reports(work_dir, run_tool, tiny_semfpn, tiny_ade20k, tmp_path):
    """The PNG files of --out, compared with the labels here, give the reported numbers.

    Drawing does not touch the training data.
    """
    result = run_tool(
        'test',
        tiny_semfpn,
        work_dir / 'iter_8.pth',
        *('--out', 'preds', '--show-dir', 'drawn', '--work-dir', 'w'),
        *('--cfg-options', 'train_dataloader.dataset.data_root=nowhere'),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout
    assert len(list((tmp_path / 'drawn').rglob('test_[01].jpg_*.png'))) == 2

    pairs = []
    for name in ('0.png', '1.png'):
        label = np.array(Image.open(tiny_ade20k / 'annotations' / 'validation' / name))
        prediction = np.array(Image.open(tmp_path / 'preds' / name))
        pairs.append((prediction[label > 0], label[label > 0]))
    prediction, label = map(np.concatenate, zip(*pairs, strict=True))
    classes = np.union1d(prediction, label)
    hits = [np.sum((prediction == c) & (label == c)) for c in classes]
    unions = [np.sum((prediction == c) | (label == c)) for c in classes]
    metrics = logged_metrics(tmp_path / 'w')
    assert metrics['aAcc'] == pytest.approx(100 * np.mean(prediction == label), abs=5.1e-3)
    assert metrics['mIoU'] == pytest.approx(100 * np.mean(np.divide(hits, unions)), abs=5.1e-3)
    assert metrics['mIoU'] > 80


def test_tta(work_dir, run_tool, tiny_semfpn, tmp_path):
    result = run_tool('test', tiny_semfpn, work_dir / 'iter_8.pth', '--tta', cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    mean_iou = logged_metrics(tmp_path / 'work_dirs' / 'tiny_semfpn')['mIoU']
    assert mean_iou > 40  # one class everywhere gets 25
