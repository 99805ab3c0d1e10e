"""The data sets that a config names, detection and segmentation."""

import dataclasses
import gc
import os
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from mmengine.config import Config
from mmengine.fileio import join_path, list_from_file
from mmengine.utils import is_abs

from ..cli import DETECTION, SEGMENTATION
from .coco_annotations import (
    CocoSplit,
    ListedImage,
    check_annotations,
    read_annotations,
    shorten,
    some,
)
from .detection_data import check_listed_images, check_num_classes
from .findings import Findings
from .images import ImageError, ImageInfo, inspect_image, missing_files, scan

QUICK_IMAGES = 8  # of each annotation file
NONE = type(None)
KINDS = {  # of a data set's settings
    'type': (str, type, NONE),
    **dict.fromkeys(('data_root', 'ann_file'), (str, NONE)),
    **dict.fromkeys(('data_prefix', 'metainfo', 'filter_cfg'), (dict, NONE)),
    'pipeline': (list, tuple, NONE),
}


def check_data(
    cfg: Config,
    full: bool = True,
    workers: int = 0,
    progress: bool = False,
    splits: Sequence[str] = ('train', 'val', 'test'),
) -> Findings:
    """Check the files that the dataloaders and evaluators of a config name.

    Annotation files are checked whole, and that every image exists.

    Args:
        cfg (Config): Of a detector or a segmentor.
        full (bool): Decode all images and masks instead of a few. Default: True.
        workers (int): Processes that decode; 0 decodes in this one. Default: 0.
        progress (bool): Show a progress bar on stderr. Default: False.
        splits (Sequence[str]): Whose `SPLIT_dataloader` and `SPLIT_evaluator` to check. Default:
            all three.

    Raises:
        BrokenProcessPool: a worker process was killed.
    """
    findings = Findings()
    scope = cfg.get('default_scope')
    coco = _CocoData(findings)
    segmentation: list[dict] = []
    for split in splits:
        dataloader = cfg.get(f'{split}_dataloader') or {}
        evaluator = cfg.get(f'{split}_evaluator')
        leaves = list(_leaves(dataloader.get('dataset'), f'{split}_dataloader.dataset'))
        for place, dataset in leaves:
            if wrong := [n for n, kind in KINDS.items() if not isinstance(dataset.get(n), kind)]:
                findings.error(
                    f'dataset.{wrong[0]}={reprlib.repr(dataset[wrong[0]])}, expected '
                    f'{KINDS[wrong[0]][0].__name__}',
                    place,
                )
                continue
            if _is_remote(dataset):
                findings.warning(
                    'data sets that are not on a local disk: their files are not checked', place
                )
                continue
            kind = _dataset_class(dataset.get('type'), scope)
            if kind is None:
                findings.error(
                    f'dataset.type={dataset.get("type")!r} is not known to {scope}: correct it, or '
                    'import its module with custom_imports',
                    place,
                )
            elif scope == SEGMENTATION and _is_segmentation(kind):
                if _unscoped(dataset) not in map(_unscoped, segmentation):
                    segmentation.append(dataset)
            elif scope == DETECTION and _reads_coco(kind):
                coco.add(dataset, place, kind, evaluator, alone=len(leaves) == 1)
            else:
                findings.warning(
                    f"{kind.__name__} reads other files than mmdet's CocoDataset or mmseg's "
                    'BaseSegDataset do: nothing of it is checked',
                    place,
                )
    coco.check(cfg.get('model') or {}, full, workers, progress)
    for dataset in segmentation:
        from .segmentation_data import check_segmentation_dataset

        findings.extend(
            check_segmentation_dataset(dataset, cfg.get('model') or {}, full, workers, progress)
        )
    return findings


class _CocoData:
    """All annotation files of a config; one that several loaders name is read once."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.splits: dict[tuple, CocoSplit] = {}
        self.ground_truths: list[tuple[tuple, tuple]] = []  # where an evaluator has its own file

    def add(self, dataset: dict, place: str, kind: type, evaluator: Any, alone: bool) -> None:
        classes = _classes(dataset.get('metainfo'), kind, place, self.findings)
        img_prefix = (dataset.get('data_prefix') or {}).get('img')
        if not isinstance(img_prefix, str) or not dataset.get('ann_file'):
            self.findings.error(
                'a CocoDataset needs ann_file and data_prefix=dict(img=FOLDER), but the config has '
                f'ann_file={dataset.get("ann_file")!r}, '
                f'data_prefix={dict(dataset.get("data_prefix") or {})}',
                place,
            )
            return
        if classes is None:
            return
        transforms = list(_transforms(dataset.get('pipeline')))
        loading = next((t for t in transforms if _is_type(t, 'LoadImageFromFile')), {})
        filter_cfg = dataset.get('filter_cfg') or {}
        if not isinstance(filter_cfg, dict) or not _is_side(filter_cfg.get('min_size', 0)):
            self.findings.error(
                f'filter_cfg={reprlib.repr(filter_cfg)}, expected dict(filter_empty_gt=True, '
                'min_size=PIXELS)',
                place,
            )
            return
        trains = not dataset.get('test_mode', False)
        split = CocoSplit(
            ann_file=_joined(dataset, dataset['ann_file']),
            img_prefix=_joined(dataset, img_prefix),
            classes=classes,
            trains=trains,
            masks=any(t.get('with_mask') for t in transforms),
            filter_empty_gt=trains and filter_cfg.get('filter_empty_gt', False),
            min_size=filter_cfg.get('min_size', 0) if trains else 0,
            alone=alone,
            scales=tuple(_scales(transforms)),
            color_type=loading.get('color_type', 'color'),
            imdecode_backend=loading.get('imdecode_backend', 'cv2'),
        )
        truths = []
        for metric in _coco_metrics(evaluator):
            segm = 'segm' in str(metric.get('metric'))
            read = dict(evaluates=True, evaluates_masks=segm or split.evaluates_masks)
            if _same_file(metric['ann_file'], split.ann_file):
                split = dataclasses.replace(split, **read)
            else:
                truths.append(
                    dataclasses.replace(
                        split, ann_file=metric['ann_file'], trains=False, masks=False, **read
                    )
                )
        key = self._join(split)
        self.ground_truths += [(key, self._join(truth)) for truth in truths]

    def _join(self, split: CocoSplit) -> tuple:
        """Add a split, or what it says more of one that is there, and return its key."""
        key = (split.ann_file, split.img_prefix, split.classes, *_loading(split))
        known = self.splits.setdefault(key, split)
        self.splits[key] = dataclasses.replace(
            known,
            trains=known.trains or split.trains,
            evaluates=known.evaluates or split.evaluates,
            evaluates_masks=known.evaluates_masks or split.evaluates_masks,
            masks=known.masks or split.masks,
            filter_empty_gt=known.filter_empty_gt or split.filter_empty_gt,
            min_size=max(known.min_size, split.min_size),
            alone=known.alone and split.alone,
            scales=tuple(dict.fromkeys(known.scales + split.scales)),
        )
        return key

    def check(self, model: dict, full: bool, workers: int, progress: bool) -> None:
        images = self._listed_images(decode=full)
        self._compare_ground_truths(images)
        self._compare_classes(model)
        chosen = {
            self.splits[key]: self._existing(self.splits[key], listed, full)
            for key, listed in images.items()
        }
        files = dict.fromkeys(
            (i.path, *_loading(s)) for s, listed in chosen.items() for i in listed
        )
        bar = 'images' if progress else None
        infos = dict(zip(files, scan(_inspect, list(files), workers, bar), strict=True))
        for split, listed in chosen.items():
            decoded = ((image, infos[(image.path, *_loading(split))]) for image in listed)
            check_listed_images(decoded, split, self.findings)

    def _listed_images(self, decode: bool) -> dict[tuple, list[ListedImage]]:
        """Check each annotation file and return its images."""
        images = {}
        # The collector would go through millions of new objects again and again, half of the time.
        gc.disable()
        try:
            for key, split in self.splits.items():
                content = read_annotations(split.ann_file, self.findings)
                if content is not None:
                    images[key] = check_annotations(content, split, self.findings, decode)
        finally:
            gc.enable()
        return images

    def _compare_classes(self, model: dict) -> None:
        first, *others = dict.fromkeys(split.classes for split in self.splits.values()) or [()]
        if first:
            check_num_classes(model, first, self.findings)
        if others:
            self.findings.error(
                f'data sets differ in metainfo.classes ({some(first)} and {some(others[0])}): '
                'expected the same names in the same order in train, val and test'
            )

    def _existing(
        self, split: CocoSplit, images: list[ListedImage], full: bool
    ) -> list[ListedImage]:
        """Return the images to decode: those that exist, or a few spread over them."""
        missing = set(missing_files([image.path for image in images]))
        folder = shorten(split.img_prefix)
        if missing and len(missing) == len({image.path for image in images}):
            self.findings.error(
                f'{shorten(split.ann_file)}: none of its {len(images)} images is in {folder!r}: '
                'correct data_root and data_prefix.img, or file_name in the file',
                min(missing),
            )
            return []
        for path in sorted(missing):
            self.findings.error(
                f'{shorten(split.ann_file)}: images that are not in {folder!r}: put them there or '
                'take them out of the file',
                path,
            )
        existing = [image for image in images if image.path not in missing]
        return existing if full else existing[:: 1 + len(existing) // QUICK_IMAGES]

    def _compare_ground_truths(self, images: dict[tuple, list[ListedImage]]) -> None:
        for key, truth in self.ground_truths:
            known = {image.id for image in images.get(truth, [])}
            unknown = [image.id for image in images.get(key, []) if image.id not in known]
            if known and unknown:
                self.findings.error(
                    f'the evaluator reads {shorten(self.splits[truth].ann_file)}, which lacks '
                    f'{len(unknown)} images of {shorten(self.splits[key].ann_file)}: give both the '
                    'same ann_file',
                    f'image id {unknown[0]}',
                )


def _inspect(file: tuple[str, str, str]) -> ImageInfo | ImageError:
    return inspect_image(*file)


def _loading(split: CocoSplit) -> tuple[str, str]:
    return split.color_type, split.imdecode_backend


def _leaves(dataset: Any, place: str) -> Iterator[tuple[str, dict]]:
    """Yield the data sets inside of wrappers such as ConcatDataset and RepeatDataset."""
    if not isinstance(dataset, dict):
        return
    inner = dataset.get('datasets')
    if inner is None and 'dataset' in dataset:
        yield from _leaves(dataset['dataset'], f'{place}.dataset')
    elif inner is not None:
        for index, item in enumerate(inner):
            yield from _leaves(item, f'{place}.datasets.{index}')
    else:
        yield place, dataset


def _dataset_class(kind: Any, scope: str) -> type | None:
    if not isinstance(kind, str):
        return kind
    if scope == SEGMENTATION:
        from mmseg.registry import DATASETS
    else:
        from mmdet.registry import DATASETS
    found = DATASETS.get(kind)  # a name that is not registered is imported
    return found if isinstance(found, type) else None


def _is_segmentation(kind: type) -> bool:
    from mmseg.datasets import BaseSegDataset

    return issubclass(kind, BaseSegDataset)


def _reads_coco(kind: type) -> bool:
    from mmdet.datasets import CocoDataset

    return (
        issubclass(kind, CocoDataset)
        and kind.load_data_list is CocoDataset.load_data_list
        and kind.parse_data_info is CocoDataset.parse_data_info
    )


def _classes(metainfo: Any, kind: type, place: str, findings: Findings) -> tuple[str, ...] | None:
    """Return the class names as mmengine takes them from a config."""
    metainfo = metainfo or {}
    if 'CLASSES' in metainfo:
        findings.error('metainfo.CLASSES is not read: write metainfo.classes', place)
        return None
    classes = metainfo.get('classes', kind.METAINFO.get('classes'))
    if isinstance(classes, str) and os.path.isfile(classes):
        classes = list_from_file(classes)
    if isinstance(classes, str):
        findings.error(
            f'metainfo.classes={shorten(classes)!r} is a text, expected a tuple of names: write '
            f'({shorten(classes)!r},) with a comma',
            place,
        )
        return None
    if not isinstance(classes, (list, tuple)) or not all(isinstance(c, str) for c in classes):
        findings.error(
            f'metainfo.classes={reprlib.repr(classes)}, expected a tuple of names', place
        )
        return None
    if len(set(classes)) < len(classes):
        repeated = next(name for name in classes if list(classes).count(name) > 1)
        findings.error(f'metainfo.classes names {repeated!r} twice: name each class once', place)
        return None
    return tuple(classes)


def _transforms(pipeline: Any) -> Iterator[dict]:
    """Yield the transforms of a pipeline, those inside of RandomChoice and its like too."""
    if isinstance(pipeline, dict):
        yield pipeline
        yield from _transforms(pipeline.get('transforms'))
    elif isinstance(pipeline, (list, tuple)):
        for transform in pipeline:
            yield from _transforms(transform)


def _scales(transforms: list[dict]) -> Iterator[tuple[int, int]]:
    """Yield each scale to which a pipeline resizes with the ratio kept."""
    for transform in transforms:
        if transform.get('keep_ratio'):
            yield from _pairs(transform.get('scales') or transform.get('scale'))


def _pairs(scales: Any) -> Iterator[tuple[int, int]]:
    """Yield a pair of numbers, or each one in a list."""
    if not isinstance(scales, (list, tuple)):
        return
    if len(scales) == 2 and all(map(_is_side, scales)):
        yield tuple(scales)
    else:
        for scale in scales:
            yield from _pairs(scale)


def _unscoped(value: Any) -> Any:
    """Without the scope that a test's transforms have and others have not."""
    if isinstance(value, dict):
        return {key: _unscoped(item) for key, item in value.items() if key != '_scope_'}
    return [_unscoped(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_side(value: Any) -> bool:
    return isinstance(value, (int, float))


def _coco_metrics(evaluator: Any) -> list[dict]:
    metrics = evaluator if isinstance(evaluator, (list, tuple)) else [evaluator or {}]
    return [
        metric
        for metric in metrics
        if isinstance(metric, dict)
        and _is_type(metric, 'CocoMetric')
        and isinstance(metric.get('ann_file'), str)
        and not metric.get('format_only')
    ]


def _is_type(cfg: dict, name: str) -> bool:
    kind = cfg.get('type')
    return (kind.split('.')[-1] if isinstance(kind, str) else getattr(kind, '__name__', '')) == name


def _is_remote(dataset: dict) -> bool:
    backend = (dataset.get('backend_args') or {}).get('backend', 'local')
    paths = (dataset.get('data_root'), dataset.get('ann_file'))
    return backend != 'local' or any('://' in path for path in paths if isinstance(path, str))


def _joined(dataset: dict, path: str) -> str:
    """Join a path with `data_root` as mmengine's BaseDataset does."""
    data_root = dataset.get('data_root')
    return join_path(data_root, path) if data_root and not is_abs(path) else path


def _same_file(first: str, second: str) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)
