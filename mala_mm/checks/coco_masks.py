"""The masks of COCO annotations: polygons and run-length codes."""

import math
import reprlib

NO_POLYGONS = (
    'segmentations that are no polygons: expected a list of lists of numbers '
    '[[x1, y1, x2, y2, x3, y3, ...], ...] in pixels'
)
WILD_POLYGON = (
    'polygons with values that are not finite or far outside the image, for which drawing the mask '
    'can take all memory: correct or remove them'
)
SHORT_POLYGON = (
    'polygons of fewer than 3 points or an odd count of numbers are left out: expected 6, 8, 10 or '
    'more numbers x1, y1, x2, y2, ..., xn, yn'
)
SHORT_FIRST_POLYGON = (
    'masks whose first polygon has fewer than 3 points, at which the evaluation fails: expected '
    'at least 6 numbers, correct or remove them'
)
WRONG_RLE = (
    'run-length masks that do not fit their images: expected size [height, width] of the image '
    'and counts that add up to height * width'
)


def polygon_faults(polygons: list, width: float, height: float) -> list[tuple[str, str]]:
    """Return one of the messages above and the place of each fault; sizes in pixels."""
    faults = []
    limit = 2 * max(width, height)
    for index, polygon in enumerate(polygons):
        try:
            wild = not math.isfinite(sum(polygon)) or (
                len(polygon) > 0 and not -limit <= min(polygon) <= max(polygon) <= limit
            )
        except (TypeError, OverflowError):
            return [(NO_POLYGONS, reprlib.repr(polygons))]
        if wild:
            faults.append((WILD_POLYGON, reprlib.repr(polygon)))
        elif index == 0 and len(polygon) < 5:  # pycocotools takes the kind of all from the first
            faults.append((SHORT_FIRST_POLYGON, reprlib.repr(polygon)))
        elif len(polygon) < 6 or len(polygon) % 2:
            faults.append((SHORT_POLYGON, reprlib.repr(polygon)))
    return faults


def rle_fault(rle: dict, width: float, height: float, decode: bool) -> str:
    """Return what is wrong with a run-length code, '' for nothing.

    Args:
        rle (dict): `size` and `counts`, a list of lengths or COCO's compressed text.
        width (float): Of the image, in pixels.
        height (float): As `width`.
        decode (bool): Whether to look into compressed counts.
    """
    size, counts = rle.get('size'), rle.get('counts')
    if size != [height, width]:
        return f'size is {reprlib.repr(size)}, expected {[height, width]}'
    if isinstance(counts, list):
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            return f'counts are {reprlib.repr(counts)}, expected whole numbers from 0'
        total = sum(counts)
    elif isinstance(counts, str):
        total = _compressed_length(counts) if decode else height * width
    else:
        return f'counts are {reprlib.repr(counts)}, expected a list or a text'
    if total != height * width:
        return f'counts add up to {total}, expected {height * width}'
    return ''


def _compressed_length(text: str) -> int | None:
    """Add up the lengths in a text of COCO's API; None for another text.

    A number stands in groups of 5 bits, the lowest first, each as a character from '0' on: bit 5
    says that another group follows, bit 4 of the last one is the sign. From the fourth number on
    it is the difference to the last but one.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - ord('0')
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    return None if shift or any(count < 0 for count in counts) else sum(counts)
