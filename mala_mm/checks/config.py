"""Mistakes in a config, found before anything is built or written.

The model is built on PyTorch's 'meta' device, which has shapes and no values, and its parts are
called there on an image batch: in about a second, without a random number and almost no memory.
"""

import copy
import inspect
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    HOOKS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    TASK_UTILS,
    TRANSFORMS,
    VISBACKENDS,
    VISUALIZERS,
    WEIGHT_INITIALIZERS,
    DefaultScope,
    Registry,
)
from mmengine.utils import is_abs
from torch import Tensor, nn

from mala_mm.checkpoint import CheckpointError, is_pretrained, read_checkpoint, weights_of

from .class_names import class_names_problem, near_misses
from .findings import Findings

TRIAL_SIZE = 256  # pixels: 2x2 at stride 128, so that batch norm has values enough in P7
IOU_METRICS = ('mIoU', 'mDice', 'mFscore')
LAYER_DECAY = ('LearningRateDecayOptimizerConstructor', 'LayerDecayOptimizerConstructor')
LAYER_DECAY_BACKBONES = ('ConvNeXt', 'BEiT', 'MAE')


def check_config(cfg: Config, command: str = 'train', world_size: int = 1) -> Findings:
    """Find what would stop a run, or let it fail in its first evaluation.

    Args:
        cfg (Config): As it goes to the runner; it is not changed.
        command (str): 'train' looks at the settings of training and validation, 'test' at those of
            the test. Defaults to 'train'.
        world_size (int): Number of processes of the run. Defaults to 1.
    """
    findings = Findings()
    parts = ('train', 'val') if command == 'train' else ('test',)
    with _quiet(), DefaultScope.overwrite_default_scope(cfg.get('default_scope')):
        for part in parts:
            _check_part(cfg, part, findings)
        _check_hooks(cfg, findings)
        _check_visualizer(cfg, findings)
        if command == 'train':
            _check_save_best(cfg, findings)
            _check_optimization(cfg, findings)
            _check_init_cfg(cfg.get('model') or {}, findings)
        _check_model(cfg, command, world_size, findings)
    return findings


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what building says: the runner builds everything once more."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(logging.NOTSET)


def _check_part(cfg: Config, part: str, findings: Findings) -> None:
    """One of 'train', 'val' and 'test': its data loader, its loop and its evaluator."""
    partner = 'optim_wrapper' if part == 'train' else f'{part}_evaluator'
    names = [f'{part}_dataloader', f'{part}_cfg', partner]
    missing = [name for name in names if cfg.get(name) is None]
    if len(missing) == len(names) and part == 'val':
        return
    if missing:
        findings.error(
            f'{", ".join(names)} belong together, but {", ".join(missing)} '
            f'{"is" if len(missing) == 1 else "are"} missing: set all of them'
            + (', or all to None' if part == 'val' else '')
        )
        return
    _check_loader(cfg[names[0]], names[0], findings)
    loop = cfg[names[1]]
    if 'type' in loop:
        _check_type(LOOPS, loop, names[1], findings)
    if part != 'train':
        evaluators = cfg[partner].get('metrics') if 'metrics' in cfg[partner] else cfg[partner]
        for where, metric in _listed(evaluators, partner):
            if cls := _check_type(METRICS, metric, where, findings):
                _check_annotations(metric, where, findings)
                _check_iou_metrics(cls, metric, where, findings)


def _check_annotations(metric: dict, where: str, findings: Findings) -> None:
    ann_file = metric.get('ann_file')
    if isinstance(ann_file, str) and _is_local(metric, ann_file) and not os.path.isfile(ann_file):
        findings.error(
            f'{where}.ann_file={ann_file} does not exist: give the annotation file of the '
            'evaluated data set (its data_root is not put before it)'
        )


def _check_iou_metrics(cls: type, metric: dict, where: str, findings: Findings) -> None:
    names = metric.get('iou_metrics', [])
    names = [names] if isinstance(names, str) else names
    unknown = [name for name in names if name not in IOU_METRICS]
    if cls.__name__ == 'IoUMetric' and unknown:
        findings.error(
            f'{where}.iou_metrics names {unknown[0]!r}, at which the first evaluation fails: '
            f'expected {", ".join(IOU_METRICS)}'
        )


def _check_save_best(cfg: Config, findings: Findings) -> None:
    """The keys of one COCO metric are known; another one's are its own affair."""
    wanted = ((cfg.get('default_hooks') or {}).get('checkpoint') or {}).get('save_best') or []
    evaluators = [metric for _, metric in _listed(cfg.get('val_evaluator'), '')]
    metric = evaluators[0] if len(evaluators) == 1 else None
    if not isinstance(metric, dict) or str(metric.get('type')).split('.')[-1] != 'CocoMetric':
        return
    prefix = metric.get('prefix') or 'coco'
    for _, key in _listed(wanted, ''):
        if key != 'auto' and not str(key).startswith(f'{prefix}/'):
            findings.error(
                f'default_hooks.checkpoint.save_best={key!r} is no result of val_evaluator, at '
                f"which the first evaluation fails: expected '{prefix}/bbox_mAP', "
                f"'{prefix}/segm_mAP', ... or 'auto'"
            )


def _check_loader(loader: dict, where: str, findings: Findings) -> None:
    if not loader.get('num_workers') and loader.get('persistent_workers'):
        findings.error(
            f'{where}.persistent_workers=True with num_workers=0, which starts no workers: set '
            f'{where}.persistent_workers=False'
        )
    if not loader.get('num_workers') and loader.get('prefetch_factor'):
        findings.error(
            f'{where}.prefetch_factor={loader.prefetch_factor} with num_workers=0, which starts no '
            f'workers: remove prefetch_factor'
        )
    batch_size = loader.get('batch_size', 1)
    if not isinstance(batch_size, int) or batch_size < 1:
        findings.error(f'{where}.batch_size={batch_size!r}, expected a whole number from 1')
    for name in ('sampler', 'batch_sampler'):
        if isinstance(loader.get(name), dict):
            _check_type(DATA_SAMPLERS, loader[name], f'{where}.{name}', findings)
    if isinstance(loader.get('dataset'), dict):
        for path, dataset in _datasets(loader.dataset, f'{where}.dataset'):
            _check_dataset(dataset, path, findings)
    else:
        findings.error(f'{where}.dataset is missing: expected a dict with a type')


def _datasets(dataset: dict, where: str) -> Iterator[tuple[str, dict]]:
    """A data set and those that it wraps."""
    yield where, dataset
    if isinstance(dataset.get('dataset'), dict):
        yield from _datasets(dataset['dataset'], f'{where}.dataset')
    for i, inner in enumerate(dataset.get('datasets') or ()):
        if isinstance(inner, dict):
            yield from _datasets(inner, f'{where}.datasets.{i}')


def _check_dataset(dataset: dict, where: str, findings: Findings) -> None:
    root = dataset.get('data_root')
    has_data = (
        not root or not _is_local(dataset, root) or os.path.isdir(root) or not _joins(dataset)
    )
    if not has_data:
        findings.error(
            f'data_root={root} is no folder (relative paths count from {os.getcwd()}): set it to '
            'the folder of your data',
            where,
        )
    cls = _check_type(DATASETS, dataset, where, findings, check_arguments=False)
    for place, transform in _listed(dataset.get('pipeline'), f'{where}.pipeline'):
        if isinstance(transform, dict):
            _try_to_build(TRANSFORMS, transform, place, findings)
        elif not callable(transform):
            findings.error(f'{place}={transform!r}, expected a dict with the type of a transform')
    if not (has_data and inspect.isclass(cls) and issubclass(cls, BaseDataset)):
        return
    if problem := class_names_problem(cls, dataset.get('metainfo')):
        findings.error(problem, where)
        return
    bare = dict(dataset, pipeline=[], lazy_init=True)  # annotations are not read
    built = _try_to_build(DATASETS, bare, where, findings)
    if built is not None and not built.metainfo.get('classes'):
        is_trained = where.startswith('train')
        (findings.warning if is_trained else findings.error)(
            f'{where}: a {cls.__name__} without metainfo.classes, which evaluation and checkpoints '
            "name: add metainfo=dict(classes=('first', 'second'))"
        )


def _joins(dataset: dict) -> bool:
    """Whether `data_root` is put before any path of a data set."""
    paths = [dataset.get('ann_file'), *(dataset.get('data_prefix') or {}).values()]
    given = [path for path in paths if path]
    return not given or not all(isinstance(path, str) and is_abs(path) for path in given)


def _check_hooks(cfg: Config, findings: Findings) -> None:
    for name, hook in (cfg.get('default_hooks') or {}).items():
        if hook is not None:
            _check_type(HOOKS, hook, f'default_hooks.{name}', findings)
    for where, hook in _listed(cfg.get('custom_hooks'), 'custom_hooks'):
        if isinstance(hook, str):
            findings.error(
                f'{where} is the text {hook!r}, expected a dict with a type: write custom_hooks in '
                'the config file, --cfg-options cannot add a dict to a list'
            )
        else:
            _check_type(HOOKS, hook, where, findings)


def _check_visualizer(cfg: Config, findings: Findings) -> None:
    visualizer = cfg.get('visualizer')
    if isinstance(visualizer, dict):
        _check_type(VISUALIZERS, visualizer, 'visualizer', findings)
        for where, backend in _listed(visualizer.get('vis_backends'), 'visualizer.vis_backends'):
            _check_type(VISBACKENDS, backend, where, findings)


def _check_optimization(cfg: Config, findings: Findings) -> None:
    wrapper = cfg.get('optim_wrapper') or {}
    if 'type' in wrapper:
        _check_type(OPTIM_WRAPPERS, wrapper, 'optim_wrapper', findings, check_arguments=False)
    if isinstance(wrapper.get('optimizer'), dict):
        _check_type(OPTIMIZERS, wrapper['optimizer'], 'optim_wrapper.optimizer', findings)
    schedulers = cfg.get('param_scheduler')
    if isinstance(schedulers, dict) and 'type' not in schedulers:  # of several optimizers
        groups = {f'param_scheduler.{name}': value for name, value in schedulers.items()}
    else:
        groups = {'param_scheduler': schedulers}
    for name, group in groups.items():
        for where, scheduler in _listed(group, name):
            _check_type(PARAM_SCHEDULERS, scheduler, where, findings)
    if 'constructor' in wrapper:
        _check_constructor(cfg, wrapper['constructor'], findings)


def _check_constructor(cfg: Config, constructor: str | type, findings: Findings) -> None:
    where = 'optim_wrapper.constructor'
    cls = _find(OPTIM_WRAPPER_CONSTRUCTORS, constructor, where, findings)
    backbone = str(((cfg.get('model') or {}).get('backbone') or {}).get('type')).split('.')[-1]
    if getattr(cls, '__name__', '') not in LAYER_DECAY:
        return
    if not any(known in backbone for known in LAYER_DECAY_BACKBONES):
        findings.error(
            f'{where}={cls.__name__} knows the layers of {", ".join(LAYER_DECAY_BACKBONES)} only, '
            f'but the backbone is {backbone}: remove constructor and the decay_rate, decay_type '
            'and num_layers of paramwise_cfg'
        )


def _check_init_cfg(model: dict, findings: Findings, where: str = 'model') -> None:
    """Types and checkpoints of every ``init_cfg`` in the model."""
    for key, value in model.items():
        path = f'{where}.{key}'
        if key == 'init_cfg':
            for place, init_cfg in _listed(value, path):
                if isinstance(init_cfg, str):  # MAViT takes the path alone
                    init_cfg = dict(type='Pretrained', checkpoint=init_cfg)
                _check_initializer(init_cfg, model, place, findings)
        else:
            for place, inner in _listed(value, path):
                if isinstance(inner, dict):
                    _check_init_cfg(inner, findings, place)


def _check_initializer(init_cfg: Any, owner: dict, where: str, findings: Findings) -> None:
    if not isinstance(init_cfg, dict):
        findings.error(f'{where}={init_cfg!r}, expected a dict with a type')
        return
    if not is_pretrained(init_cfg):
        _check_type(WEIGHT_INITIALIZERS, init_cfg, where, findings, check_arguments=False)
        return
    checkpoint = init_cfg.get('checkpoint')
    if not isinstance(checkpoint, str) or not checkpoint:
        findings.error(f'{where}: type Pretrained needs a checkpoint=PATH_OR_URL')
    elif '://' not in checkpoint:
        try:
            if str(owner.get('type')).split('.')[-1] == 'MAViT':
                weights_of(read_checkpoint(checkpoint, map_location='meta'), checkpoint)
            elif not Path(checkpoint).expanduser().is_file():
                findings.error(f'{where}.checkpoint={checkpoint} does not exist')
        except CheckpointError as error:
            findings.error(str(error))


def _check_model(cfg: Config, command: str, world_size: int, findings: Findings) -> None:
    where, model_cfg = 'model', cfg.get('model')
    while isinstance(model_cfg, dict) and 'module' in model_cfg:  # test-time augmentation
        where, model_cfg = f'{where}.module', model_cfg['module']
    if not isinstance(model_cfg, dict):
        findings.error('model is missing: expected a dict with a type')
        return
    model_cfg = copy.deepcopy(model_cfg)
    if cfg.get('data_preprocessor') is not None:
        model_cfg.setdefault('data_preprocessor', copy.deepcopy(cfg['data_preprocessor']))
    try:
        model = _build_model(model_cfg)
    except Exception as error:  # a constructor raises whatever it meets
        where = _place_of(error, model_cfg, where)
        findings.error(f'{where}: {_explain(error, MODELS)}')
        return
    if command == 'test' or cfg.get('val_dataloader'):
        _check_inference(model, where, findings)
    batch_size = 2
    if command == 'train':
        batch_size = (cfg.get('train_dataloader') or {}).get('batch_size', 1)
    model.train(command == 'train')
    if world_size > 1:
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):  # which sees the other processes' values too
                module.eval()
    _Trial(model, where, findings).run(1 if batch_size == 1 else 2)


def _check_inference(model: nn.Module, where: str, findings: Findings) -> None:
    """What mmseg reads of `test_cfg` in its first evaluation."""
    if not hasattr(model, 'slide_inference') or not hasattr(model, 'whole_inference'):
        return
    test_cfg = getattr(model, 'test_cfg', None) or {}
    mode = test_cfg.get('mode')
    if mode not in ('whole', 'slide'):
        findings.error(
            f'{where}.test_cfg.mode={mode!r}, at which the first evaluation fails: expected '
            "'whole' or 'slide'"
        )
    elif missing := [n for n in ('crop_size', 'stride') if mode == 'slide' and n not in test_cfg]:
        findings.error(
            f"{where}.test_cfg.mode='slide' without {' and '.join(missing)}, at which the first "
            'evaluation fails: set crop_size=(HEIGHT, WIDTH) and stride=(HEIGHT, WIDTH)'
        )


def _build_model(model_cfg: dict) -> nn.Module:
    try:
        with torch.device('meta'):
            return MODELS.build(copy.deepcopy(model_cfg))
    except Exception:  # 'meta' has no values, which some models look at
        return MODELS.build(copy.deepcopy(model_cfg))


def _place_of(error: Exception, cfg: dict, where: str) -> str:
    """The innermost part of a model config that raises this error when it is built alone."""
    for key, value in cfg.items():
        for place, inner in _listed(value, f'{where}.{key}'):
            if isinstance(inner, dict) and 'type' in inner:
                try:
                    _build_model(inner)
                except Exception as found:
                    if (type(found), str(found)) == (type(error), str(error)):
                        return _place_of(error, inner, place)
    return where


class _Trial:
    """Calls the parts of a model one after the other.

    A part that does not run is reported only where the reason is known: other models may want
    another call or another device.
    """

    def __init__(self, model: nn.Module, where: str, findings: Findings) -> None:
        self.model = model
        self.where = where
        self.findings = findings

    @torch.no_grad()
    def run(self, batch_size: int) -> None:
        backbone = getattr(self.model, 'backbone', None)
        if backbone is None:
            return
        device = next(self.model.parameters()).device
        images = torch.zeros(batch_size, 3, TRIAL_SIZE, TRIAL_SIZE, device=device)
        maps, source = self.call('backbone', backbone, images), 'backbone'
        neck = getattr(self.model, 'neck', None)
        if neck is not None and maps is not None:
            maps, source = self.call('neck', neck, maps, source), 'neck'
        if not isinstance(maps, Sequence) or not all(map(torch.is_tensor, maps)):
            return
        for name in ('rpn_head', 'bbox_head', 'decode_head', 'auxiliary_head'):
            for place, head in self.parts(name):
                self.call(place, head, maps, source)
        roi_head = getattr(self.model, 'roi_head', None)
        if getattr(roi_head, 'shared_head', None) is not None:  # it lies between
            return
        for kind in ('bbox', 'mask'):
            if getattr(roi_head, f'{kind}_head', None) is not None:
                self.run_roi_heads(kind, maps[0].shape[1], source)

    def run_roi_heads(self, kind: str, channels: int, source: str) -> None:
        """Give a head what its extractor cuts out of the maps."""
        extractors = dict(self.parts(f'roi_head.{kind}_roi_extractor'))
        for place, extractor in extractors.items():
            wanted = getattr(extractor, 'out_channels', channels)
            if wanted != channels:
                self.findings.error(
                    f'{self.where}.{place}.out_channels={wanted} does not fit its input, maps of '
                    f'{channels} channels from {self.where}.{source}: write {channels}'
                )
                return
        heads = list(self.parts(f'roi_head.{kind}_head'))
        for (place, head), extractor in zip(heads, extractors.values(), strict=False):
            layers = getattr(extractor, 'roi_layers', None)
            if layers and hasattr(extractor, 'out_channels'):
                size = layers[0].output_size
                regions = next(self.model.parameters()).new_zeros(2, extractor.out_channels, *size)
                self.call(place, head, regions, next(iter(extractors)))

    def parts(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        part = self.model
        for step in name.split('.'):
            part = getattr(part, step, None)
        if isinstance(part, nn.ModuleList):
            yield from ((f'{name}.{i}', inner) for i, inner in enumerate(part))
        elif isinstance(part, nn.Module):
            yield name, part

    def call(self, name: str, part: nn.Module, inputs: Any, source: str = '') -> Any:
        try:
            return part(inputs)
        except Exception as error:  # what a layer of another width raises depends on the layer
            where = f'{self.where}.{name}'
            if 'Expected more than 1 value per channel' in str(error):
                self.findings.error(
                    f'{where}: batch norm sees one value per channel at train_dataloader.'
                    'batch_size=1 and cannot train: set train_dataloader.batch_size=2'
                )
            elif source and (problem := _misfit(part, inputs)):
                self.findings.error(f'{where}.{problem} from {self.where}.{source}')
        return None


def _misfit(part: nn.Module, inputs: Tensor | Sequence[Tensor]) -> str:
    """What of a part does not fit its inputs; empty where its channels fit."""
    wanted, index = getattr(part, 'in_channels', None), getattr(part, 'in_index', None)
    maps = [inputs] if torch.is_tensor(inputs) else inputs
    channels = [len(one[0]) for one in maps]
    if wanted is None:
        return ''
    if index is not None:
        indices = [index] if isinstance(index, int) else list(index)
        if not all(-len(maps) <= i < len(maps) for i in indices):
            return f'in_index={index} names maps that are not there: expected 0..{len(maps) - 1}'
        channels = [channels[i] for i in indices]
    if isinstance(wanted, int):
        if index is None and wanted in channels:  # such a part takes the map of its choice
            return ''
        is_joined = index is not None and not isinstance(index, int)
        given: int | list[int] = sum(channels) if is_joined else channels[0]
    else:
        wanted, given = list(wanted), channels
    if wanted == given:
        return ''
    return f'in_channels={wanted} does not fit its input: write in_channels={given}, as they come'


def _check_type(
    registry: Registry,
    cfg: Any,
    where: str,
    findings: Findings,
    check_arguments: bool = True,
) -> Any:
    """Return the class that a dict names; None, and a finding, where there is none."""
    if not isinstance(cfg, dict) or 'type' not in cfg:
        findings.error(f'{where}={cfg!r} has no type, expected a dict with a type')
        return None
    cls = _find(registry, cfg['type'], where, findings)
    if cls is not None and check_arguments:
        parameters = inspect.signature(cls).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        accepted = {*parameters, 'type', '_scope_', 'by_epoch', 'convert_to_iter_based', 'priority'}
        for name in [] if takes_any else sorted(cfg.keys() - accepted):
            findings.error(
                f'{where}: {cls.__name__} has no argument {name!r}'
                f'{near_misses(name, parameters)}; remove or correct it'
            )
    return cls


def _find(registry: Registry, kind: Any, where: str, findings: Findings) -> Any:
    cls = kind
    if isinstance(kind, str):
        with registry.switch_scope_and_registry(None) as scoped:
            try:
                cls = scoped.get(kind)
            except Exception:  # a name that is not registered is imported
                cls = None
    if not callable(cls):  # a module, for example
        findings.error(f'{where}: {_unregistered(str(kind), registry)}')
        return None
    return cls


def _try_to_build(registry: Registry, cfg: dict, where: str, findings: Findings) -> Any:
    try:
        return registry.build(copy.deepcopy(cfg))
    except Exception as error:  # a constructor raises whatever it meets
        if "argument 'lazy_init'" not in str(error):
            findings.error(f'{cfg.get("type")}: {_explain(error, registry)}', where)
    return None


def _explain(error: Exception, registry: Registry) -> str:
    is_quoted = isinstance(error, KeyError) and error.args
    text = str(error.args[0] if is_quoted else error)
    if match := re.match(r'(\S+) is not in the \S+::(.+?) registry', text):
        is_task_util = match[2] == TASK_UTILS.name  # parts of heads: assigners, coders, samplers
        return _unregistered(match[1], TASK_UTILS if is_task_util else registry)
    if text and isinstance(error, ValueError | TypeError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f'{type(error).__name__}: {text or frame.line} ({Path(frame.filename).name})'


def _unregistered(name: str, registry: Registry) -> str:
    known: set[str] = set()
    with registry.switch_scope_and_registry(None) as scoped:
        while scoped is not None:
            known.update(scoped.module_dict)
            scoped = scoped.parent
    return (
        f'type {name!r} is not registered{near_misses(name, known)}; a class of your own has to '
        'be imported by custom_imports'
    )


def _listed(value: Any, where: str) -> list[tuple[str, Any]]:
    """The entries of a list with their places; of one value itself; of None none."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [(f'{where}.{i}', entry) for i, entry in enumerate(value)]
    return [(where, value)]


def _is_local(cfg: dict, path: str) -> bool:
    return '://' not in str(path) and not cfg.get('backend_args')
