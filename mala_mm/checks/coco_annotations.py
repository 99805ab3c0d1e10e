"""The content of a COCO annotation file, against what mmdet's `CocoDataset` makes of it.

An error is what stops a run or lets it learn or report something wrong without a word. A warning is
what mmdet leaves out.
"""

import difflib
import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmcv.image.geometric import rescale_size

from . import coco_masks
from .findings import Findings

FLOAT_ERROR = 1.0  # pixels by which COCO's own boxes reach out of their images


@dataclass(frozen=True)
class CocoSplit:
    """What a config says of an annotation file.

    Args:
        ann_file (str): Path from the folder of the run, as all paths here.
        img_prefix (str): The folder of the images.
        classes (tuple[str, ...]): `metainfo.classes`, or those of the dataset's type.
        trains (bool): Whether its objects are learned.
        evaluates (bool): Whether a COCO metric reads it. Default: False.
        evaluates_masks (bool): Whether a COCO metric reads its segmentations. Default: False.
        masks (bool): Whether a pipeline reads the segmentations. Default: False.
        filter_empty_gt (bool): As in `filter_cfg`. Default: False.
        min_size (int): As in `filter_cfg`, in pixels. Default: 0.
        alone (bool): Whether nothing else is learned with it (`ConcatDataset`). Default: True.
        scales (tuple[tuple[int, int], ...]): To what the pipeline resizes with `keep_ratio`, in
            pixels. Default: ().
        color_type (str): As in `LoadImageFromFile`. Default: 'color'.
        imdecode_backend (str): As in `LoadImageFromFile`. Default: 'cv2'.
    """

    ann_file: str
    img_prefix: str
    classes: tuple[str, ...]
    trains: bool
    evaluates: bool = False
    evaluates_masks: bool = False
    masks: bool = False
    filter_empty_gt: bool = False
    min_size: int = 0
    alone: bool = True
    scales: tuple[tuple[int, int], ...] = ()
    color_type: str = 'color'
    imdecode_backend: str = 'cv2'


class ListedImage(NamedTuple):
    """An image as an annotation file lists it; sizes in pixels."""

    id: int | float | str
    path: str
    width: float
    height: float


def read_annotations(ann_file: str, findings: Findings) -> Any:
    """Return the content of a JSON file; None, and an error in `findings`, if there is none."""
    try:
        with open(ann_file, encoding='utf-8') as file:
            return json.load(file)
    except FileNotFoundError:
        findings.error(
            f'annotation file {shorten(ann_file)} does not exist: correct data_root and ann_file '
            '(relative paths count from the folder you run in)'
        )
    except (OSError, ValueError, RecursionError) as error:
        empty = os.path.isfile(ann_file) and os.path.getsize(ann_file) == 0
        what = 'it is empty (0 bytes)' if empty else str(error)[:100]
        findings.error(
            f"annotation file {shorten(ann_file)} cannot be read, expected JSON in COCO's format: "
            f'{what}'
        )
    return None


def check_annotations(
    content: Any, split: CocoSplit, findings: Findings, decode: bool = True
) -> list[ListedImage]:
    """Check the content of an annotation file.

    Args:
        content (Any): Whatever JSON can hold.
        split (CocoSplit): What the config makes of it.
        findings (Findings): Takes what is found.
        decode (bool): Also look into compressed masks. Default: True.

    Returns:
        list[ListedImage]: The images that can be looked for.
    """
    name = shorten(split.ann_file)
    if not isinstance(content, dict):
        findings.error(
            f'{name} holds a JSON {_kind(content)}, expected an object with images, annotations '
            'and categories: export it in the format of COCO'
        )
        return []
    complete = True
    for key in ('images', 'categories', 'annotations'):
        found = content.get(key, [])
        if not isinstance(found, list):
            what = f'a JSON {_kind(found)} as {key}'
        elif key not in content and (key != 'annotations' or (split.trains and split.alone)):
            what = f'no {key}'
        elif not found and key != 'annotations':
            what = f'an empty list of {key}'
        else:
            continue
        complete = False
        findings.error(
            f'{name} has {what}, expected a list of objects: export it in the format of COCO'
        )
    if not complete:
        return []
    checker = _Checker(split, findings, decode)
    checker.check_images(content['images'])
    checker.check_categories(content['categories'])
    checker.check_objects(content.get('annotations', []))
    checker.check_what_is_left()
    return list(checker.images.values())


def shorten(text: str, length: int = 80) -> str:
    """Return the end of a long text, where paths differ."""
    return text if len(text) <= length else f'...{text[3 - length :]}'


def some(names: Sequence[str]) -> str:
    """Return the first names of a list."""
    shown = ', '.join(shorten(name, 20) for name in names[:4])
    return f'{shown}, ...' if len(names) > 4 else shown


class _Checker:
    def __init__(self, split: CocoSplit, findings: Findings, decode: bool) -> None:
        self.split = split
        self.findings = findings
        self.decode = decode
        self.name = shorten(split.ann_file)
        self.images: dict[Any, ListedImage] = {}
        self.categories: dict[Any, str] = {}
        self.images_with_object: set = set()  # those that filter_empty_gt keeps
        self.usable = 0  # objects to learn or to find

    def error(self, message: str, place: str | None = None) -> None:
        self.findings.error(f'{self.name}: {message}', place)

    def warning(self, message: str, place: str | None = None) -> None:
        self.findings.warning(f'{self.name}: {message}', place)

    def check_images(self, entries: list) -> None:
        for index, entry in enumerate(entries):
            fault = _image_fault(entry)
            if fault:
                self.error(
                    'images need id, file_name, width and height: correct these entries',
                    f'images[{index}]: {fault}',
                )
                continue
            size = entry['width'], entry['height']
            place = f'image {entry["id"]}: {entry["file_name"]}'
            if entry['id'] in self.images:
                self.error(
                    'image ids that occur twice, which gives the objects of one image to another: '
                    'use each id once',
                    place,
                )
                continue
            path = os.path.join(self.split.img_prefix, entry['file_name'])
            self.images[entry['id']] = ListedImage(entry['id'], path, *size)
            for scale in self.split.scales if max(size) > 20 * min(size) else ():
                if min(rescale_size(size, scale)) == 0:
                    self.error(
                        f'images so thin that Resize to {scale} leaves no pixel: cut them into '
                        'pieces or take them out',
                        f'{place}, {size[0]}x{size[1]}',
                    )

    def check_categories(self, entries: list) -> None:
        for index, entry in enumerate(entries):
            fields = entry if isinstance(entry, dict) else {}
            if not (_is_id(fields.get('id')) and isinstance(fields.get('name'), str)):
                self.error(
                    'categories need id and name: correct these entries',
                    f'categories[{index}]: {reprlib.repr(entry)}',
                )
            elif fields['id'] in self.categories:
                self.error(
                    'category ids that occur twice: use each id once',
                    f'category {fields["id"]}: {self.categories[fields["id"]]}, {fields["name"]}',
                )
            else:
                self.categories[fields['id']] = fields['name']
        names, classes = list(self.categories.values()), self.split.classes
        matched = [name for name in names if name in classes]
        for name, count in Counter(matched).items():
            if count > 1:
                self.error(
                    'names of metainfo.classes that several categories have, which shifts the '
                    'labels of those that follow: merge them',
                    f'{name!r}: {count} categories',
                )
        absent = [name for name in classes if name not in matched]
        left = [name for name in names if name not in matched]
        for name in absent:
            self.error(
                f'{len(absent)} of {len(classes)} metainfo.classes are no category of the file '
                f'({some(names)}), which shifts labels or leaves no object: use the names of the '
                'file, all in its order',
                repr(name) + _near_miss(name, left),
            )
        if len(matched) == len(classes) and tuple(matched) != classes and not absent:
            self.error(
                'the categories stand in another order than metainfo.classes. mmdet numbers labels '
                "in the file's order, so names would be mixed up: write classes in that order "
                f'({some(matched)}), the same in all files'
            )

    def check_objects(self, entries: list) -> None:
        seen, beyond = set(), []
        labelled = {key for key, name in self.categories.items() if name in self.split.classes}
        unlabelled: Counter[str] = Counter()
        for index, entry in enumerate(entries):
            fault = _object_fault(entry)
            if fault:
                self.error(
                    'annotations that mmdet cannot use: correct or remove them',
                    f'annotations[{index}]: {fault}',
                )
                continue
            image_id, category_id, bbox = entry['image_id'], entry['category_id'], entry['bbox']
            annotation = f'annotation {entry["id"]}'
            if entry['id'] in seen:
                self.error('annotation ids that occur twice: number them anew', annotation)
            seen.add(entry['id'])
            image = self.images.get(image_id)
            if image is None:
                self._report_unknown_image(image_id, annotation)
                continue
            if category_id in labelled:
                self.images_with_object.add(image_id)
                if self.split.evaluates:
                    self._check_for_evaluation(entry, annotation)
            elif category_id in self.categories:
                unlabelled[self.categories[category_id]] += 1
            else:
                self.warning(
                    'annotations of categories that the file does not list are left out: list the '
                    'categories or correct category_id',
                    f'{annotation}: category_id {reprlib.repr(category_id)}',
                )
            if _is_beyond(bbox, image):
                beyond.append(_box_place(entry, image))
            is_used = False
            if _is_outside(bbox, image):
                self.warning(
                    'boxes wholly outside their images are left out: expected '
                    '[x, y, width, height] in pixels',
                    _box_place(entry, image),
                )
            elif bbox[2] < 1 or bbox[3] < 1 or entry['area'] <= 0:
                self.warning(
                    'boxes of less than 1 pixel in width or height, or an area of 0, are left out: '
                    'expected [x, y, width, height] in pixels, not fractions',
                    f'{_box_place(entry, image)}, area {entry["area"]}',
                )
            else:
                is_used = category_id in labelled and not entry.get('ignore')
            self.usable += is_used
            # the evaluation reads the masks of what is left out, too
            is_evaluated = self.split.evaluates_masks and category_id in labelled
            if is_evaluated or (self.split.masks and is_used):
                self._check_mask(entry.get('segmentation'), image, annotation)
        self._report_beyond(beyond, len(seen))
        for name, count in unlabelled.items():
            self.warning(
                'objects of categories that are not in metainfo.classes are left out: add the '
                'names to classes to use them',
                f'{name!r}: {count} objects',
            )

    def check_what_is_left(self) -> None:
        if not set(self.split.classes) & set(self.categories.values()):
            return  # told as a fault of the names
        if not self.split.trains:
            if self.split.evaluates and not self.usable:
                self.warning(
                    'no usable object, so every average precision will be -1: expected '
                    'annotations with boxes of metainfo.classes'
                )
            return
        if not self.usable:
            needs_object = self.split.alone or self.split.filter_empty_gt
            report = self.error if needs_object else self.warning
            report(
                'no object to learn: expected annotations with a box inside a listed image and a '
                'category of metainfo.classes'
            )
            return
        kept = self.images_with_object if self.split.filter_empty_gt else self.images.keys()
        sides = [min(self.images[key].width, self.images[key].height) for key in kept]
        small = sum(side < self.split.min_size for side in sides)
        if small == len(kept):
            self.error(
                f'filter_cfg.min_size={self.split.min_size} leaves no image to train on: lower it'
            )
            return
        if small:
            self.warning(
                f'{small} of {len(self.images)} images have a side of less than '
                f'filter_cfg.min_size={self.split.min_size} pixels and are left out: lower it to '
                'train on them'
            )
        if len(kept) < len(self.images):
            self.warning(
                f'{len(self.images) - len(kept)} of {len(self.images)} images have no object of '
                'metainfo.classes and are left out: set filter_cfg.filter_empty_gt=False to train '
                'on them'
            )

    def _check_for_evaluation(self, entry: dict, annotation: str) -> None:
        for key in ('id', 'iscrowd'):
            value = entry.get(key)
            if not (_is_number(value) or (key == 'iscrowd' and isinstance(value, bool))):
                self.error(
                    'annotations that the evaluation cannot use: give each a number as id and '
                    'iscrowd=0, or 1 for a crowd',
                    f'{annotation}: {key} is {_value(entry, key)}',
                )
        if entry['id'] == 0:
            self.warning(
                'the evaluation takes an object with annotation id 0 for not found, even if it '
                'was: number annotations from 1'
            )

    def _report_unknown_image(self, image_id: Any, annotation: str) -> None:
        place = f'{annotation}: image_id {reprlib.repr(image_id)}'
        other = _number(image_id) if isinstance(image_id, str) else str(image_id)
        if other in self.images:
            self.error(
                "image_id is a text where the image's id is a number, or the other way round, so "
                'these objects are not found: write numbers in both',
                place,
            )
        else:
            self.warning(
                'annotations of images that the file does not list are left out: list the images '
                'or remove the annotations',
                place,
            )

    def _check_mask(self, segmentation: Any, image: ListedImage, annotation: str) -> None:
        size = (image.width, image.height)
        if isinstance(segmentation, dict):
            fault = coco_masks.rle_fault(segmentation, *size, self.decode)
            if fault:
                self.error(coco_masks.WRONG_RLE, f'{annotation}: {fault}')
        elif isinstance(segmentation, list) and segmentation:
            for message, value in coco_masks.polygon_faults(segmentation, *size):
                if message == coco_masks.SHORT_FIRST_POLYGON and not self.split.evaluates_masks:
                    message = coco_masks.SHORT_POLYGON
                report = self.warning if message == coco_masks.SHORT_POLYGON else self.error
                report(message, f'{annotation}: {value}')
        else:
            self.error(
                'objects without a segmentation, which the config reads: add polygons, or train a '
                'detector without masks (with_mask=False)',
                f'{annotation}: segmentation {reprlib.repr(segmentation)}',
            )

    def _report_beyond(self, places: list[str], total: int) -> None:
        for place in places:
            if 2 * len(places) > total:
                self.error(
                    'most boxes reach out of their images. Are they [x1, y1, x2, y2], or of images '
                    'of another size? Expected [x, y, width, height] in pixels',
                    place,
                )
            else:
                self.warning(
                    'boxes that reach out of their images are cut at the border: expected '
                    '[x, y, width, height] in pixels',
                    place,
                )


def _image_fault(entry: Any) -> str:
    if not isinstance(entry, dict):
        return f'a JSON {_kind(entry)}'
    if not _is_id(entry.get('id')):
        return f'id is {_value(entry, "id")}'
    if not isinstance(entry.get('file_name'), str) or not entry['file_name']:
        return f'file_name is {_value(entry, "file_name")}'
    for key in ('width', 'height'):
        if not _is_number(entry.get(key)) or entry[key] < 1:
            return f'{key} is {_value(entry, key)}'
    return ''


def _object_fault(entry: Any) -> str:
    if not isinstance(entry, dict):
        return f'a JSON {_kind(entry)}'
    for key in ('id', 'image_id', 'category_id'):
        if not _is_id(entry.get(key)):
            return f'{key} is {_value(entry, key)}'
    bbox = entry.get('bbox')
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
        return f'bbox is {_value(entry, "bbox")}, expected 4 finite numbers'
    if bbox[2] < 0 or bbox[3] < 0:
        return f'bbox is {reprlib.repr(bbox)}, expected a width and height from 0'
    if not _is_number(entry.get('area')):
        return f'area is {_value(entry, "area")}, expected square pixels'
    return ''


def _is_outside(bbox: list, image: ListedImage) -> bool:
    x, y, width, height = bbox
    inside_x = min(x + width, image.width) - max(x, 0)
    inside_y = min(y + height, image.height) - max(y, 0)
    return (inside_x <= 0 < width) or (inside_y <= 0 < height)


def _is_beyond(bbox: list, image: ListedImage) -> bool:
    x, y, width, height = bbox
    return (
        min(x, y) < -FLOAT_ERROR
        or x + width > image.width + FLOAT_ERROR
        or y + height > image.height + FLOAT_ERROR
    )


def _box_place(entry: dict, image: ListedImage) -> str:
    bbox = reprlib.repr(entry['bbox'])
    return f'annotation {entry["id"]}: bbox {bbox} in an image of {image.width}x{image.height}'


def _near_miss(name: str, candidates: Sequence[str]) -> str:
    plain = {candidate.strip().lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.strip().lower(), plain, n=1)
    return f': did you mean {plain[close[0]]!r}?' if close else ''


def _is_id(value: Any) -> bool:
    """COCO's ids are whole numbers; mmdet takes texts as well."""
    if type(value) is int:
        return True
    return isinstance(value, str) or (isinstance(value, float) and value.is_integer())


def _is_number(value: Any) -> bool:
    if type(value) is int:  # no bool
        return abs(value) < 1 << 63
    return isinstance(value, float) and math.isfinite(value)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _value(entry: dict, key: str) -> str:
    return reprlib.repr(entry[key]) if key in entry else 'missing'


def _kind(value: Any) -> str:
    kinds = {dict: 'object', list: 'list', str: 'text', bool: 'boolean', type(None): 'null'}
    return kinds.get(type(value), 'number')
