"""Signals and full disks in the middle of a training, as the user of the command line sees them."""

import errno
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.visualization import LocalVisBackend
from toy_training import toy_config, train

from mala_mm import cli
from mala_mm.engine import whole_file

COMMAND = ['tools/train.py', 'c.py', '--work-dir', 'my run', '--cfg-options', 'a=1', 'b=2']
RUNS = itertools.count()


@HOOKS.register_module()
class SignalHook(Hook):
    """Send `signum` to this process at the end of iteration `at`.

    Whatever that raises gets lost if `swallowed`.
    """

    def __init__(self, signum: int, at: int, swallowed: bool = False) -> None:
        self.signum, self.at = signum, at
        self.lost = BaseException if swallowed else ()

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.iter + 1 == self.at:
            with suppress(self.lost):
                os.kill(os.getpid(), self.signum)


@pytest.fixture(autouse=True)
def _handlers(monkeypatch) -> Iterator[None]:
    """An interrupted program leaves others, since it ends."""
    monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)
    handlers = {signum: signal.getsignal(signum) for signum in signals}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Train for four iterations in 'my run', as `command` says; returns exit code and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(command: list[str], *hooks: dict, **changes: Any) -> tuple[int, str]:
        monkeypatch.setattr('sys.argv', command)
        name = f'toy{next(RUNS)}'  # mmengine's own is the same within a second
        visualizer = dict(type='Visualizer', name=name, vis_backends=[dict(type='LocalVisBackend')])
        changes = dict(changes, experiment_name=name, visualizer=visualizer)
        cfg = toy_config('my run', custom_hooks=list(hooks), **changes)
        if '--resume' in command:
            cli.set_resume(cfg, 'auto')
        capsys.readouterr()
        try:
            train(cfg)
        except SystemExit as ending:
            return ending.code, capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


@pytest.mark.parametrize('resume', [[], ['--resume'], ['--resume', 'x.pth'], ['--resume=x.pth']])
@pytest.mark.parametrize(('signum', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_that_continues_is_named(run, tool, signum, code, resume):
    if resume:
        run(COMMAND, dict(type='SignalHook', signum=signum, at=1))
    at_3 = dict(type='SignalHook', signum=signum, at=3)
    again = shlex.join(['python', *COMMAND, '--resume'])
    assert run([*COMMAND[:4], *resume, *COMMAND[4:]], at_3) == (
        code,
        f'train.py: interrupted after iteration 2, iter_2.pth is whole; continue with: {again}\n',
    )
    assert run(shlex.split(again)[1:]) == (0, '')
    assert Path('my run', 'iter_4.pth').is_file()


def test_where_mmengine_raises_something_else_instead(run, monkeypatch):
    """Whatever happens while it formats the config is a SyntaxError to it."""
    monkeypatch.setattr(
        'mmengine.config.config.FormatCode', lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
    )
    code, told = run(COMMAND)
    assert code == 130
    assert told.startswith('train.py: interrupted')


def test_where_it_gets_lost_it_comes_again(run):
    at_1 = dict(type='SignalHook', signum=signal.SIGTERM, at=1, swallowed=True)
    code, told = run(COMMAND, at_1, iterations=10**9)
    assert code == 143
    assert told.startswith('train.py: interrupted after iteration ')


def test_before_the_first_checkpoint(run):
    """The checkpoint of an earlier run in that folder is not one to continue from."""
    run(COMMAND)
    at_1 = dict(type='SignalHook', signum=signal.SIGINT, at=1)
    assert run(COMMAND, at_1) == (
        130,
        'train.py: interrupted after iteration 0, no checkpoint was saved since its start; '
        f'start again with: {shlex.join(["python", *COMMAND])}\n',
    )


def test_a_second_signal_ends_the_process_at_once(run, monkeypatch):
    """Under torchrun it is ignored: the first one comes twice there."""
    at_1 = dict(type='SignalHook', signum=signal.SIGINT, at=1)
    run(COMMAND, at_1)
    assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'x')
    run(COMMAND, at_1)
    assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_of_several_processes_one_tells(run, monkeypatch):
    at_3 = dict(type='SignalHook', signum=signal.SIGINT, at=3)
    monkeypatch.setattr(cli, 'how_to_continue', lambda *_: 'told')
    for rank, message in (('0', 'train.py: interrupted after iteration 2, told\n'), ('1', '')):
        monkeypatch.setenv('RANK', rank)
        assert run(COMMAND, at_3) == (130, message)


def test_disk_that_is_full_when_logging(run, monkeypatch):
    def full(backend: LocalVisBackend, scalars: dict, step: int, *_: Any) -> None:
        if step == 3:
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(LocalVisBackend, 'add_scalars', full)
    with pytest.raises(cli.UsageError) as error:
        run(COMMAND)
    assert str(error.value) == (
        'No space left on device: my run or the folder of temporary files; make room. '
        f'iter_2.pth is whole; continue with: {shlex.join(["python", *COMMAND])} --resume'
    )


def test_disk_that_is_full_when_saving(tool, run, monkeypatch, capsys):
    def full(descriptor: int) -> None:
        if '_4.pth' in os.readlink(f'/proc/self/fd/{descriptor}'):
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(whole_file.os, 'fsync', full)
    monkeypatch.setattr('sys.argv', COMMAND)
    monkeypatch.setattr(cli, 'load_config', lambda _: toy_config('my run'))
    with pytest.raises(SystemExit) as ending:
        tool('train').main()
    assert ending.value.code == 2
    assert capsys.readouterr().err == (
        f'train.py: error: {Path.cwd()}/my run/iter_4.pth could not be written: '
        'No space left on device. '
        'Earlier checkpoints are untouched: make room and continue with --resume\n'
    )
    assert [path.name for path in Path('my run').glob('iter*')] == ['iter_2.pth']
    assert Path('my run', 'last_checkpoint').read_text() == f'{Path.cwd()}/my run/iter_2.pth'


@pytest.mark.parametrize('name', ['train', 'test'])
def test_both_tools_end_so(tool, name, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', [f'tools/{name}.py', 'c.py', 'x.pth'][: 3 - (name == 'train')])
    monkeypatch.setattr(cli, 'load_config', lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit) as ending:
        tool(name).main()
    assert ending.value.code == 130
    assert capsys.readouterr().err == f'{name}.py: interrupted\n'


def test_handlers_are_put_back_after_a_whole_run(run):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert run(COMMAND) == (0, '')
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_end_too(root, tmp_path):
    """Terminals and schedulers signal the workers as well."""
    cases = {
        'ctrl-c': (signal.SIGINT, 130),
        'scancel': (signal.SIGTERM, 143),
    }
    processes = {
        case: subprocess.Popen(
            [sys.executable, root / 'tests' / 'toy_training.py', case],
            cwd=tmp_path,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for case in cases
    }
    try:
        for case, (signum, code) in cases.items():
            process = processes[case]
            wait_until(Path(tmp_path, case, 'last_checkpoint').exists)
            workers = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
            assert len(workers) >= 2
            os.killpg(process.pid, signum)
            lines = process.communicate(timeout=60)[1].splitlines()
            assert process.returncode == code
            assert lines[-1].startswith('toy_training.py: interrupted after iteration ')
            assert 'Traceback' not in ''.join(lines)
            wait_until(lambda pids=workers: not any(Path(f'/proc/{pid}').exists() for pid in pids))
    finally:
        for process in processes.values():
            process.kill()
