"""Which checkpoint an interrupted training continues from."""

from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError, read_checkpoint


def require_training_state(checkpoint: dict[str, Any], filename: str) -> None:
    """Raise CheckpointError if the checkpoint holds weights only."""
    missing = [name for name in ('meta', 'message_hub', 'optimizer') if name not in checkpoint]
    if missing:
        raise CheckpointError(
            f'checkpoint {filename} cannot be resumed, it has no {", ".join(missing)}: '
            'start from its weights with --cfg-options load_from=...'
        )


def read_training_checkpoint(filename: str) -> dict[str, Any]:
    """Read a checkpoint with all that resuming needs; its tensors are on the meta device.

    Raises:
        CheckpointError: If the file cannot be read or holds weights only.
    """
    checkpoint = read_checkpoint(filename, map_location='meta')
    require_training_state(checkpoint, filename)
    return checkpoint


def newest_training_checkpoint(work_dir: str) -> tuple[str | None, list[str]]:
    """Find the checkpoint written last that is whole and can be resumed.

    Looks at every `*.pth` in `work_dir` and in the folder that `work_dir/last_checkpoint` names.

    Returns:
        tuple: Its path, None where there is none, and a warning for each newer file that cannot
        be resumed.
    """
    folders = {Path(work_dir).resolve()}
    pointer = Path(work_dir, 'last_checkpoint')
    if pointer.is_file() and (named := pointer.read_text().strip()):
        folders.add(Path(named).resolve().parent)
    paths = [path for folder in folders for path in folder.glob('*.pth') if path.is_file()]
    warnings = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            read_training_checkpoint(str(path))
        except CheckpointError as error:
            warnings.append(f'--resume auto takes an older file: {error}.')
        else:
            return str(path), warnings
    return None, warnings
