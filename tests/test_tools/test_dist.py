"""tools/dist_*.sh, with a `torchrun` that prints its arguments, one per line."""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def run(root, tmp_path, monkeypatch):
    torchrun = tmp_path / 'bin' / 'torchrun'
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    monkeypatch.setenv('PATH', f'{torchrun.parent}:{os.environ["PATH"]}')
    for name in ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT'):
        monkeypatch.delenv(name, raising=False)

    def call(script: Path, *args: str) -> subprocess.CompletedProcess:
        return subprocess.run([script, *args], cwd=tmp_path, capture_output=True, text=True)

    return call


@pytest.fixture(params=[('train', ['my config.py']), ('test', ['my config.py', 'my model.pth'])])
def job(request):
    return request.param


def test_one_machine(run, root, job):
    name, inputs = job
    options = ['--work-dir', 'a b', '--cfg-options', 'x="[(1,2)]"', 'y=*']
    result = run(root / 'tools' / f'dist_{name}.sh', *inputs, '8', *options)
    assert result.returncode == 0
    assert result.stdout.splitlines() == [
        '--nnodes=1',
        '--node_rank=0',
        '--master_addr=127.0.0.1',
        '--master_port=29500',
        '--nproc_per_node=8',
        str(root / 'tools' / f'{name}.py'),
        *inputs,
        '--launcher',
        'pytorch',
        *options,
    ]


def test_several_machines(run, root, job, monkeypatch):
    name, inputs = job
    for variable, value in dict(
        NNODES='2', NODE_RANK='1', MASTER_ADDR='node0', PORT='1234'
    ).items():
        monkeypatch.setenv(variable, value)
    result = run(root / 'tools' / f'dist_{name}.sh', *inputs, '4')
    assert result.stdout.splitlines()[:5] == [
        '--nnodes=2',
        '--node_rank=1',
        '--master_addr=node0',
        '--master_port=1234',
        '--nproc_per_node=4',
    ]


def test_path_with_spaces(run, root, job, tmp_path):
    name, inputs = job
    tools = tmp_path / 'a checkout' / 'tools'
    tools.mkdir(parents=True)
    script = tools / f'dist_{name}.sh'
    script.write_bytes((root / 'tools' / script.name).read_bytes())
    script.chmod(0o755)
    result = run(script.relative_to(tmp_path), *inputs, '1')
    assert result.stdout.splitlines()[5] == f'a checkout/tools/{name}.py'


def test_missing_argument(run, root, job):
    name, inputs = job
    result = run(root / 'tools' / f'dist_{name}.sh', *inputs)
    assert result.returncode == 2
    assert result.stdout == ''
    assert result.stderr.startswith('usage: ')
    assert result.stderr.count('\n') == 1
