"""Files that are there whole or not at all, whatever interrupts the writing."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

from mala_mm.checkpoint import CheckpointError

PARTIAL = '.partial'
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@register_backend('mala_mm.WholeFileBackend')
class WholeFileBackend(LocalBackend):
    """mmengine's local files, with `put` going through :func:`write_whole`."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        write_whole(filepath, obj)


def write_whole(path: str | Path, content: bytes) -> None:
    """Write `content` to PATH.partial, and to `path` only once it is on the disk.

    Raises:
        CheckpointError: If the disk is full or fails. What was at `path` is still there.
    """
    path = Path(path)
    partial = Path(f'{path}{PARTIAL}')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, 'wb') as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):  # an interrupt
            raise
        remedy = 'make room' if error.errno in FULL_DISK else 'mend that'
        raise CheckpointError(
            f'{path} could not be written: {error.strerror}. Earlier checkpoints are untouched: '
            f'{remedy} and continue with --resume'
        ) from error


def _sync_folder(folder: Path) -> None:
    """Bring a renaming to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot, and do without
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
