"""Hand-made environments: folders of packages' metadata, and modules that are broken.

To add one, add a row to CASES or BROKEN.
"""

import subprocess
import sys
import venv
from pathlib import Path

import packaging
import pytest
import torch

from mala_mm.checks import machine
from mala_mm.checks.environment import check_environment, check_machine, try_machine

# What a good environment holds: name -> version and what it requires
GOOD = {
    'mala_mm': (
        '0.1.0',
        'torch>=2.6',
        'torchvision>=0.21',
        'mmengine==0.10.7',
        'mmcv-lite<2.2,>=2.0.1',
        'mmdet==3.3.0',
        'mmsegmentation==1.2.2',
        'setuptools<81',
        'ftfy',
        'regex',
        'pytest; extra == "dev"',
    ),
    'torch': ('2.9.0', 'setuptools', 'triton==3.5.0; platform_system == "Linux"'),
    'torchvision': ('0.24.0', 'torch==2.9.0', 'numpy'),
    'mmengine': ('0.10.7', 'opencv-python>=3', 'addict', 'numpy'),
    'mmcv-lite': ('2.1.0', 'mmengine>=0.3.0'),
    'mmdet': ('3.3.0', 'mmcv<2.2.0,>=2.0.0rc4; extra == "mim"', 'shapely', 'x; extra == "all"'),
    'mmsegmentation': ('1.2.2', 'mmcv<2.2.0,>=2.0.0rc4; extra == "mim"'),
    'opencv-python': ('4.12.0.88', 'numpy>=2'),
    'numpy': ('2.3.0',),
    'setuptools': ('80.9.0',),
    'triton': ('3.5.0',),
    'ftfy': ('6.3.1',),
    'regex': ('2026.1.1',),
    'addict': ('2.4.0',),
    'shapely': ('2.1.0',),
}
LITE = "pip install 'mmcv-lite<2.2,>=2.0.1'"
OVER = 'are installed over each other: pip uninstall -y'

# Name of the case: what is different (None: not installed), the severity and the message of the
# finding, what its places name
CASES = {
    'good': ({}, None, '', ''),
    'compiled mmcv in place of mmcv-lite': (
        {'mmcv-lite': None, 'mmcv': ('2.1.0', 'mmengine>=0.3.0')},
        *(None, '', ''),
    ),
    'headless opencv': (
        {'opencv-python': None, 'opencv-python-headless': ('4.12.0.88', 'numpy>=2')},
        *(None, '', ''),
    ),
    'CUDA build of torch': ({'torch': ('2.9.0+cu130', 'setuptools')}, None, '', ''),
    'metadata that pip would refuse': ({'regex': ('1.0', 'what ever >>= 3')}, None, '', ''),
    'mmcv 2.2': (
        {'mmcv-lite': None, 'mmcv': ('2.2.0',)},
        'error',
        'mmcv 2.2.0 does not fit (mmdet and mmsegmentation refuse others): '
        f'pip uninstall -y mmcv && {LITE}',
        'mala_mm 0.1.0 requires mmcv-lite<2.2,>=2.0.1',
    ),
    'mmcv-lite 2.2': (
        {'mmcv-lite': ('2.2.0',)},
        'error',
        f'mmcv-lite 2.2.0 does not fit (mmdet and mmsegmentation refuse others): {LITE}',
        'mmdet 3.3.0 requires mmcv<2.2.0,>=2.0.0rc4',
    ),
    'mmcv 1': (
        {'mmcv-lite': None, 'mmcv': ('1.7.2',)},
        *('error', 'mmcv 1.7.2 does not fit (mmdet and mmsegmentation refuse others): '),
        'mmsegmentation 1.2.2 requires mmcv',
    ),
    'no mmcv': (
        {'mmcv-lite': None},
        *('error', f'mmcv-lite is not installed (mmdet and mmsegmentation refuse others): {LITE}'),
        'mala_mm 0.1.0 requires mmcv-lite',
    ),
    'both mmcv': (
        {'mmcv': ('2.1.0',)},
        *('error', f'mmcv-lite 2.1.0 and mmcv 2.1.0 {OVER} mmcv-lite mmcv && {LITE}'),
        '',
    ),
    'two builds of opencv': (
        {'opencv-python-headless': ('4.11.0.86',)},
        'warning',
        f'opencv-python 4.12.0.88 and opencv-python-headless 4.11.0.86 {OVER} opencv-python '
        "opencv-python-headless && pip install 'opencv-python>=3'",
        '',
    ),
    'no opencv': (
        {'opencv-python': None},
        *('error', "opencv-python is not installed: pip install 'opencv-python>=3'"),
        'mmengine 0.10.7 requires opencv-python>=3',
    ),
    'setuptools without pkg_resources': (
        {'setuptools': ('82.0.1',)},
        'error',
        "setuptools 82.0.1 does not fit (mmengine reads every _base_ = 'mmdet::...' with its "
        "pkg_resources): pip install 'setuptools<81'",
        'mala_mm 0.1.0 requires setuptools<81',
    ),
    'no ftfy': (
        {'ftfy': None},
        'error',
        'ftfy is not installed (mmsegmentation imports it without requiring it): pip install ftfy',
        'mala_mm 0.1.0 requires ftfy',
    ),
    'numpy 1 under an opencv for numpy 2': (
        {'numpy': ('1.26.4',)},
        *('warning', "numpy 1.26.4 does not fit: pip install 'numpy>=2'"),
        'opencv-python 4.12.0.88 requires numpy>=2',
    ),
    'torch as NVIDIA builds it': ({'torch': ('2.9.0a0+145a3a7414',)}, None, '', ''),
    'torch too old': (
        {'torch': ('2.5.1',)},
        *('error', 'torch 2.5.1 does not fit: pip install --upgrade torch torchvision'),
        'mala_mm 0.1.0 requires torch>=2.6',
    ),
    'torch newer than torchvision': (
        {'torch': ('2.10.0',)},
        *('error', 'torch 2.10.0 does not fit: pip install --upgrade torch torchvision'),
        'torchvision 0.24.0 requires torch==2.9.0',
    ),
    'mmengine of the future': (
        {'mmengine': ('0.11.0', 'opencv-python>=3')},
        *('error', 'mmengine 0.11.0 does not fit: pip install mmengine==0.10.7'),
        'mala_mm 0.1.0 requires mmengine==0.10.7',
    ),
    'mmdet 2': (
        {'mmdet': ('2.28.2',)},
        *('error', 'mmdet 2.28.2 does not fit: pip install mmdet==3.3.0'),
        'mala_mm 0.1.0 requires mmdet==3.3.0',
    ),
    'no mmseg': (
        {'mmsegmentation': None},
        *('error', 'mmsegmentation is not installed: pip install mmsegmentation==1.2.2'),
        'mala_mm 0.1.0 requires mmsegmentation==1.2.2',
    ),
    'something that mmdet imports': (
        {'shapely': None},
        *('error', 'shapely is not installed: pip install shapely'),
        'mmdet 3.3.0 requires shapely',
    ),
    'another Triton': (
        {'triton': ('3.6.0',)},
        *('warning', 'triton 3.6.0 does not fit: pip install triton==3.5.0'),
        'torch 2.9.0 requires triton==3.5.0',
    ),
    'setuptools too old for torch': (
        {'setuptools': ('70.0.0',), 'torch': ('2.9.0', 'setuptools>=77')},
        'warning',
        "pkg_resources): pip install 'setuptools<81,>=77'",
        'torch 2.9.0 requires setuptools>=77',
    ),
    'Python too new': (
        {'torchvision': ('0.24.0', 'python<3.10')},
        *('error', 'does not fit: make an environment with python<3.10'),
        'torchvision 0.24.0 requires python<3.10',
    ),
    'mala_mm not installed': (
        {'mala_mm': None},
        *('warning', 'mala_mm is on the path but not installed'),
        '',
    ),
}


def write_packages(folder: Path, packages: dict[str, tuple[str, ...] | None]) -> None:
    for name, package in packages.items():
        if package is not None:
            version, *required = package
            lines = ['Metadata-Version: 2.1', f'Name: {name}', f'Version: {version}']
            for requirement in required:
                if requirement.startswith('python'):
                    lines.append(f'Requires-Python: {requirement.removeprefix("python")}')
                else:
                    lines.append(f'Requires-Dist: {requirement}')
            info = folder / f'{name.replace("-", "_")}-{version}.dist-info'
            info.mkdir()
            (info / 'METADATA').write_text('\n'.join(lines) + '\n')


@pytest.mark.parametrize('case', CASES)
def test_versions(tmp_path, monkeypatch, case):
    changes, severity, message, place = CASES[case]
    write_packages(tmp_path, {**GOOD, **changes})
    monkeypatch.setattr(sys, 'path', [str(tmp_path)])
    monkeypatch.delitem(sys.modules, 'cv2', raising=False)
    findings = check_environment(brief=True)
    found = [*findings.errors, *findings.warnings]
    assert len(found) == (severity is not None), str(findings)
    for finding in found:
        assert finding.severity == severity
        assert message in finding.message
        assert '...' not in finding.message.replace("'mmdet::...'", '')  # not cut
        assert place in '\n'.join(finding.places)


def test_opencv_that_pip_does_not_know(tmp_path, monkeypatch):
    write_packages(tmp_path, {**GOOD, 'opencv-python': None})
    (tmp_path / 'cv2.py').touch()
    monkeypatch.setattr(sys, 'path', [str(tmp_path)])
    monkeypatch.delitem(sys.modules, 'cv2', raising=False)
    assert str(check_environment(brief=True)) == ''


# What the child reported: the message and the remedy
BROKEN = {
    'no libGL': (
        dict(cv2=dict(error='ImportError: libGL.so.1: cannot open shared object file')),
        'error: opencv-python 4.12.0.88 does not work, ImportError: libGL.so.1: cannot open shared '
        'object file: pip uninstall -y opencv-python && pip install opencv-python-headless',
    ),
    'torch with a library missing': (
        dict(torch=dict(error='OSError: libcudart.so.13: cannot open shared object file')),
        'error: torch 2.9.0 does not work, OSError: libcudart.so.13: cannot open shared object '
        'file: pip install --upgrade torch torchvision',
    ),
    'torchvision of another torch': (
        dict(torchvision=dict(error='RuntimeError: operator torchvision::nms does not exist')),
        'error: torchvision 0.24.0 does not work, RuntimeError: operator torchvision::nms does not '
        'exist: pip install --upgrade torch torchvision',
    ),
    'a module missing': (
        dict(mmengine=dict(error="ModuleNotFoundError: No module named 'yaml'")),
        "error: mmengine 0.10.7 does not work, ModuleNotFoundError: No module named 'yaml': "
        'pip install pyyaml',
    ),
    'mmseg missing': (
        dict(mmseg=dict(error="ModuleNotFoundError: No module named 'mmseg.apis'")),
        'error: mmsegmentation 1.2.2 does not work, ModuleNotFoundError: No module named '
        "'mmseg.apis': pip install mmsegmentation",
    ),
    'a crash': (
        dict(mmdet=dict(error='ended the process with code -11')),
        'error: mmdet 3.3.0 does not work, ended the process with code -11: '
        'pip install --force-reinstall --no-deps mmdet==3.3.0',
    ),
    'pkg_resources broken': (
        dict(pkg_resources=dict(error='AttributeError: no ImpImporter')),
        'error: pkg_resources does not work, AttributeError: no ImpImporter: '
        "pip install 'setuptools<81'",
    ),
    'a wrong NMS': (
        dict(NMS=dict(error='ValueError: mmcv.ops.nms on cpu kept boxes [0, 1, 2]')),
        'error: mmcv-lite 2.1.0 does not work, ValueError: mmcv.ops.nms on cpu kept boxes '
        '[0, 1, 2]: pip install --force-reinstall --no-deps mmcv-lite==2.1.0',
    ),
    'a GPU that PyTorch has no kernels for': (
        dict(GPU=dict(error='RuntimeError: CUDA error: no kernel image is available')),
        'error: GPU does not work, RuntimeError: CUDA error: no kernel image is available: '
        'pip install --upgrade torch torchvision',
    ),
    'no Triton': (
        dict(Triton=dict(info='not usable', warning='Triton does not work here: no compiler.')),
        'warning: Triton does not work here: no compiler.',
    ),
}


@pytest.mark.parametrize('case', BROKEN)
def test_remedy(tmp_path, monkeypatch, case):
    found, told = BROKEN[case]
    write_packages(tmp_path, GOOD)
    monkeypatch.setattr(sys, 'path', [str(tmp_path)])
    assert str(check_machine(found)) == told


# Modules in place of the real ones, and the steps that do not work then
MODULES = {
    'raises': (
        'raise ImportError("libGL.so.1: cannot open")',
        'ImportError: libGL.so.1: cannot open',
    ),
    'exits': ('raise SystemExit(3)', 'SystemExit: 3'),
    'crashes': ('import os; os.kill(os.getpid(), 11)', 'ended the process with code -11'),
    'hangs': ('import time; time.sleep(600)', 'did not end within 2 s'),
}


@pytest.mark.parametrize('kind', MODULES)
def test_broken_module_is_named_and_the_rest_is_tried(tmp_path, monkeypatch, kind):
    code, error = MODULES[kind]
    for name in ('torch', 'mmengine'):  # nothing that takes long
        (tmp_path / f'{name}.py').write_text(f'raise ImportError("no {name}")')
    (tmp_path / 'torch.py').write_text(code)
    for name in ('numpy', 'cv2', 'pkg_resources'):
        (tmp_path / f'{name}.py').touch()
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    found = try_machine(timeout=2)
    works = dict(info='works')
    assert found == {
        'torch': dict(error=error),
        'numpy': works,
        'cv2': works,
        'pkg_resources': works,
    }


WRONG = {
    'nms': (torch.zeros(3, 5), torch.tensor([0, 1, 2])),  # keeps what overlaps
    'roi_align': torch.tensor([[[[2.0, 4.0], [2.0, 4.0]]]]),  # as with aligned=False
}


@pytest.mark.parametrize('operator', WRONG)
def test_operator_that_computes_something_else(monkeypatch, operator):
    import mmcv.ops

    monkeypatch.setattr(mmcv.ops, operator, lambda *_: WRONG[operator])
    with pytest.raises(ValueError, match=rf'mmcv\.ops\.{operator} on cpu .*, expected '):
        getattr(machine, f'call_{operator}')()


@pytest.fixture
def bare_python(tmp_path):
    """A Python of its own with nothing installed but packaging."""
    venv.create(tmp_path / 'bare', with_pip=False)
    (site,) = (tmp_path / 'bare' / 'lib').glob('python*/site-packages')
    (site / 'packaging').symlink_to(Path(packaging.__file__).parent)
    return tmp_path / 'bare' / 'bin' / 'python'


def test_doctor_where_nothing_is_installed(root, tmp_path, bare_python):
    done = subprocess.run(
        [bare_python, root / 'tools' / 'doctor.py'], capture_output=True, text=True, env={}
    )
    assert (done.returncode, done.stderr) == (1, '')
    lines = done.stdout.splitlines()
    assert f'error: mala_mm is not installed: pip install -e {root}' in lines
    assert (
        "error: torch does not work, ModuleNotFoundError: No module named 'torch': "
        'pip install --upgrade torch torchvision'
    ) in lines


def test_doctor_here(root):
    """This very environment is what setup.py asks for, and every step is taken."""
    done = subprocess.run(
        [sys.executable, root / 'tools' / 'doctor.py'], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    for step in machine.STEPS:
        assert f'{step:>24}  ' in done.stdout
    assert 'does not work' not in done.stdout


def test_python_between_two_releases(tmp_path, monkeypatch):
    write_packages(tmp_path, {**GOOD, 'torchvision': ('0.24.0', 'python>=3.10')})
    monkeypatch.setattr(sys, 'path', [str(tmp_path)])
    monkeypatch.setattr('platform.python_version', lambda: '3.12.3+')
    assert str(check_environment(brief=True)) == ''
