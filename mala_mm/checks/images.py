"""Image files as a data pipeline reads them, one by one and in worker processes."""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import cv2
import mmcv
import numpy as np
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

Item = TypeVar('Item')
Result = TypeVar('Result')


class ImageError(ValueError):
    """A file that cannot be used as an image; the text is a clause such as 'is empty (0 bytes)'."""


@dataclass(frozen=True)
class ImageInfo:
    """What a decoded image file is.

    Args:
        width (int): Pixels, after decoding, so with an orientation tag applied where the pipeline
            applies it.
        height (int): As `width`.
        stored_size (tuple[int, int]): Width and height in the file, before any orientation.
        mode (str): Pillow's mode: 'RGB', 'L', 'P', 'RGBA', 'I;16', ...; '' for a format that only
            the pipeline's backend reads.
        bit_depth (int): Bits of one channel of one pixel in the file.
    """

    width: int
    height: int
    stored_size: tuple[int, int]
    mode: str
    bit_depth: int


class _Stored(NamedTuple):
    size: tuple[int, int]
    mode: str
    bit_depth: int


def read_image(
    path: str, flag: str = 'color', backend: str = 'cv2'
) -> tuple[np.ndarray, ImageInfo]:
    """Decode an image file whole.

    Pillow decodes it too: OpenCV fills what is missing of a file with grey, Pillow refuses it.

    Args:
        path (str): A file on this machine.
        flag (str): As of `mmcv.imfrombytes`: 'color' is `LoadImageFromFile`'s default and applies
            an orientation tag, 'unchanged' is what `LoadAnnotations` uses for masks.
        backend (str): As of `mmcv.imfrombytes`: 'cv2' is the default of `LoadImageFromFile`,
            'pillow' that of mmseg's `LoadAnnotations`.

    Returns:
        tuple: The pixels as the pipeline has them, ndarray [H, W] or [H, W, C], and an `ImageInfo`.

    Raises:
        ImageError: the file is missing, empty, cut off, damaged or no image.
    """
    content = _read_file(path)
    stored = _decode_strictly(content)
    try:
        pixels = mmcv.imfrombytes(content, flag, backend=backend)
    except Exception as error:  # each backend and format has errors of its own
        raise ImageError(f'cannot be decoded by {backend} ({_first_line(error)})') from None
    if pixels is None:
        kind = f'a {stored.mode} image' if stored else 'perhaps no image'
        raise ImageError(f'cannot be decoded by {backend} ({kind})')
    height, width = pixels.shape[:2]
    size = stored.size if stored else (width, height)
    mode = stored.mode if stored else ''
    depth = stored.bit_depth if stored else 8 * pixels.dtype.itemsize
    return pixels, ImageInfo(width, height, size, mode, depth)


def inspect_image(path: str, flag: str = 'color', backend: str = 'cv2') -> ImageInfo | ImageError:
    """Return what `read_image` finds, an error as a value: for worker processes."""
    try:
        return read_image(path, flag, backend)[1]
    except ImageError as error:
        return error


def missing_files(paths: Sequence[str]) -> list[str]:
    """Return those paths that are no files, in their order.

    Lists each folder once, which on a network's file system takes seconds where asking for each
    file takes minutes.
    """
    listings: dict[str, set[str]] = {}
    missing = []
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in listings:
            listings[folder] = _files_in(folder)
        if name not in listings[folder] and not _is_file(path):
            missing.append(path)
    return missing


def scan(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int = 0,
    progress: str | None = None,
) -> Iterator[Result]:
    """Apply a function to each item, in the items' order.

    Args:
        function (Callable): Of one item; with workers, a function of a module or a `partial` of it.
        items (Sequence): Plain values such as paths.
        workers (int): Processes; 0 or 1 works in this one. Default: 0.
        progress (str | None): The name of a progress bar on stderr. Default: no bar.

    Raises:
        BrokenProcessPool: a worker process was killed.
    """
    bar = tqdm(
        total=len(items), desc=progress, disable=progress is None or not items, unit=' files'
    )
    with bar:
        if workers <= 1:
            for item in items:
                yield function(item)
                bar.update()
            return
        with ProcessPoolExecutor(workers, initializer=cv2.setNumThreads, initargs=(0,)) as pool:
            try:
                for result in pool.map(function, items, chunksize=16):
                    yield result
                    bar.update()
            except BrokenProcessPool:
                raise BrokenProcessPool(
                    'a worker process was killed, perhaps for lack of memory: use fewer workers'
                ) from None


def _read_file(path: str) -> bytes:
    try:
        with open(path, 'rb') as file:
            content = file.read()
    except FileNotFoundError:
        raise ImageError('does not exist') from None
    except IsADirectoryError:
        raise ImageError('is a folder') from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ImageError(f'cannot be read ({_first_line(error)})') from None
    if not content:
        raise ImageError('is empty (0 bytes)')
    return content


def _decode_strictly(content: bytes) -> _Stored | None:
    """Return what Pillow finds in a whole image, None where it does not know the format."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of very large images and of odd metadata
        try:
            with Image.open(io.BytesIO(content)) as image:
                stored = _Stored(image.size, image.mode, _bit_depth(image, content))
                image.load()
        except (UnidentifiedImageError, Image.DecompressionBombError):
            return None
        except Exception as error:  # Pillow's decoders raise whatever they meet
            raise ImageError(f'is cut off or damaged ({_first_line(error)})') from None
    return stored


def _bit_depth(image: Image.Image, content: bytes) -> int:
    """Pillow gives 16-bit colours the mode of 8-bit ones, so its mode does not tell."""
    if image.format == 'PNG':
        return content[24]  # of the IHDR chunk, which comes first
    if image.format == 'TIFF':
        return max(image.tag_v2.get(258, (1,)))  # BitsPerSample
    return {'1': 1, 'I;16': 16, 'I;16B': 16, 'I': 32, 'F': 32}.get(image.mode, 8)


def _files_in(folder: str) -> set[str]:
    try:
        with os.scandir(folder or '.') as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except (OSError, ValueError):
        return set()


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:
        return False


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [''])[0] or type(error).__name__
