"""Images and masks of a segmentation data set, against each other and against the classes."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mmengine.fileio import list_dir_or_file
from mmengine.registry import DATASETS, Registry
from mmseg.datasets import BaseSegDataset

from .class_names import class_names_problem
from .findings import Findings
from .images import ImageError, ImageInfo, missing_files, read_image, scan

QUICK_PAIRS = 8
IGNORED = 255  # what mmseg makes of ignored pixels, whatever a head ignores
IMAGE_ENDINGS = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


class Pair(NamedTuple):
    """Paths of an image and of its mask, '' where the data set has none."""

    image: str
    mask: str


class Loading(NamedTuple):
    """How a pipeline decodes: arguments of `read_image`, None where it does not load the kind."""

    image: tuple[str, str] | None
    mask: tuple[str, str] | None


class Decoded(NamedTuple):
    """What a pair holds; None where it is not loaded."""

    image: ImageInfo | ImageError | None
    mask: ImageInfo | ImageError | None
    shape: tuple[int, ...]
    dtype: np.dtype
    values: tuple[int, ...]  # those of a single-channel mask of integers


class Head(NamedTuple):
    """The labels that a head can learn: 0..limit-1, and one that it ignores."""

    limit: int
    ignore_index: int


def check_segmentation_dataset(
    dataset: dict, model: dict, full: bool = True, workers: int = 0, progress: bool = False
) -> Findings:
    """Check that images and masks exist in pairs and that masks hold the labels of the heads.

    Args:
        dataset (dict): Config of a `BaseSegDataset`, without wrappers, on a local disk.
        model (dict): Config of the segmentor.
        full (bool): Decode all images and masks instead of a few. Defaults to True.
        workers (int): Processes that decode; 0 decodes in this one. Defaults to 0.
        progress (bool): Show a progress bar on stderr. Defaults to False.
    """
    findings = Findings()
    with DATASETS.switch_scope_and_registry('mmseg') as registry:
        kind = dataset['type']
        kind = registry.get(kind) if isinstance(kind, str) else kind
        if problem := class_names_problem(kind, dataset.get('metainfo')):
            findings.error(problem)
            return findings
        try:
            built = _build(registry, dict(dataset, pipeline=[]))
        except Exception as error:  # a data set's constructor raises whatever it meets
            reason = str(error) or 'a folder or file that it needs is missing'
            findings.error(f'{kind.__name__} cannot be set up: {reason}')
            return findings
    heads = _heads(model)
    _check_num_classes(built, model, findings)
    pairs = _pairs(built, findings)
    chosen = pairs if full else pairs[:: 1 + len(pairs) // QUICK_PAIRS]
    decode = partial(_decode, loading=_loading(dataset.get('pipeline')))
    for pair, decoded in zip(
        chosen, scan(decode, chosen, workers, 'masks' if progress else None), strict=True
    ):
        _check_pair(pair, decoded, built, heads, findings)
    return findings


def _build(registry: Registry, dataset: dict) -> Any:
    try:
        return registry.build(dict(dataset, lazy_init=True))
    except TypeError as error:
        if "argument 'lazy_init'" not in str(error):
            raise
        return registry.build(dict(dataset))  # a class of the user's own


def _heads(model: dict) -> dict[str, Head]:
    """By name; several heads have the same labels as a rule."""
    return {
        name: Head(
            _label_count(head),
            head.get('ignore_index', 255),
        )
        for name, head in _head_configs(model)
        if isinstance(head.get('num_classes'), int)
    }


def _label_count(head: dict) -> int:
    losses = head.get('loss_decode') or []
    losses = losses if isinstance(losses, list | tuple) else [losses]
    is_sigmoid = any(isinstance(loss, dict) and loss.get('use_sigmoid') for loss in losses)
    one_output = head.get('out_channels') == 1 or (head['num_classes'] == 1 and is_sigmoid)
    return max(head['num_classes'], 2 if one_output else 1)  # one tells two classes apart


def _head_configs(model: dict) -> Iterator[tuple[str, dict]]:
    while 'module' in model:  # test-time augmentation
        model = model['module']
    for name in ('decode_head', 'auxiliary_head'):
        heads = model.get(name) or []
        for i, head in enumerate(heads if isinstance(heads, list | tuple) else [heads]):
            if not isinstance(head, dict):  # an error of the config
                continue
            # learns the borders between the masks' labels
            if 'boundary_threshold' in head or str(head.get('type')).endswith('STDCHead'):
                continue
            yield (name if isinstance(heads, dict) else f'{name}.{i}'), head


def _check_num_classes(built: Any, model: dict, findings: Findings) -> None:
    classes = built.metainfo.get('classes') or ()
    for name, head in _head_configs(model):
        given = head.get('num_classes')
        if not classes or not isinstance(given, int):
            continue
        if len(classes) in (given, _label_count(head)):
            continue
        add = findings.error if given < len(classes) else findings.warning
        add(
            f'model.{name}.num_classes={given}, but the {len(classes)} classes of '
            f'{type(built).__name__} are {_few(classes)}: set num_classes={len(classes)} or '
            'metainfo.classes'
        )


def _pairs(built: Any, findings: Findings) -> list[Pair]:
    """The pairs whose files exist."""
    if type(built).load_data_list is not BaseSegDataset.load_data_list:
        return _found_pairs(built, findings)
    images_in, masks_in = built.data_prefix.get('img_path'), built.data_prefix.get('seg_map_path')
    if not images_in:
        findings.error(f'{type(built).__name__} has no data_prefix.img_path: set it to a folder')
        return []
    missing_folders = [path for path in (images_in, masks_in) if path and not os.path.isdir(path)]
    for path in missing_folders:
        findings.error(f'folder {path} does not exist: correct data_root or data_prefix')
    if built.ann_file and not os.path.exists(built.ann_file):
        findings.error(f'ann_file {built.ann_file} does not exist: correct data_root or ann_file')
    elif not missing_folders:
        return _existing_pairs(built, images_in, masks_in, findings)
    return []


def _existing_pairs(
    built: Any, images_in: str, masks_in: str | None, findings: Findings
) -> list[Pair]:
    pairs = [
        Pair(entry['img_path'], entry.get('seg_map_path') or '') for entry in built.load_data_list()
    ]
    is_listed = os.path.isfile(built.ann_file)
    if is_listed:
        lost = set(missing_files([pair.image for pair in pairs]))
        for path in sorted(lost):
            findings.error(
                f'images of the list {built.ann_file} that do not exist: correct the list, whose '
                f'lines are names without the ending {built.img_suffix}, or img_suffix',
                path,
            )
        pairs = [pair for pair in pairs if pair.image not in lost]
    else:
        _check_left_over(built, pairs, images_in, masks_in, findings)
    if not masks_in:
        return pairs
    lost = set(missing_files([pair.mask for pair in pairs]))
    for pair in pairs:
        if pair.mask in lost:
            findings.error(
                f'images of {images_in} without a mask in {masks_in}: add the mask, correct '
                f'seg_map_suffix={built.seg_map_suffix}, or remove the image',
                f'{pair.image}: no {pair.mask}',
            )
    return [pair for pair in pairs if pair.mask not in lost]


def _found_pairs(built: Any, findings: Findings) -> list[Pair]:
    """Of a data set that finds its files in a way of its own."""
    try:
        entries = built.load_data_list()
    except Exception as error:  # it raises whatever it meets
        findings.error(f'{type(built).__name__} cannot list its files: {error}')
        return []
    pairs = [Pair(entry['img_path'], entry.get('seg_map_path') or '') for entry in entries]
    lost = set(missing_files([path for pair in pairs for path in pair if path]))
    for path in sorted(lost):
        findings.error(f'files that {type(built).__name__} lists and that do not exist', path)
    return [pair for pair in pairs if not lost.intersection(pair)]


def _check_left_over(
    built: Any, pairs: list[Pair], images_in: str, masks_in: str | None, findings: Findings
) -> None:
    """Files in the folders that belong to no pair."""
    masks = {os.path.normpath(pair.mask) for pair in pairs}
    others = [
        path
        for path in _files(images_in, IMAGE_ENDINGS)
        if not path.endswith(built.img_suffix) and path not in masks
    ]
    if not pairs:
        findings.error(
            f'no image in {images_in} ends in img_suffix={built.img_suffix}: set img_suffix to '
            'the ending of your images, or correct data_prefix.img_path',
            f'there: {_few(os.path.basename(path) for path in others)}' if others else None,
        )
        return
    for path in others:
        findings.warning(
            f'images that do not end in img_suffix={built.img_suffix} are not used: rename them '
            'or set img_suffix',
            path,
        )
    for path in _files(masks_in, (built.seg_map_suffix,)) if masks_in else ():
        if path not in masks:
            findings.warning(
                f'masks without an image in {images_in} are not used: add the image or remove the '
                'mask',
                path,
            )


def _files(folder: str, endings: tuple[str, ...]) -> list[str]:
    names = list_dir_or_file(folder, list_dir=False, recursive=True)
    endings = tuple(ending.lower() for ending in endings)
    return sorted(
        os.path.normpath(os.path.join(folder, n)) for n in names if n.lower().endswith(endings)
    )


def _loading(pipeline: Any) -> Loading:
    transforms = {
        str(transform.get('type')).split('.')[-1]: transform
        for transform in pipeline or ()
        if isinstance(transform, dict)
    }
    image, mask = transforms.get('LoadImageFromFile'), transforms.get('LoadAnnotations')
    return Loading(
        None
        if image is None
        else (image.get('color_type', 'color'), image.get('imdecode_backend', 'cv2')),
        None if mask is None else ('unchanged', mask.get('imdecode_backend', 'pillow')),
    )


def _decode(pair: Pair, loading: Loading) -> Decoded:
    image: ImageInfo | ImageError | None = None
    mask: ImageInfo | ImageError | None = None
    pixels, values = np.empty(0), np.empty(0)
    if loading.image:
        try:
            image = read_image(pair.image, *loading.image)[1]
        except ImageError as error:
            image = error
    if loading.mask and pair.mask:
        try:
            pixels, mask = read_image(pair.mask, *loading.mask)
        except ImageError as error:
            mask = error
        if pixels.ndim == 2 and pixels.dtype.kind in 'biu':
            values = np.unique(pixels)
    return Decoded(image, mask, pixels.shape, pixels.dtype, tuple(map(int, values)))


def _check_pair(
    pair: Pair, decoded: Decoded, built: Any, heads: dict[str, Head], findings: Findings
) -> None:
    image, mask = decoded.image, decoded.mask
    if isinstance(image, ImageError):
        findings.error(
            'images that cannot be used: replace them or take them out of the data set',
            f'{pair.image} {image}',
        )
    if isinstance(mask, ImageError):
        findings.error(
            'masks that cannot be used: replace them or take their images out of the data set',
            f'{pair.mask} {mask}',
        )
    if not isinstance(mask, ImageInfo):
        return
    if len(decoded.shape) != 2:
        findings.error(
            'masks with several channels, expected one channel of class numbers: convert the '
            'colours to class numbers (for a palette image, LoadAnnotations has to say '
            "imdecode_backend='pillow')",
            f'{pair.mask}: {decoded.shape[2]} channels',
        )
        return
    if isinstance(image, ImageInfo):
        _check_size(pair, image, mask, findings)
    if 1 in decoded.shape:
        findings.error(
            'masks of one row or one column, which LoadAnnotations makes a vector of: take out '
            'or enlarge image and mask',
            f'{pair.mask}: {mask.width}x{mask.height}',
        )
    _check_values(pair.mask, mask, decoded, built, heads, findings)


def _check_size(pair: Pair, image: ImageInfo, mask: ImageInfo, findings: Findings) -> None:
    image_size, mask_size = (image.width, image.height), (mask.width, mask.height)
    if image_size == mask_size:
        return
    place = f'{pair.mask}: mask {mask_size}, image {image_size}'
    if image.stored_size == mask_size:
        findings.error(
            'masks of images with an orientation tag, which turns the image but not its mask: '
            'save the images upright without it',
            place,
        )
    else:
        findings.error(
            'masks of another (width, height) than their image: scale one of them, masks with '
            'nearest neighbour',
            place,
        )


def _check_values(
    path: str,
    mask: ImageInfo,
    decoded: Decoded,
    built: Any,
    heads: dict[str, Head],
    findings: Findings,
) -> None:
    if decoded.dtype.kind not in 'biu':
        findings.error(
            'masks of fractional numbers, expected whole class numbers: save them as 8-bit images',
            f'{path}: {decoded.dtype}',
        )
        return
    if mask.mode == 'L' and mask.bit_depth in (2, 4):
        findings.error(
            'grey masks of 2 or 4 bits, which decoding stretches to 0..255: save them with 8 bits '
            'or as palette images',
            f'{path}: {mask.bit_depth} bits, read as {_few(decoded.values)}',
        )
        return
    wide = [value for value in decoded.values if not 0 <= value <= 255]
    if wide:
        findings.error(
            'mask values outside 0..255, of which loading keeps the lowest 8 bits (300 becomes '
            '44): save class numbers in 8 bits',
            f'{path}: {mask.bit_depth} bits, values {_few(wide)}',
        )
        return
    labels = {value: _label(value, built) for value in decoded.values}
    for head in dict.fromkeys(heads.values()):
        names = [name for name, other in heads.items() if other == head]
        allowed = {*range(head.limit), head.ignore_index}
        bad = [value for value, label in labels.items() if label not in allowed]
        if bad:
            findings.error(
                f'mask values outside the classes of {", ".join(names)}: with '
                f'reduce_zero_label={built.reduce_zero_label}, expected labels 0..{head.limit - 1} '
                f'and {head.ignore_index} (ignored): correct the masks, num_classes or '
                'reduce_zero_label',
                f'{path}: values {_few(bad)} are labels {_few(labels[value] for value in bad)}',
            )
    if heads and set(labels.values()) <= {head.ignore_index for head in heads.values()}:
        findings.warning('masks of ignored pixels only, from which nothing is learnt', path)


def _label(value: int, built: Any) -> int:
    """What mmseg's `LoadAnnotations` makes of a value."""
    if built.reduce_zero_label:
        value = IGNORED if value in (0, IGNORED) else value - 1
    return (built.label_map or {}).get(value, value)


def _few(values: Any) -> str:
    values = [str(value) for value in values]
    return ', '.join(values[:5] + ['...'] * (len(values) > 5))
