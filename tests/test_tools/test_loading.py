"""Whole models in tools/train.py and tools/test.py: `load_from`, `--resume` and CHECKPOINT."""

import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from safetensors.torch import save_file
from synthetic import load_parameters
from torch import Tensor

from mala_mm.engine import Runner


class Call:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def weights_for(config: Path, **options) -> dict[str, Tensor]:
    """Synthetic weights of a config's model."""
    cfg = Config.fromfile(config)
    cfg.merge_from_dict(options)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    load_parameters(model)
    return model.state_dict()


@pytest.fixture
def main(tool, tmp_path, monkeypatch):
    """Call a tool's main in this process, in a folder of its own."""

    def main(name: str, config: Path, *args: object) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr('sys.argv', [f'{name}.py', str(config), *map(str, args)])
        tool(name).main()

    return main


@pytest.fixture
def load(main, monkeypatch, capsys):
    """Run a tool up to the point where its model is loaded; returns the runner and the output."""

    def load(*args: object) -> tuple[Runner, str]:
        class Loaded(BaseException):
            pass

        def load_and_stop(runner):
            load_or_resume(runner)
            raise Loaded(runner)

        load_or_resume = Runner.load_or_resume
        with monkeypatch.context() as patch:
            patch.setattr(Runner, 'load_or_resume', load_and_stop)
            with pytest.raises(Loaded) as stopped:
                main(*args)
        return stopped.value.args[0], capsys.readouterr().out

    return load


@pytest.fixture
def refused(main, capsys, tmp_path):
    """Run a tool that refuses the checkpoint w.pth; returns the reason."""

    def refused(*args: object) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(*args)
        assert exit_.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        beginning, _, reason = line.partition('checkpoint w.pth ')
        assert beginning == f'{args[0]}.py: error: '
        return reason

    return refused


def test_test_loads_all_or_nothing(tiny_mask_rcnn, tmp_path, load, refused):
    weights = weights_for(tiny_mask_rcnn)
    save_file(
        {f'module.{name}': value for name, value in weights.items()}, tmp_path / 'w.safetensors'
    )
    runner, log = load('test', tiny_mask_rcnn, 'w.safetensors')
    assert f'MaskRCNN: {len(weights)} of {len(weights)} tensors from w.safetensors' in log
    for name, value in runner.model.state_dict().items():
        assert torch.equal(value, weights[name]), name

    weights['bbox_head.fc_cls.weight'] = weights.pop('roi_head.bbox_head.fc_cls.weight')
    torch.save(dict(state_dict=weights), tmp_path / 'w.pth')
    assert refused('test', tiny_mask_rcnn, 'w.pth') == (
        f'does not fit this MaskRCNN of {len(weights)} tensors: '
        '1 missing (roi_head.bbox_head.fc_cls.weight); 1 left over (bbox_head.fc_cls.weight)'
    )


def test_tta_loads_all_or_nothing(tiny_retinanet, tmp_path, load, refused):
    weights = weights_for(tiny_retinanet)
    torch.save(weights, tmp_path / 'w.pth')
    runner, _ = load('test', tiny_retinanet, 'w.pth', '--tta')
    assert torch.equal(
        runner.model.module.bbox_head.retina_cls.weight, weights['bbox_head.retina_cls.weight']
    )
    weights.pop('bbox_head.retina_cls.weight')
    torch.save(weights, tmp_path / 'w.pth')
    assert '1 missing (bbox_head.retina_cls.weight)' in refused(
        'test', tiny_retinanet, 'w.pth', '--tta'
    )


CLASS_LAYERS = ('bbox_head.fc_cls', 'bbox_head.fc_reg', 'mask_head.conv_logits')


def test_fine_tuning_keeps_the_initial_values_of_class_layers(
    tiny_mask_rcnn, tmp_path, load, refused
):
    classes = {f'model.roi_head.{head}.num_classes': 80 for head in ('bbox_head', 'mask_head')}
    weights = weights_for(tiny_mask_rcnn, **classes)
    torch.save(dict(state_dict=weights, meta=dict(epoch=12)), tmp_path / 'w.pth')
    runner, log = load('train', tiny_mask_rcnn, '--cfg-options', 'load_from=w.pth')
    kept = {f'roi_head.{layer}.{kind}' for layer in CLASS_LAYERS for kind in ('weight', 'bias')}
    own = runner.model.state_dict()
    assert {name for name in own if not torch.equal(own[name], weights[name])} == kept
    assert own['roi_head.bbox_head.fc_cls.bias'].tolist() == [0.0, 0.0, 0.0]
    (line,) = [line for line in log.splitlines() if 're-initialised' in line]
    assert 're-initialised, 81 -> 3 classes: roi_head.bbox_head.fc_cls.weight, ' in line
    assert all(name in line for name in kept)

    assert '6 of another shape' in refused('test', tiny_mask_rcnn, 'w.pth')
    weights.pop('neck.fpn_convs.0.conv.bias')
    torch.save(dict(state_dict=weights), tmp_path / 'w.pth')
    assert refused('train', tiny_mask_rcnn, '--cfg-options', 'load_from=w.pth').endswith(
        'tensors: 1 missing (neck.fpn_convs.0.conv.bias)'
    )


def test_weights_alone_are_not_resumed(tiny_semfpn, tmp_path, refused):
    torch.save(dict(state_dict=weights_for(tiny_semfpn), meta=dict(iter=4)), tmp_path / 'w.pth')
    assert refused('train', tiny_semfpn, '--resume', 'w.pth').startswith(
        'cannot be resumed, it has no message_hub, optimizer, meta.epoch: start from its '
    )


def test_resume(tiny_semfpn, tmp_path, main, load, refused):
    """With averaged weights, each kind goes back to its place; the config text does not run."""
    config = tmp_path / 'averaged.py'
    settings = dict(
        custom_hooks=[dict(type='EMAHook', update_buffers=True)],
        train_cfg=dict(max_iters=2, val_interval=2),
        default_hooks=dict(checkpoint=dict(interval=2)),
    )
    lines = [f'{name} = {value!r}' for name, value in settings.items()]
    config.write_text('\n'.join([f'_base_ = {str(tiny_semfpn)!r}', *lines]))
    main('train', config, '--work-dir', 'work')
    path = tmp_path / 'work' / 'iter_2.pth'
    saved = torch.load(path)
    saved['meta']['config'] = f'import os\nos.system("touch {tmp_path}/ran")\n'
    torch.save(saved, tmp_path / 'w.pth')
    runner, _ = load('train', config, '--resume', 'w.pth')
    assert not (tmp_path / 'ran').exists()
    assert runner.iter == 2
    ema_model = next(hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model'))
    trained, averaged = runner.model.state_dict(), ema_model.module.state_dict()
    name = 'decode_head.conv_seg.weight'
    assert not torch.equal(trained[name], averaged[name])
    for name, value in saved['state_dict'].items():
        assert torch.equal(averaged[name], value), name
        assert torch.equal(trained[name], saved['ema_state_dict'][f'module.{name}']), name

    others = dict(param_schedulers=saved['param_schedulers'] * 2)
    torch.save(saved | others, tmp_path / 'w.pth')
    assert 'parameter schedulers, the config has' in refused('train', config, '--resume', 'w.pth')
    torch.save({n: v for n, v in saved.items() if n != 'ema_state_dict'}, tmp_path / 'w.pth')
    assert 'the config has averaged weights (EMAHook), the checkpoint has none' in refused(
        'train', config, '--resume', 'w.pth'
    )

    saved['state_dict'].pop('decode_head.conv_seg.bias')
    torch.save(saved, tmp_path / 'w.pth')
    assert '1 missing (decode_head.conv_seg.bias)' in refused('train', config, '--resume', 'w.pth')


@pytest.mark.parametrize('option', ['load_from', 'model.backbone.init_cfg'])
def test_code_is_refused(option, tiny_semfpn, tmp_path, refused):
    poison = Call(os.system, f'touch {tmp_path}/ran')
    torch.save(dict(state_dict=weights_for(tiny_semfpn), optimizer=poison), tmp_path / 'w.pth')
    reason = refused('train', tiny_semfpn, '--cfg-options', f'{option}=w.pth')
    assert reason.startswith('was refused: it names posix.system')
    assert not (tmp_path / 'ran').exists()
