"""The backbone's surface: arguments, shapes, state dicts, freezing, memory saving, precision."""

import json
from pathlib import Path

import pytest
import torch
from mmengine.model import revert_sync_batchnorm
from synthetic import TINY, load_parameters
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.models import MAViT
from mala_mm.models.layers import MagnitudeAwareLinearAttention, PointwiseConv
from mala_mm.ops import rotary_angles


def tiny(**kwargs) -> MAViT:
    torch.manual_seed(0)
    model = MAViT(TINY, **kwargs)
    model.init_weights()
    return model


@pytest.mark.parametrize(
    ('arch', 'parameters'), [('t', 13347328), ('S', 24040896), ('b', 46691296), ('L', 93561760)]
)
def test_arch(arch, parameters):
    with torch.device('meta'):
        model = MAViT(arch)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.embed_dims) == 4
    rates = [block.drop_path.drop_prob for stage in model.layers for block in stage.blocks]
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(MAViT.arch_settings[arch.lower()]['drop_path_rate'])
    steps = torch.tensor(rates).diff()
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))


@pytest.mark.parametrize('arch', ['t', 's', 'b', 'l'])
def test_published_keys(request, arch):
    if arch == 't':
        path = Path(__file__).parents[1] / 'golden' / 'checkpoint_keys_t.json'
    else:
        path = request.getfixturevalue('shared') / 'reference' / 'checkpoint_keys.json'
    keys = json.loads(path.read_text())
    model = MAViT(arch)
    with torch.device('meta'):
        dense, classifier = (
            {name: torch.empty(shape) for name, shape in keys[f'{kind}_{arch}'].items()}
            for kind in ('det', 'cls')
        )
    own = model.state_dict()
    assert {name: list(value.shape) for name, value in own.items()} == keys[f'det_{arch}']
    model.load_state_dict(dense, strict=True, assign=True)
    missing, left_over = model.load_state_dict(classifier, strict=False, assign=True)
    assert missing
    assert left_over
    assert all(name.startswith('extra_norms.') for name in missing)
    assert all(name.startswith(('proj.', 'norm.', 'head.')) for name in left_over)


@pytest.mark.parametrize('size', [(64, 96), (33, 57), (1, 1), (5, 130)])
def test_output_sizes(size):
    model = tiny().eval()
    outs = model(torch.randn(2, 3, *size))
    expected = size
    expected = tuple((s + 1) // 2 for s in expected)
    for out, channels in zip(outs, TINY['embed_dims'], strict=True):
        expected = tuple((s + 1) // 2 for s in expected)
        assert out.shape == (2, channels, *expected)


@pytest.mark.parametrize('out_indices', [(0,), (1, 3), (2,), [0, 1, 2, 3]])
def test_only_what_out_indices_needs_is_built(out_indices):
    full, part = tiny().eval(), tiny(out_indices=out_indices).eval()
    part.load_state_dict({k: v for k, v in full.state_dict().items() if k in part.state_dict()})
    image = torch.randn(1, 3, 40, 48)
    outs, expected = part(image), full(image)
    assert len(outs) == len(out_indices)
    for out, index in zip(outs, out_indices, strict=True):
        torch.testing.assert_close(out, expected[index])
    part.train()
    sum(out.sum() for out in part(image)).backward()
    assert [name for name, p in part.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ('frozen_stages', 'trained'),
    [
        (-1, {'patch_embed', 'layers.0', 'layers.1', 'layers.2', 'layers.3', 'norms.1', 'norms.3'}),
        (0, {'layers.0', 'layers.1', 'layers.2', 'layers.3', 'norms.1', 'norms.3'}),
        (1, {'layers.1', 'layers.2', 'layers.3', 'norms.1', 'norms.3'}),
        (2, {'layers.2', 'layers.3', 'norms.3'}),
        (4, set()),
    ],
)
def test_frozen_stages(frozen_stages, trained):
    model = tiny(frozen_stages=frozen_stages, out_indices=(1, 3))
    assert model.train() is model

    def part(name):
        head, index = name.split('.')[:2]
        return head if head == 'patch_embed' else f'{head.removeprefix("extra_")}.{index}'

    assert {part(n) for n, p in model.named_parameters() if p.requires_grad} == trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outs = model(torch.randn(2, 3, 64, 64))
    if trained:
        sum(out.square().sum() for out in outs).backward()
    optimizer.step()
    after = model.state_dict()
    assert {part(n) for n in before if not torch.equal(before[n], after[n])} == trained


@pytest.mark.parametrize('norm_type', ['BN', 'SyncBN'])
def test_norm_eval(norm_type):
    model = tiny(norm_cfg=dict(type=norm_type), norm_eval=True).train()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 4 + 3
    assert not any(norm.training for norm in norms)
    assert all(norm.weight.requires_grad for norm in norms)
    assert model.patch_embed.training
    assert all(norm.training for norm in tiny(norm_cfg=dict(type=norm_type)).train().modules())


def test_one_state_dict_for_bn_and_sync_bn():
    sync, plain = tiny(norm_cfg=dict(type='SyncBN')), tiny()
    plain.load_state_dict(sync.state_dict(), strict=True)
    image = torch.randn(1, 3, 32, 32)
    for a, b in zip(plain.eval()(image), revert_sync_batchnorm(sync).eval()(image), strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_changes_no_gradient():
    image = torch.randn(2, 3, 40, 56)
    gradients, forwards = [], []
    for with_cp in (False, True):
        model = tiny(with_cp=with_cp, drop_path_rate=0.5).train()
        calls = []
        model.layers[1].blocks[0].attn.register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        torch.manual_seed(1)
        sum(out.square().mean() for out in model(image)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        forwards.append(len(calls))
    assert forwards == [1, 2]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0, msg=name)


def activation_bytes(model: MAViT, image: torch.Tensor) -> int:
    """What a forward keeps for the backward, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # holding it keeps the address taken
        return tensor

    def keep_input(block, args):
        keep(args[0])

    for stage in model.layers:
        for block in stage.blocks:  # checkpointing keeps their inputs without a hook
            block.register_forward_pre_hook(keep_input)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(image)
    return sum(storage.nbytes() for storage in kept.values())


def test_checkpointing_halves_the_activations():
    image = torch.randn(1, 3, 96, 128)
    plain, checkpointed = (
        activation_bytes(MAViT('t', with_cp=with_cp).train(), image) for with_cp in (False, True)
    )
    assert checkpointed < plain / 2


@pytest.mark.parametrize('with_gradients', [True, False])
def test_torch_counts_its_operations(with_gradients):
    model = tiny().train(with_gradients)
    with torch.set_grad_enabled(with_gradients), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 64, 64))
    counts = counter.get_flop_counts()['MAViT.layers.0.blocks.0.attn.proj']
    channels = TINY['embed_dims'][0]
    assert sum(counts.values()) == 2 * 16 * 16 * channels**2


def test_initialisation():
    torch.manual_seed(0)
    model = MAViT('b')
    model.init_weights()
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias.abs().max() == 0, name
            if module.weight.numel() > 5000:
                assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), name
        elif isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            assert (module.weight == 1).all(), name
            assert (module.bias == 0).all(), name
    scales = [stage.blocks[0].gamma_1.flatten()[0].item() for stage in model.layers]
    assert scales == pytest.approx([1, 1, 1e-6, 1e-6])


HALF = {
    'half': (torch.float16, lambda model: model.half()),
    'bfloat16': (torch.bfloat16, lambda model: model.bfloat16()),
    'to': (torch.bfloat16, lambda model: model.to(torch.bfloat16)),
    'half and back': (torch.float16, lambda model: model.half().float()),
    'autocast to half': (torch.float16, lambda model: model),
    'autocast to bfloat16': (torch.bfloat16, lambda model: model),
}


@pytest.mark.parametrize(('dtype', 'convert'), HALF.values(), ids=HALF.keys())
def test_half_precision_is_float32_but_for_rounding(request, dtype, convert):
    model = tiny().eval()
    load_parameters(model)
    image = torch.randn(1, 3, 64, 80)
    truth = model(image)
    angles = [stage.RoPE.angle.clone() for stage in model.layers]
    convert(model)
    for stage, angle in zip(model.layers, angles, strict=True):
        assert stage.RoPE.angle.dtype == torch.float32
        assert torch.equal(stage.RoPE.angle, angle)
    with torch.autocast('cpu', dtype, enabled='autocast' in request.node.callspec.id):
        outs = model(image.to(model.patch_embed.proj[0].weight.dtype))
    for out, expected in zip(outs, truth, strict=True):
        error = (out.float() - expected).square().mean() / expected.square().mean()
        assert error.sqrt() < 4 * torch.finfo(dtype).eps
    if 'autocast' not in request.node.callspec.id:
        assert outs[0].dtype == model.patch_embed.proj[0].weight.dtype


@pytest.mark.parametrize('amp', [False, True])
def test_queries_of_minus_twenty_give_no_nan(amp):
    model = tiny()
    for module in model.modules():
        if isinstance(module, MagnitudeAwareLinearAttention):
            queries = slice(0, module.qkvo.out_channels // 4)
            nn.init.zeros_(module.qkvo.weight[queries])
            nn.init.constant_(module.qkvo.bias[queries], -20)
    image = torch.randn(2, 3, 64, 64)
    if not amp:
        model, image = model.half(), image.half()
    with torch.autocast('cpu', dtype=torch.float16, enabled=amp):
        outs = model.train()(image)
        loss = sum(out.float().mean() for out in outs)
    loss.backward()
    for out in outs:
        assert out.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_a_half_precision_file_does_not_round_the_angles():
    model = tiny()
    angle = model.layers[0].RoPE.angle.clone()
    model.load_state_dict({name: value.half() for name, value in model.state_dict().items()})
    assert torch.equal(model.layers[0].RoPE.angle, angle)


def test_angles_of_another_head_dim_do_not_load():
    one_head = MAViT(dict(TINY, num_heads=(1, 1, 1, 1)))
    with pytest.raises(RuntimeError, match=r'RoPE\.angle'):
        tiny().load_state_dict(one_head.state_dict())


def test_angles_of_a_model_without_storage_are_made_on_loading():
    source = tiny().eval()
    with torch.device('meta'):
        model = MAViT(TINY).eval()
    model.load_state_dict(source.state_dict(), assign=True)
    image = torch.randn(1, 3, 32, 40)
    for out, expected in zip(model(image), source(image), strict=True):
        torch.testing.assert_close(out, expected)


def test_float64_keeps_the_angles():
    model = tiny().double().eval()
    assert model.layers[0].RoPE.angle.dtype == torch.float32
    assert model(torch.randn(1, 3, 32, 32, dtype=torch.float64))[0].dtype == torch.float64


def test_pointwise_conv_is_a_1x1_convolution():
    conv = PointwiseConv(6, 10)
    x = torch.randn(2, 5, 7, 6)
    expected = torch.einsum('bhwc,oc->bhwo', x, conv.weight[:, :, 0, 0]) + conv.bias
    torch.testing.assert_close(conv(x), expected)


@pytest.mark.parametrize('seed', range(4))
def test_dropped_samples(seed):
    block = tiny(drop_path_rate=0.6).layers[3].blocks[0].double().train()
    calls = []
    for part in (block.norm1, block.norm2):
        part.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    x = torch.randn(3, 2, 5, 32, dtype=torch.float64)
    angle = rotary_angles(8)
    torch.manual_seed(seed)
    out = block(x, angle)
    kept, keep = calls.copy(), 1 - block.drop_path.drop_prob
    torch.manual_seed(seed)
    expected = block.pos(x)
    for branch, norm, scale in (
        (lambda x, scale: block.attn(x, angle, scale), block.norm1, block.gamma_1),
        (block.ffn, block.norm2, block.gamma_2),
    ):
        factor = torch.rand(3, 1, 1, 1, dtype=torch.float64).add(keep).floor() / keep
        assert kept.pop(0) == factor.count_nonzero()
        expected = expected + factor * branch(norm(expected), scale.flatten())
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_dropped_samples_under_autocast(dtype):
    torch.manual_seed(0)
    model = tiny(drop_path_rate=0.9).train()
    image = torch.randn(3, 3, 32, 32)
    with torch.autocast('cpu', dtype=dtype):
        outs = model(image)
    assert all(out.isfinite().all() for out in outs)


def test_tracers_need_not_know_which_samples_are_dropped():
    model = tiny(drop_path_rate=0.9).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.randn(2, 3, 32, 32))[0].shape == (2, 8, 8, 8)


def test_a_branch_without_samples_has_zero_gradients():
    block = tiny(drop_path_rate=0.9).layers[3].blocks[0].train()
    block.drop_path.forward = torch.zeros_like
    block(torch.randn(2, 3, 2, 32, requires_grad=True), rotary_angles(8)).sum().backward()
    for name, p in block.named_parameters():
        assert p.grad is not None, name  # or DistributedDataParallel would wait for it
        assert p.grad.any() == name.startswith('pos.'), name


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_small_layer_scale_leaves_the_branch_its_gradient(dtype):
    conv = PointwiseConv(2, 2).to(dtype)
    nn.init.constant_(conv.weight, 2.0**-6)
    nn.init.constant_(conv.bias, 0.5)
    x = torch.ones(1, 1, 1, 2, dtype=dtype, requires_grad=True)
    scale = torch.full((2,), 2.0**-20, dtype=dtype)
    out = conv(x, scale)
    out.backward(torch.full_like(out, 2.0**12))  # as a scaled loss gives it
    assert out[0, 0, 0, 0].item() == pytest.approx(0.53125 * 2.0**-20, rel=2**-3)
    assert x.grad[0, 0, 0, 0].item() == pytest.approx(2.0**-13, rel=2**-7)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(arch='x'), "arch must be one of t, s, b, l or a dict, got 'x'"),
        (dict(arch=None), 'arch must be a name or a dict, got None'),
        (dict(arch={}), r'an arch dict has the keys .* missing: \[.*\], unknown: \[\]'),
        (dict(arch=dict(TINY, width=3)), r"unknown: \['width'\]"),
        (
            dict(arch=dict(TINY, depths=(1, 1))),
            r"arch\['depths'\] must be 4 whole numbers from 1, got \(1, 1\)",
        ),
        (
            dict(arch=dict(TINY, num_heads=(3, 2, 2, 4))),
            'multiple of 4 times its num_heads, got 8 for 3 heads',
        ),
        (dict(out_indices=(0, 4)), r'out_indices must be increasing .* 0..3, got \(0, 4\)'),
        (dict(out_indices=(1, 0)), r'got \(1, 0\)'),
        (dict(out_indices=(1, 1)), r'got \(1, 1\)'),
        (dict(out_indices=()), r'got \(\)'),
        (dict(out_indices=3), r'0..3, got 3'),
        (dict(out_indices=(True,)), r'got \(True,\)'),
        (dict(out_indices='0'), "got '0'"),
        (dict(frozen_stages=5), 'frozen_stages must be .* got 5'),
        (dict(frozen_stages=-2), 'frozen_stages must be .* got -2'),
        (dict(frozen_stages=3, out_indices=(0, 1)), r'the 2 that out_indices=\(0, 1\) builds'),
        (dict(drop_path_rate=1.0), r'drop_path_rate must lie in \[0, 1\), got 1.0'),
        (dict(drop_path_rate=-0.1), 'got -0.1'),
        (dict(drop_path_rate='0.1'), "got '0.1'"),
        (dict(arch=dict(TINY, drop_path_rate=None)), r'drop_path_rate must .* got None'),
        (
            dict(arch=dict(TINY, num_heads=(1, 0, 2, 4))),
            r"'num_heads'.* got \(1, 0, 2, 4\)",
        ),
        (dict(arch=dict(TINY, depths=(1, 1, -1, 1))), r"'depths'.* from 1, got \(1, 1, -1, 1\)"),
        (dict(arch=dict(TINY, depths=(1, True, 1, 1))), "'depths'"),
        (dict(arch=dict(TINY, depths=4)), "'depths'.* got 4"),
        (dict(arch=dict(TINY, embed_dims=(8, 16, 16.0, 32))), "'embed_dims'"),
        (dict(arch=dict(TINY, mlp_ratios=(2, 2, 2, 0))), r"'mlp_ratios'.* positive"),
        (dict(arch=dict(TINY, layer_scale_init=(1, 1, 1, float('nan')))), "'layer_scale_init'"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MAViT(**kwargs)
