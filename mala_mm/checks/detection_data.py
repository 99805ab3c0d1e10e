"""A detector's heads and images, against its classes and annotations."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .coco_annotations import CocoSplit, ListedImage, shorten, some
from .findings import Findings
from .images import ImageError, ImageInfo

DEFAULT_NUM_CLASSES = 80  # of mmdet's RoI heads
# Where num_classes means something else.
OTHER_CLASSES = ('backbone', 'neck', 'rpn_head', 'semantic_head')


def check_num_classes(model: dict, classes: Sequence[str], findings: Findings) -> None:
    """Compare `num_classes` in every head of a detector with the number of classes."""
    if isinstance(model, dict) and 'language_model' in model:  # there it is the length of a text
        return
    for place, found in _num_classes(model, 'model'):
        if found != len(classes):
            findings.error(
                f'{place}.num_classes={found}, but metainfo.classes has {len(classes)} names '
                f'({some(classes)}): set it to {len(classes)}'
            )


def check_listed_images(
    images: Iterable[tuple[ListedImage, ImageInfo | ImageError]],
    split: CocoSplit,
    findings: Findings,
) -> None:
    """Compare decoded images with what the annotation file says of them."""
    name = shorten(split.ann_file)
    for image, info in images:
        if isinstance(info, ImageError):
            findings.error(
                f'{name}: images that cannot be used: replace them or take them out of the file',
                f'{image.path} {info}',
            )
            continue
        listed, decoded = (image.width, image.height), (info.width, info.height)
        place = f'{image.path}: listed {listed}, decoded {decoded}'
        if listed != decoded and listed == info.stored_size:
            findings.error(
                f'{name}: images with an orientation tag, which loading applies to the pixels but '
                'not to the boxes: save them upright without it, or set '
                "color_type='color_ignore_orientation' in every LoadImageFromFile",
                place,
            )
        elif listed != decoded:
            findings.error(
                f'{name}: images of another (width, height) than listed, so their boxes lie '
                'elsewhere: correct the file or put the right images there',
                place,
            )
        if split.color_type == 'unchanged':
            continue
        if info.bit_depth > 8 and split.imdecode_backend == 'cv2':
            findings.warning(
                f'{name}: images of more than 8 bits are cut to their upper 8: scale them to 8 '
                'bits yourself if they are dark',
                f'{image.path}: {info.bit_depth} bits',
            )
        if info.mode in ('RGBA', 'LA', 'PA'):
            findings.warning(
                f'{name}: images with an alpha channel lose it: blend them onto a background if '
                'the colours below it are arbitrary',
                f'{image.path}: {info.mode}',
            )


def _num_classes(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each `num_classes` in the heads of a model's config."""
    if isinstance(node, (list, tuple)):
        for index, item in enumerate(node):
            yield from _num_classes(item, f'{place}.{index}')
    elif isinstance(node, dict):
        if 'head' in place and 'num_classes' in node:
            yield place, node['num_classes']
        elif place.rstrip('.0123456789').endswith(('roi_head.bbox_head', 'roi_head.mask_head')):
            yield place, DEFAULT_NUM_CLASSES
        for key, value in node.items():
            if key not in OTHER_CLASSES:
                yield from _num_classes(value, f'{place}.{key}')
