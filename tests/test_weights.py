"""Loading weights: published wrappings against golden values, and one error for what misfits."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from synthetic import TINY, assert_matches, image, load_parameters, parameter
from torch import nn

from mala_mm.checkpoint import CheckpointError
from mala_mm.models import MAViT
from mala_mm.weights import fit_model, published_arch

GOLDEN = Path(__file__).parent / 'golden'


@pytest.fixture
def log(monkeypatch) -> list[str]:
    lines = []
    monkeypatch.setattr('mala_mm.weights.print_log', lambda message, logger: lines.append(message))
    return lines


def pretrained(path: Path, arch: str | dict = TINY, **kwargs) -> MAViT:
    model = MAViT(arch, init_cfg=dict(type='Pretrained', checkpoint=str(path)), **kwargs)
    model.init_weights()
    return model


@pytest.fixture(scope='module')
def published() -> dict[str, dict[str, torch.Tensor]]:
    """Synthetic weights under the published names of an ImageNet model and of a backbone."""
    keys = json.loads((GOLDEN / 'checkpoint_keys_t.json').read_text())
    angles = MAViT('t').state_dict()
    return {
        kind: {
            name: angles[name]
            if name.endswith('RoPE.angle')
            else torch.from_numpy(parameter(name, tuple(shape))).float()
            for name, shape in keys[f'{kind}_t'].items()
        }
        for kind in ('cls', 'det')
    }


def prefixed(weights: dict, prefix: str) -> dict:
    return {prefix + name: value for name, value in weights.items()}


def without_angles(weights: dict) -> dict:
    return {name: value for name, value in weights.items() if not name.endswith('RoPE.angle')}


HEAD = {'neck.convs.0.weight': torch.ones(3), 'roi_head.norm.weight': torch.ones(3)}
WRAPPINGS = {
    'bare': ('det', lambda w: w),
    'state_dict': ('det', lambda w: dict(state_dict=w, meta=dict(epoch=12), optimizer={})),
    'model': ('cls', lambda w: dict(model=w, epoch=300)),
    'beside its average': ('cls', lambda w: dict(model=w, model_ema={n: 0 * w[n] for n in w})),
    'module': ('cls', lambda w: dict(model=prefixed(w, 'module.'))),
    'detector': ('det', lambda w: dict(state_dict=prefixed(w, 'backbone.') | HEAD)),
    'module.backbone': (
        'det',
        lambda w: dict(state_dict=prefixed(prefixed(w, 'backbone.') | HEAD, 'module.')),
    ),
    'nested': ('det', lambda w: dict(model=prefixed(w, 'model.module.backbone.'))),
    'numpy': ('det', lambda w: {name: value.numpy() for name, value in w.items()}),
    'without angles': ('det', without_angles),
    'half angles': (
        'det',
        lambda w: {n: v.half() if n.endswith('angle') else v for n, v in w.items()},
    ),
    'safetensors': ('det', lambda w: prefixed(w, 'backbone.') | HEAD),
}


@pytest.mark.parametrize(('kind', 'wrap'), WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_published_file_gives_the_published_outputs(kind, wrap, published, tmp_path, log, request):
    content = wrap(published[kind])
    if request.node.callspec.id == 'safetensors':
        path = tmp_path / 'weights.safetensors'
        save_file(content, path)
    else:
        path = tmp_path / 'weights.pth'
        torch.save(content, path)
    model = pretrained(path, 't').eval()

    norms = {n: v for n, v in published['det'].items() if n.startswith('extra_norms.')}
    angles = 4 if request.node.callspec.id == 'without angles' else 0
    loaded = len(published['det']) - angles - (len(norms) if kind == 'cls' else 0)
    assert f'MAViT: {loaded} of 301 tensors from {path}' in log
    if kind == 'cls':
        assert [line.partition(':')[0] for line in log if 'tensors' not in line] == [
            'left out the classifier',
            'keep their initial values',
        ]
        for name in norms:
            assert (model.state_dict()[name] == float(name.endswith('weight'))).all(), name
        model.load_state_dict(norms, strict=False)

    golden = json.loads((GOLDEN / 'backbone.json').read_text())[0]
    batch, _, height, width = golden['input']
    with torch.no_grad():
        outs = model(torch.from_numpy(image(batch, height, width)).float())
    for out, expected in zip(outs, golden['outputs'], strict=True):
        assert_matches(out, expected, 1e-4)


@pytest.fixture
def tiny() -> MAViT:
    model = MAViT(TINY)
    load_parameters(model)
    return model


@pytest.mark.parametrize(
    ('out_indices', 'left_out'),
    [
        ((1, 2, 3), '2 tensors that out_indices=(1, 2, 3) does not build: extra_norms.0.norm.w'),
        ((0, 1), 'layers.1.downsample.reduction.weight, layers.1.downsample.reduction.bias, '),
    ],
)
def test_what_out_indices_does_not_build_is_left_out(out_indices, left_out, tiny, tmp_path, log):
    torch.save(tiny.state_dict(), tmp_path / 'weights.pth')
    model = pretrained(tmp_path / 'weights.pth', out_indices=out_indices)
    for name, value in model.state_dict().items():
        assert torch.equal(value, tiny.state_dict()[name]), name
    (line,) = [line for line in log if line.startswith('left out')]
    assert left_out in line


@pytest.mark.parametrize('prefix', ['encoder.backbone', 'encoder.backbone.'])
def test_pretrained_in_a_list_and_under_a_prefix(prefix, tiny, tmp_path):
    path = tmp_path / 'weights.pth'
    weights = prefixed(tiny.state_dict(), 'encoder.backbone.')
    other = prefixed({n: 0 * v for n, v in tiny.state_dict().items()}, 'teacher.')
    torch.save(dict(state_dict=weights | other), path)
    cfg = dict(type='mmengine.Pretrained', checkpoint=str(path), prefix=prefix)
    model = MAViT(TINY, init_cfg=[cfg, dict(type='Constant', layer='Conv2d', val=7.0)])
    model.init_weights()
    for name, value in tiny.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    with pytest.raises(CheckpointError, match=r'no tensor under the prefix nope\.'):
        MAViT(TINY, init_cfg=[dict(cfg, prefix='nope.')]).init_weights()
    with pytest.raises(CheckpointError, match=r'several backbones, such as encoder\.backbone\.\*'):
        pretrained(path)


def test_two_backbones_of_which_one_is_smaller(tiny, tmp_path):
    path = tmp_path / 'weights.pth'
    teacher = {n: v for n, v in tiny.state_dict().items() if not n.startswith('extra_norms')}
    torch.save(prefixed(tiny.state_dict(), 'student.') | prefixed(teacher, 'teacher.'), path)
    with pytest.raises(CheckpointError, match='several backbones'):
        pretrained(path)


def test_init_cfg_as_a_path_or_a_class(tiny, tmp_path):
    from mmengine.model import PretrainedInit

    torch.save(tiny.state_dict(), tmp_path / 'weights.pth')
    path = str(tmp_path / 'weights.pth')
    for init_cfg in (path, dict(checkpoint=path), dict(type=PretrainedInit, checkpoint=path)):
        model = MAViT(TINY, init_cfg=init_cfg)
        model.init_weights()
        assert torch.equal(model.layers[0].blocks[0].gamma_1, tiny.layers[0].blocks[0].gamma_1)
    with pytest.raises(CheckpointError, match='needs a checkpoint=PATH_OR_URL'):
        MAViT(TINY, init_cfg=dict(type='Pretrained')).init_weights()


GAMMA = 'layers.0.blocks.0.gamma_1'
MISFITS = {
    'a key renamed': (
        lambda w: w.update(gamma=w.pop(GAMMA)),
        r'1 missing \(layers\.0\.blocks\.0\.gamma_1\); 1 left over \(gamma\)$',
    ),
    'a shape changed': (
        lambda w: w.update({GAMMA: torch.ones(8)}),
        r'1 of another shape \(layers\.0\.blocks\.0\.gamma_1 \(8,\) instead of \(1, 8, 1, 1\)\)$',
    ),
    'integers for floats': (
        lambda w: w.update({GAMMA: torch.ones(1, 8, 1, 1, dtype=torch.int8)}),
        r'1 of another dtype \(layers.*gamma_1 torch\.int8 instead of torch\.float32\)$',
    ),
    'some missing': (
        lambda w: [w.pop(name) for name in list(w) if 'ffn' in name],
        r'24 missing \(layers\.0\.blocks\.0\.ffn\.fc1\.weight, (\S+), (\S+), \.\.\.\)$',
    ),
    'another model': (
        lambda w: (w.clear(), w.update(nn.Conv2d(3, 8, 1).state_dict())),
        r'129 missing \(patch_embed.proj.0.weight, .*\); 2 left over \(weight, bias\)$',
    ),
    'other head dims': (
        lambda w: w.update({'layers.1.RoPE.angle': torch.ones(8)}),
        r'1 of another shape \(layers\.1\.RoPE\.angle \(8,\) instead of \(4,\)\)$',
    ),
}


@pytest.mark.parametrize(('change', 'message'), MISFITS.values(), ids=MISFITS.keys())
def test_misfit_loads_nothing(change, message, tiny, tmp_path):
    path = tmp_path / 'weights.pth'
    weights = dict(tiny.state_dict())
    change(weights)
    torch.save(dict(model=weights), path)
    model = MAViT(TINY, init_cfg=str(path))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    beginning = f'^checkpoint {re.escape(str(path))} does not fit this MAViT of 141 tensors: '
    with pytest.raises(CheckpointError, match=beginning + message):
        model.init_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_arch_is_recognised(published, tmp_path):
    path = tmp_path / 'mavit_t.pth'
    torch.save(dict(model=published['cls']), path)
    for arch in ('s', TINY):
        with pytest.raises(CheckpointError, match=r'of another shape \(.*this looks like MAViT-T$'):
            pretrained(path, arch)


@pytest.mark.parametrize('arch', ['t', 's', 'b', 'l'])
def test_arch_of_weights(arch):
    with torch.device('meta'):
        weights = MAViT(arch).state_dict()
        assert published_arch(MAViT(arch, out_indices=(0, 1)).state_dict()) == arch
    assert published_arch(prefixed(weights, 'module.backbone.')) == arch
    weights.pop('layers.3.blocks.0.gamma_1')
    assert published_arch(weights) is None
    assert published_arch({}) is None


class Head(nn.Module):
    """Layers as mmdet's box heads have them: one row of fc_cls is the background's."""

    def __init__(self, num_classes: int, agnostic: bool = False, width: int = 5):
        super().__init__()
        self.num_classes = num_classes
        self.shared_fcs = nn.Linear(3, width)
        self.fc_cls = nn.Linear(width, num_classes + 1)
        self.fc_reg = nn.Linear(width, 4 if agnostic else 4 * num_classes)


class Detector(nn.Module):
    def __init__(self, anchors: int = 3, **head):
        super().__init__()
        self.backbone = MAViT(TINY)
        self.rpn_head = nn.Module()
        self.rpn_head.num_classes = 1
        self.rpn_head.rpn_cls = nn.Conv2d(2, anchors, 1)
        self.bbox_head = Head(**head)


LAYERS = [
    f'bbox_head.{layer}.{kind}' for layer in ('fc_cls', 'fc_reg') for kind in ('weight', 'bias')
]


@pytest.mark.parametrize('classes', [1, 3, 160])
def test_fine_tuning_with_other_classes(classes, log):
    weights = Detector(num_classes=80).state_dict()
    model = Detector(num_classes=classes)
    with pytest.raises(CheckpointError, match=r'4 of another shape \(bbox_head\.fc_cls\.weight'):
        fit_model(model, weights, 'f')
    fitted = fit_model(model, weights, 'f', fine_tune=True)
    assert weights.keys() - fitted.keys() == set(LAYERS)
    assert log == [
        'Detector: 145 of 149 tensors from f',
        f're-initialised, 81 -> {classes + 1} classes: {LAYERS[0]}, {LAYERS[1]}; '
        f'80 -> {classes} classes: {LAYERS[2]}, {LAYERS[3]}',
    ]


@pytest.mark.parametrize(
    ('file', 'model', 'first'),
    [
        ({}, dict(agnostic=True), 'bbox_head.fc_reg.weight'),
        (dict(agnostic=True), {}, 'bbox_head.fc_reg.weight'),
        ({}, dict(num_classes=3, agnostic=True), 'bbox_head.fc_cls.weight'),
        ({}, dict(num_classes=3, width=6), 'bbox_head.shared_fcs.weight'),
        ({}, dict(anchors=6), 'rpn_head.rpn_cls.weight'),
        ({}, dict(num_classes=3, anchors=6), 'rpn_head.rpn_cls.weight'),
    ],
)
def test_fine_tuning_with_other_layers_is_an_error(file, model, first):
    weights = Detector(**dict(num_classes=80) | file).state_dict()
    model = Detector(**dict(num_classes=80) | model)
    with pytest.raises(CheckpointError, match=rf'of another shape \({first} \('):
        fit_model(model, weights, 'f', fine_tune=True)


def test_whole_model(log):
    model = Detector(num_classes=3)
    weights = model.state_dict()
    prefixes = ('module.', 'model.', 'module.model.')
    files = (weights, without_angles(weights), *(prefixed(weights, prefix) for prefix in prefixes))
    for content in files:
        fitted = fit_model(model, content, 'f')
        assert set(weights) - set(fitted) <= {n for n in weights if n.endswith('RoPE.angle')}
        assert all(fitted[name] is weights[name] for name in fitted)
    model.backbone = MAViT(TINY, out_indices=(1, 2, 3))
    log.clear()
    assert fit_model(model, weights, 'f').keys() == model.state_dict().keys()
    assert log[0].startswith('left out 2 tensors that out_indices=(1, 2, 3) does not build: backb')


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda w: w.pop('bbox_head.fc_cls.bias'), r'1 missing \(bbox_head\.fc_cls\.bias\)$'),
        (lambda w: w.update(extra=torch.ones(1)), r'1 left over \(extra\)$'),
        (
            lambda w: w.pop('backbone.extra_norms.0.norm.bias'),
            r'1 missing \(backbone\.extra_norms\.0\.norm\.bias\)$',
        ),
        (lambda w: w.update(dict.fromkeys(LAYERS[2:3], torch.ones(4, 5))), '1 of another shape'),
    ],
)
def test_whole_model_that_misfits(change, message):
    model = Detector(num_classes=3)
    weights = dict(model.state_dict())
    change(weights)
    for fine_tune in (False, True):
        with pytest.raises(CheckpointError, match=message):
            fit_model(model, weights, 'f', fine_tune)
    other = prefixed(model.state_dict(), 'module.model.') | dict(extra=torch.ones(1))
    with pytest.raises(CheckpointError, match=r'1 left over \(extra\)$'):
        fit_model(model, other, 'f')


def test_a_backbone_is_no_whole_model(tiny):
    for prefix in ('', 'module.'):
        weights = prefixed(tiny.state_dict(), prefix)
        with pytest.raises(
            CheckpointError, match=r'^checkpoint f holds a backbone alone: .*init_cfg'
        ):
            fit_model(Detector(num_classes=3), weights, 'f', fine_tune=True)
