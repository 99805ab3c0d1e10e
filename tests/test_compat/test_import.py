"""What ``import mala_mm`` does, each time in a fresh process."""

import subprocess
import sys
import textwrap

import pytest


def run(code: str, *options: str, **kwargs) -> str:
    done = subprocess.run(
        [sys.executable, *options, '-c', textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light():
    code = """
        import sys, mala_mm
        print([m for m in ('mmdet', 'mmseg', 'mmcv', 'triton', 'torchvision') if m in sys.modules])
    """
    assert run(code) == '[]'


def test_operator_needs_torch_alone():
    code = """
        import sys
        from importlib.machinery import PathFinder

        find_spec = PathFinder.find_spec
        absent = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'torchvision')
        PathFinder.find_spec = lambda name, *args: (
            None if name.split('.')[0] in absent else find_spec(name, *args)
        )
        import torch
        from mala_mm.ops import mala_attention

        q = torch.ones(1, 1, 6, 8)
        print(list(mala_attention(q, q, q, (2, 3)).shape), set(absent) & set(sys.modules))
    """
    assert run(code) == '[1, 1, 6, 8] set()'


def test_compiled_mmcv_is_left_alone(tmp_path):
    package = tmp_path / 'mmcv'
    package.mkdir()
    (package / '__init__.py').write_text('')
    (package / '_ext.py').write_text('compiled = True')
    code = """
        import importlib, mala_mm
        print(importlib.import_module('mmcv._ext').compiled)
    """
    assert run(code, env={'PYTHONPATH': str(tmp_path)}) == 'True'


@pytest.mark.parametrize('first', ['mala_mm', 'mala_mm.registry', 'mala_mm.models'])
def test_any_import_makes_mmdet_and_mmseg_importable(first):
    assert run(f'import {first}, mmdet.models, mmseg.models; print("done")') == 'done'


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet', 'mmseg'])
def test_backbone_resolves_in_every_scope(scope):
    code = f"""
        import sys
        from mmengine.registry import MODELS, DefaultScope
        import mala_mm
        import importlib
        registry = importlib.import_module('{scope}.registry').MODELS
        with DefaultScope.overwrite_default_scope('{scope}'):
            model = registry.build(dict(type='mala_mm.MAViT', out_indices=(0,)))
        print(type(model).__name__)
    """
    assert run(code).splitlines()[-1] == 'MAViT'


def test_importing_again_changes_nothing():
    code = """
        import importlib, mala_mm, mala_mm.models, mala_mm.compat
        from mmengine.config import Config
        before = Config._get_cfg_path, Config.fromfile
        importlib.reload(mala_mm)
        print((Config._get_cfg_path, Config.fromfile) == before)
    """
    assert run(code) == 'True'


def test_reading_a_config_warns_of_nothing():
    code = """
        import warnings
        import mala_mm
        from mmengine.config import Config
        with warnings.catch_warnings(record=True) as caught:
            Config.fromfile(mala_mm.config_path('mask_rcnn_mavit_t_coco.py'))
        print([str(warning.message) for warning in caught])
    """
    assert run(code) == '[]'
