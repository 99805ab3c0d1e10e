"""What is installed: which versions conflict, what does not work, and the command that mends it.

Imports nothing but the standard library and packaging, and nothing of mala_mm outside of this
folder: whatever else there is may be what is broken. Imports and calls are tried in a child
process, see :mod:`.machine`.
"""

import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from .findings import Findings

try:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version
except Exception:  # whatever a broken one raises
    Requirement = None

MACHINE = Path(__file__).with_name('machine.py')
ROOT = MACHINE.parents[2]  # the checkout, or site-packages
INSTALL_MALA_MM = shlex.join(['pip', 'install', '-e', str(ROOT)])
PACKAGES = (
    *('torch', 'torchvision', 'mmengine', 'mmcv-lite', 'mmcv', 'mmdet', 'mmsegmentation'),
    *('numpy', 'setuptools', 'ftfy', 'regex', 'triton'),
    *('opencv-python', 'opencv-python-headless'),
    *('opencv-contrib-python', 'opencv-contrib-python-headless'),
)
# Builds that share one folder. Where one is required, another one serves as well.
STRICT = ('mala_mm', 'torchvision', 'mmengine', 'mmcv-lite', 'mmcv', 'mmdet', 'mmsegmentation')
BUILDS = {'mmcv-lite': ('mmcv-lite', 'mmcv'), 'opencv-python': PACKAGES[-4:]}
BUILD_OF = {build: name for name, builds in BUILDS.items() for build in builds}
REASONS = {
    'setuptools': "mmengine reads every _base_ = 'mmdet::...' with its pkg_resources",
    'mmcv-lite': 'mmdet and mmsegmentation refuse others',
    'ftfy': 'mmsegmentation imports it without requiring it',
    'regex': 'mmsegmentation imports it without requiring it',
}
UPGRADE_TORCH = 'pip install --upgrade torch torchvision'  # two that fit each other
DISTRIBUTION_OF = {  # of a module, or of a step of .machine
    'cv2': 'opencv-python',
    'mmcv': 'mmcv-lite',
    'mmseg': 'mmsegmentation',
    'pkg_resources': 'setuptools<81',
    'PIL': 'pillow',
    'yaml': 'pyyaml',
    'NMS': 'mmcv-lite',
    'RoIAlign': 'mmcv-lite',
    'GPU': 'torch',
    'Triton': 'torch',
}


def check_environment(brief: bool = False) -> Findings:
    """Check versions, and unless `brief`, whether each package can be imported and works.

    Args:
        brief (bool): Read the packages' metadata only, some 0.1 s. Defaults to False: also import
            each of them, call NMS and RoIAlign, and try the GPU and Triton, in a child process.
    """
    findings = check_versions()
    if not brief:
        findings.extend(check_machine(try_machine()))
    return findings


def installed_versions() -> dict[str, str]:
    """Versions by name of distribution, of those that matter here and are installed."""
    found = {'Python': platform.python_version()}
    for name in ('mala_mm', *PACKAGES):
        if installed := _installed(name):
            found[name] = installed.version
    return found


def check_versions() -> Findings:
    """Check what packages say of each other in their metadata."""
    findings = Findings()
    if find_spec('mala_mm') is None:
        findings.error(f'mala_mm is not installed: {INSTALL_MALA_MM}')
    elif _installed('mala_mm') is None:
        findings.warning(
            'mala_mm is on the path but not installed, what it requires was not checked: '
            f'{INSTALL_MALA_MM}'
        )
    if Requirement is None:
        findings.error('packaging is missing, versions were not checked: pip install packaging')
        return findings
    demands = _demands()
    for name in BUILDS:
        builds = _installed_builds(name)
        if len(builds) > 1:
            tell = findings.error if name == 'mmcv-lite' else findings.warning
            tell(
                f'{" and ".join(map(_told, builds))} are installed over each other: '
                f'{_pip("uninstall", "-y", *(build.name for build in builds))} && '
                f'{_pip("install", _wanted(name, demands[name][:1]))}'
            )
    for name in demands:
        _check_demands(findings, name, demands[name])
    return findings


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _installed_builds(name: str) -> list[Distribution]:
    return [build for build in map(_installed, BUILDS.get(name, [name])) if build]


def _demands() -> dict[str, list[tuple[Distribution, 'Requirement']]]:
    """Who requires what, by the name of what is required."""
    demands = defaultdict(list)
    for owner in filter(None, map(_installed, ('mala_mm', *PACKAGES))):
        for text in owner.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:  # pip would not take it either
                continue
            # OpenMMLab keeps the range of mmcv that it takes in an extra of this name
            if requirement.marker is None or any(
                requirement.marker.evaluate({'extra': extra}) for extra in ('', 'mim')
            ):
                name = canonicalize_name(requirement.name)
                demands[BUILD_OF.get(name, name)].append((owner, requirement))
        if python := owner.metadata['Requires-Python']:
            demands['python'].append((owner, Requirement(f'python{python}')))
    return demands


def _check_demands(
    findings: Findings, name: str, demands: list[tuple[Distribution, 'Requirement']]
) -> None:
    if name == 'python':
        # not platform's, which ends in + for a build between two releases
        found, version = 'Python', '.'.join(map(str, sys.version_info[:3]))
    else:
        builds = _installed_builds(name)
        found, version = (builds[0].name, builds[0].version) if builds else (name, None)
        if name == 'opencv-python' and not builds and find_spec('cv2'):
            return  # conda's, or built by hand: without a version that pip would know
    unmet = [
        (owner, requirement)
        for owner, requirement in demands
        if version is None or not _fits(requirement, version)
    ]
    if not unmet:
        return
    # the others' demands are not ours: torch's Triton and CUDA, optional here, opencv's numpy
    is_error = any(owner.name in STRICT for owner, _ in unmet)
    state = f'{found} {version} does not fit' if version else f'{name} is not installed'
    reason = f' ({REASONS[name]})' if name in REASONS else ''
    own = [(owner, requirement) for owner, requirement in unmet if owner.name == 'mala_mm']
    wanted = _wanted(name, own or demands)  # the others' bounds are wider
    if name == 'python':
        remedy = f'make an environment with {wanted}'
    elif name in ('torch', 'torchvision'):
        remedy = UPGRADE_TORCH
    else:
        remedy = _pip('install', wanted)
        if version and found != name:
            remedy = f'{_pip("uninstall", "-y", found)} && {remedy}'
    for owner, requirement in unmet:
        place = f'{_told(owner)} requires {requirement.name}{requirement.specifier}'
        (findings.error if is_error else findings.warning)(f'{state}{reason}: {remedy}', place)


def _fits(requirement: 'Requirement', version: str) -> bool:
    try:
        # a vendor's 2.6.0a0+abc stands for 2.6
        version = Version(version).base_version
    except InvalidVersion:  # its own way of counting: nothing to hold against it
        return True
    return requirement.specifier.contains(version, prereleases=True)


def _wanted(name: str, demands: list[tuple[Distribution, 'Requirement']]) -> str:
    """`name` with all that is demanded of its version, as pip takes it."""
    specifier = SpecifierSet()
    for _, requirement in demands:
        specifier &= requirement.specifier
    return f'{name}{specifier}'


def _pip(*words: str) -> str:
    return shlex.join(['pip', *words])


def _told(package: Distribution) -> str:
    return f'{package.name} {package.version}'


def try_machine(timeout: float = 300) -> dict[str, dict]:
    """Import and call in a child process what :mod:`.machine` lists.

    Args:
        timeout (float): Seconds after which a step counts as failed. Defaults to 300.

    Returns:
        dict: For each step that was tried, in order, ``{'error': text}`` or what it found.
    """
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, 'report')
        while True:
            report.write_text('')
            child = [sys.executable, str(MACHINE), str(report), str(ROOT), json.dumps(found)]
            try:
                code = subprocess.run(child, capture_output=True, timeout=timeout).returncode
                ending = f'ended the process with code {code}'
            except subprocess.TimeoutExpired:
                code, ending = None, f'did not end within {timeout:g} s'
            lines = [json.loads(line) for line in report.read_text().splitlines()]
            for step, result in lines:
                found[step] = result or {'error': ending}
            if code == 0 or not lines:
                return found


def check_machine(found: dict[str, dict]) -> Findings:
    """Turn what `try_machine` returned into findings."""
    findings = Findings()
    for step, result in found.items():
        if error := result.get('error'):
            name = DISTRIBUTION_OF.get(step, step)
            builds = _installed_builds(name)
            told = _told(builds[0]) if builds and step not in ('GPU', 'Triton') else step
            findings.error(f'{told} does not work, {error[:120]}: {_remedy(name, builds, error)}')
        if 'warning' in result:
            findings.warning(result['warning'])
    return findings


def _remedy(name: str, builds: list[Distribution], error: str) -> str:
    if name == 'opencv-python' and '.so' in error:  # libGL and others of a desktop
        names = [build.name for build in builds]
        return f'{_pip("uninstall", "-y", *names)} && {_pip("install", f"{name}-headless")}'
    if name in ('torch', 'torchvision'):
        return UPGRADE_TORCH
    if missing := re.match(r"ModuleNotFoundError: No module named '(\w+)", error):
        name = missing[1]
        builds = []
    if name == 'mala_mm':
        return INSTALL_MALA_MM
    if not builds:
        return _pip('install', DISTRIBUTION_OF.get(name, name))
    exact = (f'{build.name}=={build.version}' for build in builds)
    return _pip('install', '--force-reinstall', '--no-deps', *exact)
