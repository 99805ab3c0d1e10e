"""The numbers of each shipped config against the published recipes."""

from pathlib import Path

import pytest
import torch
from mmengine.registry import PARAM_SCHEDULERS

CONFIGS = Path(__file__).parents[2] / 'configs'

# config: lr, weight decay, images per GPU, batch size the lr belongs to, epochs or iterations
RECIPES = {
    'mask_rcnn_mavit_t_coco': (4e-4, 0.05, 2, 16, 12),
    'mask_rcnn_mavit_s_coco': (4e-4, 0.05, 2, 16, 12),
    'mask_rcnn_mavit_b_coco': (4e-4, 0.05, 2, 16, 12),
    'mask_rcnn_mavit_l_coco': (4e-4, 0.05, 2, 16, 12),
    'mask_rcnn_mavit_s_3x_coco': (4e-4, 0.05, 2, 16, 36),
    'mask_rcnn_mavit_b_3x_coco': (4e-4, 0.05, 2, 16, 36),
    'mask_rcnn_mavit_l_3x_coco': (2e-4, 0.05, 1, 8, 36),
    'cascade_mavit_s_coco': (4e-4, 0.05, 2, 16, 36),
    'cascade_mavit_b_coco': (4e-4, 0.05, 2, 16, 36),
    'cascade_mavit_l_coco': (2e-4, 0.05, 1, 8, 36),
    'retinanet_mavit_t_coco': (4e-4, 1e-4, 2, 16, 12),
    'retinanet_mavit_s_coco': (4e-4, 1e-4, 2, 16, 12),
    'retinanet_mavit_b_coco': (4e-4, 1e-4, 2, 16, 12),
    'retinanet_mavit_l_coco': (4e-4, 1e-4, 2, 16, 12),
    'upernet_mavit_t_ade20k': (6e-5, 0.01, 2, 16, 160000),
    'upernet_mavit_s_ade20k': (6e-5, 0.01, 2, 16, 160000),
    'upernet_mavit_b_ade20k': (6e-5, 0.01, 2, 16, 160000),
    'upernet_mavit_l_ade20k': (6e-5, 0.01, 1, 8, 160000),
    'semfpn_mavit_t_ade20k': (1e-4, 1e-4, 2, 16, 80000),
    'semfpn_mavit_s_ade20k': (1e-4, 1e-4, 2, 16, 80000),
    'semfpn_mavit_b_ade20k': (1e-4, 1e-4, 2, 16, 80000),
    'semfpn_mavit_l_ade20k': (1e-4, 1e-4, 2, 16, 80000),
}


def test_every_published_recipe_and_nothing_else_is_shipped():
    shipped = {path.stem for path in CONFIGS.glob('*.py') if not path.stem.startswith('demo_')}
    assert shipped == set(RECIPES)


@pytest.mark.parametrize('name', RECIPES)
def test_optimizer_batch_and_length(load_config, name):
    lr, weight_decay, images_per_gpu, base_batch_size, length = RECIPES[name]
    cfg = load_config(name)
    assert cfg.optim_wrapper.type == 'OptimWrapper'
    optimizer = dict(cfg.optim_wrapper.optimizer)
    assert optimizer.pop('type') == 'AdamW'
    assert optimizer.pop('betas', (0.9, 0.999)) == (0.9, 0.999)
    assert optimizer == {'lr': lr, 'weight_decay': weight_decay}
    assert cfg.train_dataloader.batch_size == images_per_gpu
    assert cfg.auto_scale_lr == {'enable': False, 'base_batch_size': base_batch_size}
    unit = 'max_epochs' if name.endswith('coco') else 'max_iters'
    assert cfg.train_cfg[unit] == length


def _entries(node, key=None):
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _entries(value, name)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _entries(value, key)
    if key is not None:
        yield key, node


@pytest.mark.parametrize('name', RECIPES)
def test_what_a_user_overrides_is_left_open(load_config, name):
    cfg = load_config(name)
    assert cfg.default_scope == ('mmdet' if name.endswith('coco') else 'mmseg')
    entries = list(_entries(cfg.to_dict()))
    assert not {'init_cfg', 'randomness', 'custom_imports', 'work_dir'} & {
        key for key, _ in entries
    }
    for key, value in entries:
        if isinstance(value, str):
            assert not value.startswith(('/', '~', 'http')), f'{key}={value}'
            assert '://' not in value, f'{key}={value}'

    cfg.merge_from_dict(
        {
            'model.backbone.init_cfg.type': 'Pretrained',
            'model.backbone.init_cfg.checkpoint': 'mavit.pth',
            'optim_wrapper.clip_grad.max_norm': 1.0,
        }
    )
    assert cfg.optim_wrapper.clip_grad == {'max_norm': 1.0}
    assert cfg.model.backbone.init_cfg == {'type': 'Pretrained', 'checkpoint': 'mavit.pth'}


@pytest.mark.parametrize('name', RECIPES)
def test_saving_and_validation(load_config, name):
    cfg = load_config(name)
    checkpoint = cfg.default_hooks.checkpoint
    if name.endswith('coco'):
        assert (checkpoint.interval, cfg.train_cfg.val_interval) == (1, 1)
        with_masks = not name.startswith('retinanet')
        assert cfg.val_evaluator.metric == (['bbox', 'segm'] if with_masks else 'bbox')
    else:
        tenth = cfg.train_cfg.max_iters // 10
        assert (checkpoint.interval, cfg.train_cfg.val_interval) == (tenth, tenth)
        assert checkpoint.by_epoch is False
        assert cfg.log_processor.by_epoch is False
        assert cfg.val_evaluator.iou_metrics == ['mIoU']
        assert cfg.tta_model.type == 'SegTTAModel'


def _learning_rates(cfg, iterations, iterations_per_epoch=None):
    """The learning rate of each iteration, stepped as mmengine's ParamSchedulerHook does."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=cfg.optim_wrapper.optimizer.lr)
    schedulers = [
        PARAM_SCHEDULERS.build(scheduler, default_args=dict(optimizer=optimizer))
        for scheduler in cfg.param_scheduler
    ]
    rates = []
    for iteration in range(1, iterations + 1):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            if not scheduler.by_epoch:
                scheduler.step()
            elif iteration % iterations_per_epoch == 0:
                scheduler.step()
    return rates


@pytest.mark.parametrize(
    ('name', 'epochs', 'steps'),
    [
        ('mask_rcnn_mavit_t_coco', 12, (8, 11)),
        ('retinanet_mavit_t_coco', 12, (8, 11)),
        ('mask_rcnn_mavit_l_3x_coco', 36, (27, 33)),
        ('cascade_mavit_b_coco', 36, (27, 33)),
    ],
)
def test_detection_learning_rate(load_config, name, epochs, steps):
    cfg = load_config(name)
    lr = cfg.optim_wrapper.optimizer.lr
    epoch = 600  # iterations, longer than the warm-up
    rates = _learning_rates(cfg, epochs * epoch, epoch)
    assert rates[0] == pytest.approx(0.001 * lr)
    assert rates[250] == pytest.approx((0.001 + 0.999 * 250 / 499) * lr)
    assert rates[499] == pytest.approx(lr)
    assert rates[500] == pytest.approx(lr)
    assert rates[steps[0] * epoch - 1] == pytest.approx(lr)
    assert rates[steps[0] * epoch] == pytest.approx(0.1 * lr)
    assert rates[steps[1] * epoch - 1] == pytest.approx(0.1 * lr)
    assert rates[steps[1] * epoch] == pytest.approx(0.01 * lr)
    assert rates[-1] == pytest.approx(0.01 * lr)


def test_upernet_learning_rate(load_config):
    rates = _learning_rates(load_config('upernet_mavit_b_ade20k'), 160000)
    assert rates[0] == pytest.approx(6e-11)
    assert rates[1499] == pytest.approx(6e-5)
    halfway = 1500 + (160000 - 1500) // 2
    assert rates[halfway] == pytest.approx(3e-5, rel=1e-4)
    assert 0 <= rates[-1] < 1e-9


def test_semantic_fpn_learning_rate(load_config):
    rates = _learning_rates(load_config('semfpn_mavit_b_ade20k'), 80000)
    assert rates[0] == pytest.approx(1e-4)
    assert rates[40000] == pytest.approx((1e-4 - 1e-6) * 0.5**0.9 + 1e-6, rel=1e-4)
    assert rates[-1] == pytest.approx(1e-6, rel=1e-2)
