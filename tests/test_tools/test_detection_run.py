"""tools/train.py and tools/test.py on a tiny detector and four tiny images."""

import os
import pickle
import re

import pytest
import torch
from runs import logged_metrics, logged_steps

AP_ITEMS = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')
AP_NAMES = [f'coco/{kind}_{item}' for kind in ('bbox', 'segm') for item in AP_ITEMS]


@pytest.fixture(scope='module')
def trained(tmp_path_factory, run_tool, tiny_mask_rcnn):
    """Two iterations in a working directory of its own, validated with a high threshold."""
    cwd = tmp_path_factory.mktemp('detection')
    result = run_tool(
        'train',
        tiny_mask_rcnn,
        '--cfg-options',
        'model.test_cfg.rcnn.score_thr=0.999',
        'default_hooks.checkpoint.save_best=auto',
        cwd=cwd,
    )
    assert result.returncode == 0, result.stdout
    return cwd, result.stdout


@pytest.fixture(scope='module')
def checkpoint(trained):
    return trained[0] / 'work_dirs' / 'tiny_mask_rcnn' / 'epoch_1.pth'


def test_train_writes_checkpoint_and_log(trained, checkpoint):
    assert checkpoint.is_file()
    assert logged_steps(checkpoint.parent) == [1, 2]
    assert re.search(r'^ +seed: \d+$', trained[1], re.M)


def test_validation_without_detections(trained, checkpoint):
    """0.0 reaches the log, one warning says why, and save_best finds a metric."""
    log = trained[1]
    assert [log.count(f'{name}: 0.0000') for name in AP_NAMES] == [1] * len(AP_NAMES)
    assert log.count('No detection scored above model.test_cfg.rcnn.score_thr=0.999') == 1
    assert (checkpoint.parent / 'best_coco_bbox_mAP_epoch_1.pth').is_file()


def test_test_writes_what_it_reports(checkpoint, run_tool, tiny_mask_rcnn, tiny_coco, tmp_path):
    """The pickle of --out, evaluated by pycocotools alone, gives the reported box AP."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    result = run_tool(
        'test',
        tiny_mask_rcnn,
        checkpoint,
        *('--out', 'preds.pkl', '--show-dir', 'drawn', '--work-dir', 'w'),
        *('--cfg-options', 'model.test_cfg.rcnn.score_thr=0.0'),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout
    metrics = logged_metrics(tmp_path / 'w')
    assert set(AP_NAMES) <= set(metrics)
    assert 'No detection scored' not in result.stdout
    assert sorted(os.listdir(tmp_path / 'drawn')) == ['0.png', '1.png', '2.png', '3.png']

    with open(tmp_path / 'preds.pkl', 'rb') as file:
        images = pickle.load(file)
    boxes = [
        dict(
            image_id=image['img_id'],
            category_id=int(label) + 1,
            bbox=[x1, y1, x2 - x1, y2 - y1],
            score=float(score),
        )
        for image in images
        for label, score, (x1, y1, x2, y2) in zip(
            *(image['pred_instances'][key].tolist() for key in ('labels', 'scores', 'bboxes')),
            strict=True,
        )
    ]
    truth = COCO(str(tiny_coco / 'instances.json'))
    truth.dataset['info'] = {}
    evaluation = COCOeval(truth, truth.loadRes(boxes), 'bbox')
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    reported = [metrics[f'coco/bbox_{item}'] for item in AP_ITEMS]
    assert reported == pytest.approx(evaluation.stats[:6].tolist(), abs=5.1e-4)


def test_test_without_detections(checkpoint, run_tool, tiny_mask_rcnn, tmp_path):
    result = run_tool(
        'test',
        tiny_mask_rcnn,
        checkpoint,
        *('--cfg-options', 'model.test_cfg.rcnn.score_thr=0.999'),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout
    metrics = logged_metrics(tmp_path / 'work_dirs' / 'tiny_mask_rcnn')
    assert {name: metrics.get(name) for name in AP_NAMES} == dict.fromkeys(AP_NAMES, 0.0)
    assert result.stdout.count('No detection scored above') == 1


def test_resume_auto_continues(trained, checkpoint, run_tool, tiny_mask_rcnn):
    result = run_tool(
        'train',
        tiny_mask_rcnn,
        *('--resume', 'auto', '--cfg-options', 'train_cfg.max_epochs=2'),
        cwd=trained[0],
    )
    assert result.returncode == 0, result.stdout
    assert logged_steps(checkpoint.parent) == [3, 4]


class Call:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def write_call(path, *call):
    torch.save(dict(state_dict={}, meta=Call(*call)), path)


def write_truncated(path):
    torch.save(dict(state_dict=dict(weight=torch.ones(9))), path)
    path.write_bytes(path.read_bytes()[:-200])


BAD_CHECKPOINTS = {
    'a call': (lambda path: write_call(path, os.system, f'touch {path}.ran'), 'posix.system'),
    'getattr': (lambda path: write_call(path, getattr, 'text', 'format'), 'builtins.getattr'),
    'truncated': (write_truncated, 'is damaged or cut off'),
    'text': (lambda path: path.write_text('epoch_1'), 'is no checkpoint'),
    'empty': (lambda path: path.touch(), 'is empty'),
    'averaged weights only': (
        lambda path: torch.save(dict(model_ema=dict(weight=torch.ones(2))), path),
        'holds EMA weights only',
    ),
    'a tensor': (lambda path: torch.save(torch.ones(2), path), 'holds a Tensor'),
    'a folder': (lambda path: path.mkdir(), 'is a directory'),
}


@pytest.mark.parametrize(('write', 'reason'), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS.keys())
def test_bad_checkpoint_is_one_line(
    tool, tiny_mask_rcnn, tmp_path, capsys, monkeypatch, write, reason
):
    path = tmp_path / 'evil.pth'
    write(path)
    monkeypatch.chdir(tmp_path)
    for name, args in (('test', [path]), ('train', ['--resume', path])):
        monkeypatch.setattr('sys.argv', [f'{name}.py', *map(str, [tiny_mask_rcnn, *args])])
        with pytest.raises(SystemExit) as exit_:
            tool(name).main()
        assert exit_.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f'{name}.py: error: checkpoint {path} ')
        assert reason in line
    assert not (tmp_path / 'evil.pth.ran').exists()


def test_tta_of_a_box_detector(run_tool, tiny_retinanet, tmp_path):
    from mmdet.registry import MODELS
    from mmengine.config import Config

    model = MODELS.build(Config.fromfile(tiny_retinanet).model)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'random.pth')
    result = run_tool('test', tiny_retinanet, 'random.pth', '--tta', cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert 'coco/bbox_mAP: ' in result.stdout
