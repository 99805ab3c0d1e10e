"""A project elsewhere inherits a shipped config: from a checkout, a wheel, an editable install."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CHILD = """
_base_ = {base}
classes = ('apple', 'pear', 'plum')
metainfo = dict(classes=classes)
train_dataloader = dict(dataset=dict(data_root='fruit/', metainfo=metainfo))
model = dict(
    roi_head=dict(
        bbox_head=[dict(head, num_classes=3) for head in _base_.model.roi_head.bbox_head],
        mask_head=dict(num_classes=3),
    ),
)
"""

BUILD_CHILDREN = """
import sys, mala_mm, torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
print(mala_mm.__file__)
for child in sys.argv[1:]:
    cfg = Config.fromfile(child)
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    backbone, classes = model.backbone, [h.fc_cls.out_features for h in model.roi_head.bbox_head]
    print(type(model).__name__, type(backbone).__module__, len(backbone.layers[2].blocks), classes)
    print(cfg.train_dataloader.dataset.data_root, cfg.train_cfg.max_epochs)
"""


def python(*args, cwd, path=None) -> str:
    """Run Python outside the checkout; ``path`` goes ahead of the installed packages."""
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    if path is not None:
        env['PYTHONPATH'] = str(path)
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='session')
def source(root, tmp_path_factory) -> Path:
    """A copy of the checkout to build in, links kept."""
    copy = tmp_path_factory.mktemp('source') / 'mala_mm'
    skip = shutil.ignore_patterns('.*env*', '.git', 'work_dirs', 'build', '*.egg-info', '.*_cache')
    shutil.copytree(root, copy, symlinks=True, ignore=skip)
    return copy


@pytest.fixture(scope='session')
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('wheel')
    options = ('--no-deps', '--no-build-isolation', '--quiet', '--wheel-dir')
    python('-m', 'pip', 'wheel', *options, folder, source, cwd=folder)
    return next(folder.glob('*.whl'))


@pytest.fixture(scope='session')
def installed_wheel(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('site-packages')
    python('-m', 'pip', 'install', '--no-deps', '--quiet', '--target', folder, wheel, cwd=folder)
    return folder


@pytest.fixture(params=['wheel', 'editable'])
def install(request, root) -> tuple[Path | None, Path]:
    """What to put ahead of the installed packages, and where mala_mm then lies."""
    if request.param == 'wheel':
        path = request.getfixturevalue('installed_wheel')
        return path, path / 'mala_mm'
    return None, root / 'mala_mm'


def test_inherits(install, root, tmp_path):
    path, package = install
    bases = [
        repr(str(package / '.mim' / 'configs' / 'cascade_mavit_b_coco.py')),
        "'mala_mm::cascade_mavit_b_coco.py'",
        "__import__('mala_mm').config_path('cascade_mavit_b_coco.py')",
        repr(str(root / 'configs' / 'cascade_mavit_b_coco.py')),
    ]
    children = []
    for number, base in enumerate(bases):
        children.append(tmp_path / f'child_{number}.py')
        children[-1].write_text(CHILD.format(base=base))
    script = tmp_path / 'build.py'
    script.write_text(BUILD_CHILDREN)
    file, *lines = python(script, *children, cwd=tmp_path, path=path).splitlines()
    assert Path(file) == package / '__init__.py'
    expected = ['CascadeRCNN mala_mm.models.mavit 12 [4, 4, 4]', 'fruit/ 36']
    assert lines == expected * len(bases)


def test_tools_run_from_the_install(install, tmp_path):
    path, package = install
    options = {
        'train': '--cfg-options',
        'test': '--cfg-options',
        'model_converters/mala_to_mm': '--check',
    }
    for tool, option in options.items():
        script = package / '.mim' / 'tools' / f'{tool}.py'
        assert option in python(script, '--help', cwd=tmp_path, path=path)


def test_wheel_and_sdist_hold_all_configs_and_tools(source, wheel, root, tmp_path):
    expected = {
        str(path.relative_to(root))
        for folder in ('configs', 'tools')
        for path in (root / folder).rglob('*')
        if path.suffix in ('.py', '.sh')
    }
    assert 'configs/_base_/models/cascade_mavit.py' in expected
    prefix = 'mala_mm/.mim/'
    files = zipfile.ZipFile(wheel).namelist()
    assert {n.removeprefix(prefix) for n in files if n.startswith(prefix)} >= expected
    assert not [n for n in files if n.startswith('tests')]

    python('setup.py', '--quiet', 'sdist', '--dist-dir', tmp_path, cwd=source)
    with tarfile.open(next(tmp_path.glob('*.tar.gz'))) as archive:
        files = {name.partition('/')[2] for name in archive.getnames()}
    assert {n.removeprefix(prefix) for n in files if n.startswith(prefix)} >= expected


def test_unknown_config_is_named(tmp_path):
    from mmengine.config import Config

    import mala_mm

    with pytest.raises(
        FileNotFoundError, match=r"no config 'nothing\.py'; it has: cascade_mavit_b"
    ):
        mala_mm.config_path('nothing.py')
    for name in ('../tools/train.py', str(Path(mala_mm.__file__))):
        with pytest.raises(FileNotFoundError, match='no config'):
            mala_mm.config_path(name)
    child = tmp_path / 'child.py'
    child.write_text("_base_ = 'mala_mm::nothing.py'")
    with pytest.raises(FileNotFoundError, match=r"no config 'nothing\.py'"):
        Config.fromfile(child)
