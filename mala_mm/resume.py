"""Which checkpoint an interrupted training continues from."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from mmengine.config import Config

from .checkpoint import CheckpointError, read_checkpoint, wrapping_of

STATE = {
    'meta': dict,
    'message_hub': dict,
    'optimizer': dict,
    'meta.epoch': int,
    'meta.iter': int,
    'resume_state': dict,  # these three of ResumableCheckpointHook
    'resume_state.generators': list,
    'resume_state.epoch_batches': int,
}


def require_training_state(checkpoint: dict[str, Any], filename: str) -> None:
    """Raise CheckpointError if the checkpoint holds weights only, or no proper training state."""
    missing = []
    for name, kind in STATE.items():
        owner, _, entry = name.rpartition('.')
        holder = checkpoint.get(owner) if owner else checkpoint
        if holder is None or (name == 'resume_state' and name not in holder):
            continue
        value = holder.get(entry)
        if value is None or (isinstance(value, dict) and not value):
            missing.append(name)
        elif not isinstance(value, kind):
            raise CheckpointError(
                f'checkpoint {filename} cannot be resumed, its {name} is {repr(value)[:40]}, '
                f'expected a value of type {kind.__name__}'
            )
    if missing:
        raise CheckpointError(
            f'checkpoint {filename} cannot be resumed, it has no {", ".join(missing)}: '
            'start from its weights with --cfg-options load_from=...'
        )


def check_training_checkpoint(filename: str) -> None:
    """Raise CheckpointError if the file cannot be read or holds weights only."""
    checkpoint = read_checkpoint(filename, map_location='meta')
    wrapping_of(checkpoint, filename)  # the more telling error, where there are EMA weights only
    require_training_state(checkpoint, filename)


def newest_training_checkpoint(work_dir: str) -> tuple[str | None, list[str]]:
    """Find the checkpoint written last that is whole and can be resumed.

    Looks at every `*.pth` in `work_dir`; where there is none, in the folder that
    `work_dir/last_checkpoint` names. Where that is a URL, it is taken.

    Returns:
        tuple: Its path, None where there is no checkpoint, and warnings: of each newer file that
        cannot be resumed, and of a `last_checkpoint` that names another file.

    Raises:
        CheckpointError: If there are checkpoints and none can be resumed.
    """
    pointer = Path(work_dir, 'last_checkpoint')
    named = ''
    if pointer.is_file():
        try:
            named = pointer.read_text(errors='replace').replace('\0', '').strip()
        except OSError as error:
            raise CheckpointError(
                f'--resume auto: {pointer} cannot be read: {error.strerror}; make it readable, or '
                'name the checkpoint: --resume FILE'
            ) from None
    if '://' in named:
        return named, []
    # of a copied work_dir the pointer still names the original
    folders = [Path(work_dir), Path(named).parent] if named else [Path(work_dir)]
    found = [[path for path in folder.glob('*.pth') if path.is_file()] for folder in folders]
    paths = next(filter(None, found), [])
    reasons = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            check_training_checkpoint(str(path))
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            warnings = [f'--resume auto takes an older file: {why}.' for why in reasons]
            if not reasons and named and Path(named).name != path.name:
                warnings.append(
                    f'--resume auto takes {path}, written last; last_checkpoint names {named}.'
                )
            return str(path), warnings
    if reasons:
        raise CheckpointError(
            f'--resume auto: none of {len(reasons)} checkpoints in {work_dir} can be resumed, '
            f'{reasons[0]}; without --resume training starts fresh'
        )
    return None, []


def last_saved(work_dir: str) -> int:
    """When `work_dir/last_checkpoint` was written, in nanoseconds; 0 where there is none."""
    pointer = Path(work_dir, 'last_checkpoint')
    return pointer.stat().st_mtime_ns if pointer.is_file() else 0


def how_to_continue(cfg: Config, saved_before: int) -> str:
    """Say which checkpoint a training has left, and the command that continues from it.

    Args:
        cfg (Config): The training's config, with its `work_dir` and `launcher`.
        saved_before (int): What `last_saved` returned when the training started, so that an
            earlier run's checkpoint is not taken for one of this run.
    """
    is_saved = last_saved(cfg.work_dir) != saved_before
    command = sys.argv
    if is_saved:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument('--resume', nargs='?')
        command = [*parser.parse_known_args(command)[1], '--resume']
    if cfg.get('launcher', 'none') == 'none':
        told = shlex.join(['python', *command])
    else:
        told = 'the same command, with --resume' if is_saved else 'the same command'
    if is_saved:
        checkpoint = Path(Path(cfg.work_dir, 'last_checkpoint').read_text(errors='replace')).name
        return f'{checkpoint} is whole; continue with: {told}'
    return f'no checkpoint was saved since its start; start again with: {told}'
