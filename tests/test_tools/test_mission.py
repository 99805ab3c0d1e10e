"""The mission's own entry on real photographs, with nothing changed but --cfg-options."""

import shutil

import pytest
from runs import logged_metrics, logged_steps

AP_ITEMS = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')
AP_NAMES = [f'coco/{kind}_{item}' for kind in ('bbox', 'segm') for item in AP_ITEMS]


@pytest.fixture
def options(shared):
    """Data paths, image size, sampler sizes and what the log and the disk get."""
    data = f'{shared}/data/voc_coco80/'
    options = {
        'default_hooks.logger.interval': 1,
        'default_hooks.checkpoint.max_keep_ckpts': 1,
        'val_evaluator.ann_file': f'{data}instances.json',
        'test_evaluator.ann_file': f'{data}instances.json',
        'val_dataloader.dataset.pipeline.1.scale': '(128,96)',
        'test_dataloader.dataset.pipeline.1.scale': '(128,96)',
        'model.train_cfg.rpn.sampler.num': 64,
        'model.train_cfg.rpn_proposal.nms_pre': 200,
        'model.train_cfg.rpn_proposal.max_per_img': 50,
        'model.test_cfg.rpn.nms_pre': 200,
        'model.test_cfg.rpn.max_per_img': 50,
    }
    for split in ('train', 'val', 'test'):
        dataset = f'{split}_dataloader.dataset'
        options[f'{dataset}.data_root'] = data
        options[f'{dataset}.ann_file'] = 'instances.json'
        options[f'{dataset}.data_prefix.img'] = 'images/'
    for transform in ('0.0', '1.0', '1.2'):
        scales = f'train_dataloader.dataset.pipeline.3.transforms.{transform}.scales'
        options[scales] = '[(128,96)]'
    options['train_dataloader.dataset.pipeline.3.transforms.1.1.crop_size'] = '(64,80)'
    for stage in range(3):
        options[f'model.train_cfg.rcnn.{stage}.sampler.num'] = 16
    return [f'{key}={value}' for key, value in options.items()]


def test_cascade_mavit_b_coco(root, run_tool, options, tmp_path):
    config = root / 'configs' / 'cascade_mavit_b_coco.py'
    work_dir = tmp_path / 'work_dirs' / 'cascade_mavit_b_coco'

    def run(name, *args, **changes):
        changed = [f'{key}={value}' for key, value in changes.items()]
        result = run_tool(name, config, *args, '--cfg-options', *options, *changed, cwd=tmp_path)
        assert result.returncode == 0, result.stdout
        return result.stdout

    run('train', **{'train_cfg.max_epochs': 2, 'train_cfg.val_interval': 9})
    assert logged_steps(work_dir) == [1, 2, 3, 4]

    log = run('test', work_dir / 'epoch_2.pth', **{'model.test_cfg.rcnn.score_thr': 0.0})
    assert set(AP_NAMES) <= set(logged_metrics(work_dir))
    assert 'No detection scored' not in log

    log = run('test', work_dir / 'epoch_2.pth')
    assert {name: logged_metrics(work_dir).get(name) for name in AP_NAMES} == dict.fromkeys(
        AP_NAMES, 0.0
    )
    assert log.count('No detection scored above model.test_cfg.rcnn.score_thr=0.05') == 1

    run('train', '--resume', 'auto', **{'train_cfg.max_epochs': 3, 'train_cfg.val_interval': 9})
    assert logged_steps(work_dir) == [5, 6]
    shutil.rmtree(work_dir)  # the checkpoints take more than a gigabyte each
