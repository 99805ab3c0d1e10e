"""What the options of tools/train.py and tools/test.py do to a config."""

import argparse
import os
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from mala_mm import cli
from mala_mm.checkpoint import CheckpointError

PACK = dict(type='PackDetInputs', meta_keys=('img_id', 'ori_shape'))
IOU = dict(type='IoUMetric')


def load(path: Path, text: str, **given: object) -> Config:
    path.write_text(text)
    args = dict(config=str(path), cfg_options=None, work_dir=None, launcher='none', local_rank=0)
    return cli.load_config(argparse.Namespace(**{**args, **given}))


def detector(**changes: object) -> Config:
    cfg = dict(
        default_scope='mmdet',
        model=dict(type='RetinaNet', roi_head=dict(type='X')),
        default_hooks=dict(visualization=dict(type='DetVisualizationHook')),
        test_dataloader=dict(dataset=dict(pipeline=[dict(type='LoadImageFromFile'), PACK])),
        test_evaluator=dict(type='CocoMetric'),
    )
    return Config({**cfg, **changes})


def segmentor(**changes: object) -> Config:
    cfg = dict(
        default_scope='mmseg',
        model=dict(type='EncoderDecoder'),
        visualizer=dict(type='SegLocalVisualizer'),
        default_hooks=dict(visualization=dict(type='SegVisualizationHook', interval=50)),
        test_dataloader=dict(dataset=dict(pipeline=['plain'])),
        test_evaluator=dict(type='IoUMetric'),
        tta_model=dict(type='SegTTAModel'),
        tta_pipeline=['augmented'],
    )
    return Config({**cfg, **changes})


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(cli, 'get_device', lambda: 'cuda')


class TestParsers:
    @pytest.mark.parametrize(
        ('given', 'resume'),
        [
            ([], None),
            (['--resume'], 'auto'),
            (['--resume', 'auto'], 'auto'),
            (['--resume', 'a'], 'a'),
        ],
    )
    def test_resume(self, tool, given, resume):
        assert tool('train').build_parser().parse_args(['c.py', *given]).resume == resume

    @pytest.mark.parametrize('spelling', ['--local-rank', '--local_rank'])
    def test_local_rank_in_both_spellings(self, tool, spelling):
        assert (
            tool('test').build_parser().parse_args(['c.py', 'x', f'{spelling}=3']).local_rank == 3
        )

    def test_option_without_value_is_an_error(self, tool, capsys):
        with pytest.raises(SystemExit) as error:
            tool('train').build_parser().parse_args(['c.py', '--cfg-options', 'a=1', 'b'])
        assert error.value.code == 2
        assert "expected KEY=VALUE, got 'b'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ('name', 'given', 'message'),
        [
            ('train', ['none.py'], 'none.py'),
            ('train', ['c.py', '--resume', 'none.pth'], 'none.pth does not exist'),
            ('train', ['c.py', '--resume', ''], '--resume got an empty name'),
            ('train', ['c.py', '--auto-scale-lr'], 'base_batch_size'),
            ('train', ['c.py', '--cfg-options', 'model.roi_head=3'], 'model.roi_head is 3, expec'),
            ('train', ['c.py', '--cfg-options', 'default_scope=mmpose'], "got 'mmpose'"),
            ('test', ['c.py', 'none.pth'], 'none.pth does not exist'),
            ('test', ['c.py', 'w.pth', '--out', 'folder'], 'NAME.pkl'),
            ('test', ['c.py', 'w.pth', '--show'], 'default_hooks.visualization'),
            ('test', ['c.py', 'w.pth', '--tta'], 'masks'),
        ],
    )
    def test_mistake_is_one_line_before_anything_is_built(
        self, tool, tmp_path, monkeypatch, capsys, name, given, message
    ):
        model = "model = dict(roi_head=dict(mask_head=dict(type='FCNMaskHead')))\n"
        data = "test_evaluator = dict(type='CocoMetric')\ntest_dataloader = dict(dataset=dict())\n"
        (tmp_path / 'c.py').write_text(f"default_scope = 'mmdet'\n{model}{data}")
        torch.save(dict(weight=torch.ones(1)), tmp_path / 'w.pth')
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr('sys.argv', [name, *given])
        monkeypatch.setattr(cli, 'run', lambda *args: pytest.fail('a runner was built'))
        with pytest.raises(SystemExit) as error:
            tool(name).main()
        assert error.value.code == 2
        line = capsys.readouterr().err
        assert message in line
        assert line.count('\n') == 1


class TestLoadConfig:
    def test_options_reach_into_lists(self, tmp_path):
        text = (
            "default_scope = 'mmdet'\nd = dict(pipeline=[dict(t=[dict(scale=1)]), dict(scale=2)])"
        )
        options = {'d.pipeline.0.t.0.scale': (800, 480), 'd.pipeline.1.scale': 3}
        cfg = load(tmp_path / 'c.py', text, cfg_options=options)
        assert cfg.d.pipeline[0].t[0].scale == (800, 480)
        assert cfg.d.pipeline[1].scale == 3

    def test_option_beyond_a_list_is_an_error(self, tmp_path):
        text = "default_scope = 'mmdet'\npipeline = [dict(scale=1)]"
        with pytest.raises(cli.UsageError, match=r'c\.py: Index 5'):
            load(tmp_path / 'c.py', text, cfg_options={'pipeline.5.scale': 2})

    def test_missing_base_is_an_error(self, tmp_path):
        with pytest.raises(cli.UsageError, match=r'gone\.py'):
            load(tmp_path / 'c.py', "_base_ = 'gone.py'")

    @pytest.mark.parametrize(
        ('text', 'message'),
        [
            ('a = 1\nb = c', r"cannot be read: NameError: name 'c' is .* \(c\.py, line 2\)$"),
            ('a = 1 +', 'cannot be read: .*syntax.* line 1'),
            ('a = 1 / 0', r'ZeroDivisionError: division by zero \(c\.py, line 1\)$'),
            ("custom_imports = dict(imports='no_module')", "No module named 'no_module'$"),
            ("default_scope = 'mmdet'\nmodel = 'MaskRCNN'", "model is 'MaskRCNN', expected a dict"),
            (
                "default_scope = 'mmdet'\ntest_dataloader = dict(dataset=3)",
                'test_dataloader.dataset is 3, expected a dict',
            ),
        ],
    )
    def test_broken_config_is_one_line(self, tmp_path, text, message):
        with pytest.raises(cli.UsageError, match=message) as error:
            load(tmp_path / 'c.py', text)
        assert '\n' not in str(error.value)

    def test_broken_package_is_one_line(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, 'mmdet.registry', None)
        with pytest.raises(cli.UsageError, match=r'mmdet cannot be imported, .*: tools/doctor\.py'):
            load(tmp_path / 'c.py', "default_scope = 'mmdet'")

    @pytest.mark.parametrize('text', ['', "default_scope = 'mmpose'"])
    def test_other_scope_is_an_error(self, tmp_path, text):
        with pytest.raises(cli.UsageError, match=r"'mmdet'.*'mmseg'"):
            load(tmp_path / 'c.py', text)

    def test_launcher_without_gpu_is_an_error(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cli, 'get_device', lambda: 'cpu')
        with pytest.raises(cli.UsageError, match='--launcher pytorch needs GPUs'):
            load(tmp_path / 'c.py', "default_scope = 'mmdet'", launcher='pytorch')

    @pytest.mark.usefixtures('gpu')
    def test_launcher_and_rank(self, tmp_path, monkeypatch):
        monkeypatch.setenv('LOCAL_RANK', '')
        monkeypatch.delenv('LOCAL_RANK')
        text = "default_scope = 'mmdet'"
        cfg = load(tmp_path / 'c.py', text, launcher='slurm', local_rank=3)
        assert cfg.launcher == 'slurm'
        assert os.environ['LOCAL_RANK'] == '3'

    @pytest.mark.parametrize(
        ('text', 'given', 'work_dir'),
        [('', None, './work_dirs/c'), ("work_dir = 'w'", None, 'w'), ("work_dir = 'w'", 'x', 'x')],
    )
    def test_work_dir(self, tmp_path, text, given, work_dir):
        cfg = load(tmp_path / 'c.py', f"default_scope = 'mmseg'\n{text}", work_dir=given)
        assert cfg.work_dir == work_dir


class TestPretrained:
    @pytest.mark.parametrize('owner', ['', 'backbone.'])
    @pytest.mark.parametrize('scope', ['mmdet', 'mmseg'])
    def test_becomes_the_init_cfg_of_mavit(self, tmp_path, owner, scope):
        text = f"default_scope = '{scope}'\n"
        text += "model = dict(pretrained=None, backbone=dict(type='mala_mm.MAViT'))"
        cfg = load(tmp_path / 'c.py', text, cfg_options={f'model.{owner}pretrained': 'x.pth'})
        init_cfg = dict(type='Pretrained', checkpoint='x.pth')
        assert cfg.model == dict(backbone=dict(type='mala_mm.MAViT', init_cfg=init_cfg))

    def test_beside_an_init_cfg_is_an_error(self, tmp_path):
        text = (
            "default_scope = 'mmdet'\nbackbone = dict(type='MAViT', init_cfg=dict(type='Normal'))\n"
        )
        text += "model = dict(pretrained='x.pth', backbone=backbone)"
        with pytest.raises(cli.UsageError, match='give one of them'):
            load(tmp_path / 'c.py', text)

    def test_of_the_whole_model_is_an_error(self, tmp_path):
        text = "default_scope = 'mmdet'\nmodel = dict(backbone=dict(type='MAViT'))"
        options = {'model.init_cfg.type': 'Pretrained', 'model.init_cfg.checkpoint': 'x.pth'}
        with pytest.raises(cli.UsageError, match='write load_from=CHECKPOINT'):
            load(tmp_path / 'c.py', text, cfg_options=options)
        text = text.replace('dict(b', "dict(init_cfg=[dict(type='PretrainedInit')], b", 1)
        with pytest.raises(cli.UsageError, match='write load_from=CHECKPOINT'):
            load(tmp_path / 'c.py', text)

    def test_of_another_backbone_stays(self, tmp_path):
        text = (
            "default_scope = 'mmseg'\nmodel = dict(pretrained='x', backbone=dict(type='ResNetV1c'))"
        )
        assert load(tmp_path / 'c.py', text).model.pretrained == 'x'


class TestResume:
    @pytest.mark.parametrize('resume', ['auto', 'epoch_1.pth'])
    def test_auto_and_path(self, tmp_path, resume):
        checkpoint = tmp_path / 'epoch_1.pth'
        torch.save(
            dict(meta=dict(epoch=0, iter=1), message_hub=dict(a=1), optimizer=dict(a=1)), checkpoint
        )
        cfg = Config(dict(work_dir=str(tmp_path), load_from='pretrained.pth'))
        given = resume if resume == 'auto' else str(checkpoint)
        assert cli.set_resume(cfg, given) == []
        assert (cfg.resume, cfg.load_from) == (True, str(checkpoint))

    def test_auto_starts_fresh_with_one_warning(self, tmp_path):
        cfg = Config(dict(work_dir=str(tmp_path), load_from='pretrained.pth', resume=False))
        (warning,) = cli.set_resume(cfg, 'auto')
        assert str(tmp_path) in warning
        assert (cfg.resume, cfg.load_from) == (False, 'pretrained.pth')

    def test_missing_file_is_an_error(self, tmp_path):
        with pytest.raises(CheckpointError, match=r'gone\.pth does not exist'):
            cli.set_resume(Config(dict(work_dir=str(tmp_path))), str(tmp_path / 'gone.pth'))

    def test_url_is_left_to_mmengine(self):
        cfg = Config()
        cli.set_checkpoint(cfg, 'https://example.org/a.pth')
        assert cfg.load_from == 'https://example.org/a.pth'


class TestAmp:
    @pytest.mark.parametrize(
        'wrapper', [{}, dict(type='OptimWrapper'), dict(type='mmengine.OptimWrapper')]
    )
    def test_replaces_the_plain_wrapper(self, gpu, wrapper):
        cfg = Config(dict(optim_wrapper=dict(clip_grad=dict(max_norm=1), **wrapper)))
        assert cli.set_amp(cfg) == []
        assert cfg.optim_wrapper == dict(
            type='AmpOptimWrapper', loss_scale='dynamic', clip_grad=dict(max_norm=1)
        )

    def test_amp_config_stays_as_it_is(self, gpu):
        wrapper = dict(type='AmpOptimWrapper', loss_scale=512.0)
        cfg = Config(dict(optim_wrapper=wrapper))
        (warning,) = cli.set_amp(cfg)
        assert 'AmpOptimWrapper' in warning
        assert cfg.optim_wrapper == wrapper

    def test_other_wrapper_is_an_error(self, gpu):
        with pytest.raises(cli.UsageError, match='found ApexOptimWrapper'):
            cli.set_amp(Config(dict(optim_wrapper=dict(type='ApexOptimWrapper'))))

    def test_cpu_is_an_error(self, monkeypatch):
        monkeypatch.setattr(cli, 'get_device', lambda: 'cpu')
        with pytest.raises(cli.UsageError, match='trains on cpu'):
            cli.set_amp(Config(dict(optim_wrapper=dict(type='OptimWrapper'))))


def test_auto_scale_lr():
    cfg = Config(dict(auto_scale_lr=dict(base_batch_size=16)))
    cli.set_auto_scale_lr(cfg)
    assert cfg.auto_scale_lr == dict(base_batch_size=16, enable=True)


class TestOut:
    def test_detection_writes_a_pickle(self):
        cfg = detector()
        cli.set_out(cfg, 'preds.pkl')
        dump = dict(type='DumpDetResults', out_file_path='preds.pkl')
        assert cfg.test_evaluator == [dict(type='CocoMetric'), dump]

    def test_segmentation_writes_a_directory(self):
        for evaluator in (dict(type='IoUMetric'), [dict(type='Other'), dict(type='IoUMetric')]):
            cfg = segmentor(test_evaluator=evaluator)
            cli.set_out(cfg, 'preds')
            metrics = cfg.test_evaluator if isinstance(evaluator, list) else [cfg.test_evaluator]
            assert metrics[-1] == dict(type='IoUMetric', output_dir='preds')
            assert metrics[:-1] == [dict(type='Other')] * (len(metrics) - 1)

    @pytest.mark.parametrize('out', ['preds', 'preds.json'])
    def test_directory_in_detection_is_an_error(self, out):
        with pytest.raises(cli.UsageError, match=r'expected NAME\.pkl'):
            cli.set_out(detector(), out)

    def test_file_in_segmentation_is_an_error(self, tmp_path):
        (tmp_path / 'file').touch()
        for out in ('preds.pkl', str(tmp_path / 'file')):
            with pytest.raises(cli.UsageError, match='expected a directory'):
                cli.set_out(segmentor(), out)

    def test_segmentation_without_iou_metric_is_an_error(self):
        with pytest.raises(cli.UsageError, match='IoUMetric'):
            cli.set_out(segmentor(test_evaluator=dict(type='Other')), 'preds')


class TestWritableFolder:
    @pytest.mark.parametrize(
        ('use', 'option'),
        [
            (lambda path: cli.run(Config(dict(work_dir=path)), 'train', []), '--work-dir'),
            (lambda path: cli.set_show(detector(), False, path, 2.0), '--show-dir'),
            (lambda path: cli.set_show(segmentor(), False, path, 2.0), '--show-dir'),
            (lambda path: cli.set_out(detector(), f'{path}/preds.pkl'), '--out'),
            (lambda path: cli.set_out(segmentor(test_evaluator=IOU), f'{path}/preds'), '--out'),
        ],
    )
    def test_file_and_folder_without_permission(self, tmp_path, monkeypatch, use, option):
        file = tmp_path / 'file'
        file.touch()
        with pytest.raises(cli.UsageError) as error:
            use(str(file))
        assert str(error.value).startswith(f'{option} {file}')
        assert str(error.value).endswith(f'{file} is no folder, name another one or remove it')
        monkeypatch.setattr(os, 'access', lambda path, mode: str(path) != str(tmp_path))
        with pytest.raises(cli.UsageError, match=f'no permission to write to {tmp_path}, name an'):
            use(str(tmp_path / 'new' / 'folder'))
        assert [path.name for path in tmp_path.iterdir()] == ['file']

    def test_link_to_a_disk_that_is_not_mounted(self, tmp_path):
        (tmp_path / 'work').symlink_to(tmp_path / 'disk')
        with pytest.raises(cli.UsageError, match=r'--work-dir .*/work is no folder'):
            cli.require_writable_folder('--work-dir', str(tmp_path / 'work'))

    def test_predictions_into_a_folder(self, tmp_path):
        (tmp_path / 'preds.pkl').mkdir()
        with pytest.raises(cli.UsageError, match=r'preds\.pkl is a folder, expected a file'):
            cli.set_out(detector(), str(tmp_path / 'preds.pkl'))

    def test_new_folders_are_fine(self, tmp_path):
        cli.require_writable_folder('--work-dir', str(tmp_path / 'a' / 'b'))
        assert not list(tmp_path.iterdir())


class TestShow:
    def test_detection(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        cfg = detector()
        cli.set_show(cfg, True, 'drawn', 0.5)
        assert cfg.default_hooks.visualization == dict(
            type='DetVisualizationHook',
            draw=True,
            show=True,
            wait_time=0.5,
            test_out_dir=str(tmp_path / 'drawn'),
        )

    def test_segmentation_draws_every_image(self):
        cfg = segmentor()
        cli.set_show(cfg, False, 'drawn', 2.0)
        assert cfg.visualizer.save_dir == 'drawn'
        hook = cfg.default_hooks.visualization
        assert (hook.draw, hook.show, hook.interval) == (True, False, 1)

    def test_window_and_directory_in_segmentation_is_an_error(self):
        with pytest.raises(cli.UsageError, match='--show or --show-dir'):
            cli.set_show(segmentor(), True, 'drawn', 2.0)

    def test_missing_hook_is_an_error(self):
        with pytest.raises(cli.UsageError, match=r'default_hooks\.visualization'):
            cli.set_show(detector(default_hooks=None), True, None, 2.0)


class TestTta:
    def test_box_detector_gets_flips(self):
        cfg = detector(
            test_dataloader=dict(dataset=dict(dataset=dict(pipeline=[dict(type='Load'), PACK])))
        )
        cli.set_tta(cfg)
        assert cfg.model.type == 'DetTTAModel'
        assert cfg.model.module.type == 'RetinaNet'
        load, augmented = cfg.test_dataloader.dataset.dataset.pipeline
        assert load.type == 'Load'
        flips, [pack] = augmented.transforms
        assert [(flip.type, flip.prob) for flip in flips] == [
            ('RandomFlip', 1.0),
            ('RandomFlip', 0.0),
        ]
        assert pack.type == 'PackDetInputs'
        assert pack.meta_keys == ('img_id', 'ori_shape', 'flip', 'flip_direction')

    @pytest.mark.parametrize(
        'cfg', [detector(tta_model=dict(type='T'), tta_pipeline=['own']), segmentor()]
    )
    def test_own_model_and_pipeline_are_used(self, cfg):
        own_model, own_pipeline, module = cfg.tta_model.type, cfg.tta_pipeline, cfg.model.type
        cli.set_tta(cfg)
        assert (cfg.model.type, cfg.model.module.type) == (own_model, module)
        assert cfg.test_dataloader.dataset.pipeline == own_pipeline

    @pytest.mark.parametrize(
        'model', [dict(roi_head=dict(mask_head=dict())), dict(mask_head=dict(type='SOLOHead'))]
    )
    def test_masks_are_an_error(self, model):
        model.get('roi_head', {}).get('mask_head', {}).update(type='FCNMaskHead')
        with pytest.raises(cli.UsageError, match='masks'):
            cli.set_tta(detector(model=model))

    @pytest.mark.parametrize('missing', ['tta_model', 'tta_pipeline'])
    def test_segmentation_without_its_own_is_an_error(self, missing):
        with pytest.raises(cli.UsageError, match='tta_model and tta_pipeline'):
            cli.set_tta(segmentor(**{missing: None}))


class TestEmptyDetectionsHook:
    hook = dict(type='mala_mm.EmptyDetectionsHook')

    def test_detection_gets_it_once(self):
        cfg = detector(custom_hooks=[dict(type='EMAHook')])
        for _ in range(2):
            cli.add_empty_detections_hook(cfg)
        assert cfg.custom_hooks == [dict(type='EMAHook'), self.hook]

    def test_segmentation_does_not(self):
        cfg = segmentor()
        cli.add_empty_detections_hook(cfg)
        assert cfg.get('custom_hooks') is None
