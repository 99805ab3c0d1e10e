"""The models of the shipped configs: size, channels, weight decay, and a training step."""

import numpy as np
import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope

# Million parameters of the whole model, with 80 COCO classes or 150 ADE20K classes.
MILLION_PARAMS = {
    'mask_rcnn_mavit_t_coco': 33.5,
    'mask_rcnn_mavit_s_coco': 44.2,
    'mask_rcnn_mavit_b_coco': 66.9,
    'mask_rcnn_mavit_l_coco': 113.8,
    'mask_rcnn_mavit_s_3x_coco': 44.2,
    'mask_rcnn_mavit_b_3x_coco': 66.9,
    'mask_rcnn_mavit_l_3x_coco': 113.8,
    'cascade_mavit_s_coco': 82.0,
    'cascade_mavit_b_coco': 104.7,
    'cascade_mavit_l_coco': 151.7,
    'retinanet_mavit_t_coco': 23.6,
    'retinanet_mavit_s_coco': 34.3,
    'retinanet_mavit_b_coco': 57.0,
    'retinanet_mavit_l_coco': 104.2,
    'upernet_mavit_t_ade20k': 43.7,
    'upernet_mavit_s_ade20k': 54.5,
    'upernet_mavit_b_ade20k': 77.4,
    'upernet_mavit_l_ade20k': 125.3,
    'semfpn_mavit_t_ade20k': 17.6,
    'semfpn_mavit_s_ade20k': 28.3,
    'semfpn_mavit_b_ade20k': 51.0,
    'semfpn_mavit_l_ade20k': 97.9,
}
# Billion multiply-adds of convolutions and linear layers, 1000 box and 100 mask RoIs per stage, at
# 800x1280 (COCO) and 512x2048 (ADE20K): published for a model of the same widths and depths by
# https://github.com/qhfan/RALA, whose counter takes norms in as well.
BILLION_MULTIPLY_ADDS = {
    'mask_rcnn_mavit_t_coco': 219,
    'mask_rcnn_mavit_s_coco': 262,
    'mask_rcnn_mavit_b_coco': 372,
    'mask_rcnn_mavit_l_coco': 501,
    'cascade_mavit_s_coco': 741,
    'cascade_mavit_b_coco': 851,
    'cascade_mavit_l_coco': 979,
    'retinanet_mavit_t_coco': 201,
    'retinanet_mavit_s_coco': 244,
    'retinanet_mavit_b_coco': 353,
    'retinanet_mavit_l_coco': 482,
    'semfpn_mavit_t_ade20k': 136,
    'semfpn_mavit_s_ade20k': 180,
    'semfpn_mavit_b_ade20k': 292,
    'semfpn_mavit_l_ade20k': 424,
    'upernet_mavit_s_ade20k': 937,
    'upernet_mavit_b_ade20k': 1050,
    'upernet_mavit_l_ade20k': 1182,
}
# The same of the backbone alone at 800x1280, and of its attention's matrix products.
BACKBONE_MULTIPLY_ADDS = {
    't': (48.7, 52.8),
    's': (91.4, 98.1),
    'b': (199.5, 161.9),
    'l': (327.7, 291.5),
}
DROP_PATH_RATE = {'t': 0.1, 's': 0.15, 'b': 0.4, 'l': 0.55}


@pytest.fixture
def build_model(load_config):
    """Returns a function from a config's name and ``--cfg-options`` to its model and config."""

    def build(name, options=None):
        cfg = load_config(name)
        cfg.merge_from_dict(options or {})
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            return MODELS.build(cfg.model), cfg

    return build


@pytest.mark.parametrize('name', MILLION_PARAMS)
def test_size_and_channels(build_model, name):
    with torch.device('meta'):  # sizes only
        model, _ = build_model(name)
    params = sum(parameter.numel() for parameter in model.parameters())
    assert params / 1e6 == pytest.approx(MILLION_PARAMS[name], abs=0.05)

    backbone = model.backbone
    assert type(backbone).__name__ == 'MAViT'
    size = name.split('mavit_')[1][0]
    last_block = backbone.layers[-1].blocks[-1]
    assert last_block.drop_path.drop_prob == pytest.approx(DROP_PATH_RATE[size])
    assert isinstance(backbone.patch_embed.proj[1], torch.nn.SyncBatchNorm)
    stages = (1, 2, 3) if name.startswith('retinanet') else (0, 1, 2, 3)
    assert backbone.out_indices == stages
    channels = [backbone.embed_dims[i] for i in stages]
    if name.startswith('upernet'):
        assert list(model.decode_head.in_channels) == channels
        assert model.auxiliary_head.in_channels == channels[2]
        assert model.auxiliary_head.in_index == 2
        assert model.auxiliary_head.loss_decode.loss_weight == 0.4
    else:
        assert list(model.neck.in_channels) == channels
    if name.endswith('ade20k'):
        assert isinstance(model.decode_head.dropout, torch.nn.Dropout2d)
        assert model.decode_head.num_classes == 150
        assert model.decode_head.norm_cfg['type'] == 'SyncBN'
        assert model.test_cfg.mode == 'whole'
        assert tuple(model.data_preprocessor.size) == (512, 512)
    else:
        assert model.data_preprocessor.pad_size_divisor == 32


@pytest.mark.parametrize('name', BILLION_MULTIPLY_ADDS)
def test_multiply_adds(build_model, tool, name):
    get_flops = tool('get_flops')
    with torch.device('meta'):
        model, cfg = build_model(name)
    costs = get_flops.count(model, get_flops.DEFAULT_SHAPE[cfg.default_scope])
    total, backbone = costs['total'], costs['backbone']
    assert total.parameters / 1e6 == pytest.approx(MILLION_PARAMS[name], abs=0.05)
    assert total.layer_multiply_adds / 1e9 == pytest.approx(BILLION_MULTIPLY_ADDS[name], rel=0.015)
    attention = backbone.multiply_adds - backbone.layer_multiply_adds
    assert total.multiply_adds - total.layer_multiply_adds == attention
    if name.endswith('coco'):
        size = name.split('mavit_')[1][0]
        assert (backbone.layer_multiply_adds / 1e9, attention / 1e9) == pytest.approx(
            BACKBONE_MULTIPLY_ADDS[size], abs=0.05
        )


def test_cascade_heads(build_model):
    model, _ = build_model('cascade_mavit_s_coco')
    assert model.roi_head.stage_loss_weights == [1, 0.5, 0.25]
    assert model.rpn_head.loss_bbox.beta == pytest.approx(1 / 9)
    widths = [0.1, 0.05, 0.033]
    for head, width, mask_head in zip(
        model.roi_head.bbox_head, widths, model.roi_head.mask_head, strict=True
    ):
        convs = [module for module in head.modules() if isinstance(module, torch.nn.Conv2d)]
        norms = [module for module in head.modules() if isinstance(module, torch.nn.SyncBatchNorm)]
        assert (len(convs), len(norms), len(head.shared_fcs)) == (4, 4, 1)
        assert head.fc_cls.out_features == 81
        assert head.fc_reg.out_features == 80 * 4  # one box per class
        assert head.bbox_coder.stds[0] == width
        assert head.reg_decoded_bbox
        assert type(head.loss_bbox).__name__ == 'GIoULoss'
        assert head.loss_bbox.loss_weight == 10
        assert not any(isinstance(module, torch.nn.SyncBatchNorm) for module in mask_head.modules())


def _names_without_decay(model, cfg):
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [
        (names[id(parameter)], group['weight_decay'])
        for group in optimizer.param_groups
        for parameter in group['params']
    ]
    assert {name for name, _ in grouped} == set(names.values())
    expected = cfg.optim_wrapper.optimizer.weight_decay
    assert {decay for _, decay in grouped} <= {0, expected}
    return {name for name, decay in grouped if decay == 0}


def test_weight_decay_of_cascade(build_model):
    model, cfg = build_model('cascade_mavit_b_coco')
    without = _names_without_decay(model, cfg)
    assert len(list(model.parameters())) == 708
    # 28 blocks with two LayerNorms, 3 downsamplings, 4 output norms, 4 stem and 12 head norms
    assert len(without) == 158 == 2 * (2 * 28 + 3 + 4 + 4 + 12)
    assert {f'backbone.patch_embed.proj.{i}.weight' for i in (1, 4, 7, 10)} <= without


@pytest.mark.parametrize('name', ['mask_rcnn_mavit_t_coco', 'upernet_mavit_t_ade20k'])
def test_weight_decay_by_name(build_model, name):
    model, cfg = build_model(name)
    without = _names_without_decay(model, cfg)
    # 12 blocks with two LayerNorms, 3 downsamplings, 4 output norms; not the stem's norms
    assert len(without) == 2 * (2 * 12 + 3 + 4)
    assert all('norm' in parameter for parameter in without)


@pytest.mark.parametrize('name', ['retinanet_mavit_t_coco', 'semfpn_mavit_t_ade20k'])
def test_weight_decay_everywhere(build_model, name):
    assert _names_without_decay(*build_model(name)) == set()


def _detection_batch():
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    rng = np.random.default_rng(0)
    batch = dict(inputs=[], data_samples=[])
    for height, width in ((64, 96), (90, 64)):
        boxes = np.array([[4, 6, 40, 50], [20, 10, 60, 44]], np.float32)
        masks = np.zeros((2, height, width), np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
            mask[top:bottom, left:right] = 1
        sample = DetDataSample(metainfo=dict(img_shape=(height, width), scale_factor=(1, 1)))
        sample.gt_instances = InstanceData(
            bboxes=torch.from_numpy(boxes),
            labels=torch.tensor([0, 79]),
            masks=BitmapMasks(masks, height, width),
        )
        sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4))
        image = rng.integers(0, 256, (3, height, width), dtype=np.uint8)
        batch['inputs'].append(torch.from_numpy(image))
        batch['data_samples'].append(sample)
    return batch


def _segmentation_batch():
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    rng = np.random.default_rng(0)
    batch = dict(inputs=[], data_samples=[])
    for _ in range(2):
        labels = rng.integers(0, 150, (1, 64, 64))
        labels[0, :8] = 255
        sample = SegDataSample(metainfo=dict(img_shape=(64, 64)))
        sample.gt_sem_seg = PixelData(data=torch.from_numpy(labels))
        image = rng.integers(0, 256, (3, 64, 64), dtype=np.uint8)
        batch['inputs'].append(torch.from_numpy(image))
        batch['data_samples'].append(sample)
    return batch


FEW_PROPOSALS = {
    'model.train_cfg.rpn_proposal.nms_pre': 100,
    'model.train_cfg.rpn_proposal.max_per_img': 20,
}


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        (
            'mask_rcnn_mavit_t_coco',
            FEW_PROPOSALS | {'model.train_cfg.rcnn.sampler.num': 16},
        ),
        (
            'cascade_mavit_s_coco',
            FEW_PROPOSALS | {f'model.train_cfg.rcnn.{i}.sampler.num': 16 for i in range(3)},
        ),
        ('retinanet_mavit_t_coco', {}),
        ('upernet_mavit_t_ade20k', {'model.data_preprocessor.size': (64, 64)}),
        ('semfpn_mavit_t_ade20k', {'model.data_preprocessor.size': (64, 64)}),
    ],
)
def test_training_step_reaches_every_parameter(build_model, name, options):
    torch.manual_seed(0)
    model, cfg = build_model(name, options)
    batch = _segmentation_batch() if name.endswith('ade20k') else _detection_batch()
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
        data = model.data_preprocessor(batch, training=True)
        loss, log = model.parse_losses(model(**data, mode='loss'))
        assert all(torch.isfinite(value) for value in log.values()), log
        loss.backward()
        # Distributed training stops at a parameter that no loss reaches.
        assert not [key for key, value in model.named_parameters() if value.grad is None]
        optim_wrapper.optimizer.step()
    for key, value in model.named_parameters():
        assert torch.isfinite(value).all(), key
