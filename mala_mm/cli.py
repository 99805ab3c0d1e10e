"""How the command lines of tools/train.py and tools/test.py change a config.

The functions change the config in place and raise `UsageError` for a user's mistake. Some return
warnings, which `run` logs once the runner has opened the log file.
"""

import argparse
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict, DictAction
from mmengine.device import get_device

from .checkpoint import CheckpointError, is_pretrained, read_checkpoint, weights_of
from .resume import (
    check_training_checkpoint,
    how_to_continue,
    last_saved,
    newest_training_checkpoint,
)

DETECTION, SEGMENTATION = 'mmdet', 'mmseg'
RANK_AND_SIZE = dict(  # environment variables that a launcher sets
    pytorch=('RANK', 'WORLD_SIZE'),
    slurm=('SLURM_PROCID', 'SLURM_NTASKS'),
    mpi=('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'),
)


PARTS = ('train', 'val', 'test')
BUILD_ERRORS = (
    *(AssertionError, AttributeError, ImportError, KeyError),
    *(OSError, TypeError, ValueError),
)
DICTS = (  # what has to be a dict in a config, where it is there
    *('model', 'model.backbone', 'model.roi_head', 'model.data_preprocessor', 'optim_wrapper'),
    *('optim_wrapper.optimizer', 'default_hooks', 'default_hooks.visualization', 'visualizer'),
    *(f'{part}_{name}' for part in PARTS for name in ('cfg', 'dataloader', 'dataloader.dataset')),
)


class UsageError(ValueError):
    """A mistake of the command line's user, told in one line."""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that training and testing share."""
    parser.add_argument('--work-dir', help='directory of logs and checkpoints [./work_dirs/CONFIG]')
    add_cfg_options(parser)
    parser.add_argument(
        '--no-check', action='store_true', help='skip the checks of config, data and environment'
    )
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument(
        '--local-rank', '--local_rank', type=int, default=0, help='set by the launcher'
    )


def add_cfg_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that changes the config."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        type=_key_value,
        action=DictAction,
        metavar='KEY=VALUE',
        help='settings to change in the config, such as train_dataloader.batch_size=4 '
        'train_dataloader.dataset.pipeline.2.scale="(800,480)"',
    )


def read_config(config: str, cfg_options: dict | None = None) -> Config:
    """Return the config of a detector or a segmentor, with `cfg_options` merged into it.

    Raises:
        UsageError: the file or one of its bases does not exist or is no config, an option does
            not fit it, its `default_scope` is neither 'mmdet' nor 'mmseg', or its model names
            pretrained weights where they would not be checked.
    """
    try:
        cfg = Config.fromfile(config)
    except Exception as error:  # a config is code
        raise UsageError(f'config {config} cannot be read: {_reason(error)}') from None
    try:
        cfg.merge_from_dict(cfg_options or {})
    except Exception as error:  # mmengine raises what it meets
        raise UsageError(f'--cfg-options do not fit {config}: {_reason(error)}') from None
    scope = cfg.get('default_scope')
    if scope not in (DETECTION, SEGMENTATION):
        raise UsageError(
            f"config {config}: expected default_scope 'mmdet' (detection) or 'mmseg' "
            f'(segmentation), got {scope!r}'
        )
    try:
        import_module(f'{scope}.registry')
    except Exception as error:  # later its types would merely be unknown
        raise UsageError(
            f'{scope} cannot be imported, {_reason(error)}: tools/doctor.py says what mends it'
        ) from None
    _require_dicts(cfg, config)
    _set_pretrained(cfg.get('model') or {})
    return cfg


def load_config(args: argparse.Namespace) -> Config:
    """Return the config that `config`, `cfg_options`, `work_dir` and `launcher` describe.

    Raises:
        UsageError: as of `read_config`, or a launcher is asked for on a machine without GPU.
    """
    cfg = read_config(args.config, args.cfg_options)
    if args.launcher != 'none' and get_device() == 'cpu':
        raise UsageError(f'--launcher {args.launcher} needs GPUs, but this machine has none')
    cfg.launcher = args.launcher
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or f'./work_dirs/{Path(args.config).stem}'
    return cfg


def set_checkpoint(cfg: Config, checkpoint: str) -> None:
    """Load `checkpoint` (a path, or a URL that mmengine knows) before the run starts."""
    if '://' not in checkpoint:
        # before anything else is built
        weights_of(read_checkpoint(checkpoint, map_location='meta'), checkpoint)
    cfg.load_from = checkpoint
    cfg.resume = False


def set_resume(cfg: Config, resume: str) -> list[str]:
    """Continue from the checkpoint `resume`, or for 'auto' from the newest one in the work_dir.

    'auto' passes over damaged files. Where it finds no checkpoint, the config stays as it is (its
    `load_from` included).
    """
    warnings = []
    if not resume:
        raise UsageError("--resume got an empty name, expected a checkpoint or 'auto'")
    if resume == 'auto':
        resume, warnings = newest_training_checkpoint(cfg.work_dir)
        if resume is None:
            fresh = f'--resume auto: no checkpoint in {cfg.work_dir}, training starts fresh.'
            return [*warnings, fresh]
    elif '://' not in resume:
        check_training_checkpoint(resume)
    cfg.load_from = resume
    cfg.resume = True
    return warnings


def set_amp(cfg: Config) -> list[str]:
    """Train in mixed precision with dynamic loss scaling."""
    if get_device() in ('cpu', 'mps'):
        raise UsageError(f'--amp needs a GPU, but this machine trains on {get_device()}')
    wrapper = _type_name(cfg.optim_wrapper, default='OptimWrapper')
    if wrapper == 'AmpOptimWrapper':
        return ['--amp: the config sets AmpOptimWrapper already, which stays as it is.']
    if wrapper != 'OptimWrapper':
        raise UsageError(f'--amp replaces optim_wrapper.type OptimWrapper, but found {wrapper}')
    cfg.optim_wrapper.update(type='AmpOptimWrapper', loss_scale='dynamic')
    return []


def set_auto_scale_lr(cfg: Config) -> None:
    """Scale the learning rate with the batch size over `auto_scale_lr.base_batch_size`."""
    if not (cfg.get('auto_scale_lr') or {}).get('base_batch_size'):
        raise UsageError('--auto-scale-lr needs auto_scale_lr.base_batch_size in the config')
    cfg.auto_scale_lr.enable = True


def set_out(cfg: Config, out: str) -> None:
    """Write the predictions: detection one pickle file, segmentation a directory of PNG files."""
    evaluator = cfg.get('test_evaluator') or []
    metrics = list(evaluator) if isinstance(evaluator, (list, tuple)) else [evaluator]
    is_pickle = out.endswith(('.pkl', '.pickle'))
    if cfg.default_scope == DETECTION:
        if not is_pickle:
            raise UsageError(f'--out {out}: detection writes one file, expected NAME.pkl')
        if os.path.isdir(out):
            raise UsageError(f'--out {out} is a folder, expected a file')
        require_writable_folder('--out', os.path.dirname(os.path.abspath(out)))
        cfg.test_evaluator = [*metrics, dict(type='DumpDetResults', out_file_path=out)]
        return
    if is_pickle or Path(out).is_file():
        raise UsageError(f'--out {out}: segmentation writes a PNG per image, expected a directory')
    require_writable_folder('--out', out)
    iou_metrics = [metric for metric in metrics if _type_name(metric) == 'IoUMetric']
    if not iou_metrics:
        raise UsageError('--out needs IoUMetric in the test_evaluator of a segmentation config')
    for metric in iou_metrics:
        metric.output_dir = out


def set_show(cfg: Config, show: bool, show_dir: str | None, wait_time: float) -> None:
    """Draw every test image with its predictions, in a window or into `show_dir`.

    Detection writes `show_dir/NAME`, segmentation `show_dir/vis_data/vis_image/test_NAME_0.png`.
    """
    hook = (cfg.get('default_hooks') or {}).get('visualization')
    if not hook:
        raise UsageError(
            '--show and --show-dir need a default_hooks.visualization in the config '
            '(DetVisualizationHook or SegVisualizationHook)'
        )
    if show_dir:
        require_writable_folder('--show-dir', show_dir)
    hook.update(draw=True, show=show, wait_time=wait_time)
    if cfg.default_scope == DETECTION:
        # mmdet would put a relative path below work_dir/TIMESTAMP.
        hook.test_out_dir = show_dir and os.path.abspath(show_dir)
        return
    if show and show_dir:
        raise UsageError('give --show or --show-dir: segmentation cannot do both in one run')
    hook.interval = 1
    if show_dir:
        if not cfg.get('visualizer'):
            raise UsageError('--show-dir needs a visualizer in a segmentation config')
        cfg.visualizer.save_dir = show_dir


def set_tta(cfg: Config) -> None:
    """Wrap the model for test-time augmentation: the config's own, or flips for a box detector."""
    dataset = (cfg.get('test_dataloader') or {}).get('dataset') or {}
    while 'dataset' in dataset:
        dataset = dataset.dataset
    has_masks = cfg.model.get('mask_head') or (cfg.model.get('roi_head') or {}).get('mask_head')
    if cfg.default_scope == DETECTION and has_masks:
        raise UsageError(
            '--tta: mmdet cannot merge the masks of augmented images; leave --tta out or test a '
            'detector without masks, such as RetinaNet'
        )
    if not dataset.get('pipeline'):
        raise UsageError('--tta needs one data set with a pipeline in test_dataloader')
    if cfg.default_scope == DETECTION:
        if not cfg.get('tta_model'):
            nms = dict(type='nms', iou_threshold=0.5)
            cfg.tta_model = dict(type='DetTTAModel', tta_cfg=dict(nms=nms, max_per_img=100))
        if not cfg.get('tta_pipeline'):
            cfg.tta_pipeline = _with_flips(dataset.pipeline)
    elif not (cfg.get('tta_model') and cfg.get('tta_pipeline')):
        raise UsageError('--tta needs tta_model and tta_pipeline in a segmentation config')
    dataset.pipeline = cfg.tta_pipeline
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)


def check(cfg: Config, command: str) -> list[str]:
    """Check what `command`, 'train' or 'test', is about to use; return the warnings.

    In a distributed run the first process does: the launcher ends the others with it.

    Raises:
        UsageError: with all errors that were found, each in a line with its places below it.
    """
    from .checks.config import check_config
    from .checks.data import check_data
    from .checks.environment import check_environment

    rank, world_size = (
        int(os.environ.get(name, default))
        for name, default in zip(RANK_AND_SIZE.get(cfg.launcher, ('', '')), '01', strict=True)
    )
    if rank > 0:
        return []
    findings = check_config(cfg, command, world_size)
    told = [text for error in findings.errors for text in (error.message, *error.places)]
    splits = [
        split
        for split in (('train', 'val') if command == 'train' else ('test',))
        # what is wrong with the setting would be found once more in the data
        if not any(f'{split}_{part}' in text for text in told for part in ('data', 'eval'))
    ]
    findings.extend(check_data(cfg, full=False, splits=splits))
    findings.extend(check_environment(brief=True))
    warnings = [str(warning).removeprefix('warning: ') for warning in findings.warnings]
    if findings.errors:
        for warning in findings.warnings:
            print(warning, file=sys.stderr)
        errors = '\n'.join(map(str, findings.errors))
        raise UsageError(errors.removeprefix('error: '))
    return warnings


def add_empty_detections_hook(cfg: Config) -> None:
    """Let a detection run report 0.0 where mmdet reports nothing (see EmptyDetectionsHook)."""
    hook = dict(type='mala_mm.EmptyDetectionsHook')
    hooks = list(cfg.get('custom_hooks') or [])
    if cfg.default_scope == DETECTION and hook not in hooks:
        cfg.custom_hooks = [*hooks, hook]


def run(cfg: Config, command: str, warnings: list[str]) -> None:
    """Build the runner of `cfg`, log the warnings and run `command`, 'train' or 'test'.

    Raises:
        UsageError: the work_dir cannot be written to, the runner cannot be built, or the disk is
            full.
        Interrupted: with the command that continues a training.
    """
    from .engine.interrupts import interruption_behind
    from .engine.whole_file import FULL_DISK

    require_writable_folder('--work-dir', cfg.work_dir)
    saved_before = last_saved(cfg.work_dir)
    runner = _build_runner(cfg)
    if command == 'test':
        # mmseg's drawing hook asks for runner.iter, which would build the training data.
        runner._train_loop = None
    for warning in warnings:
        runner.logger.warning(warning)
    try:
        getattr(runner, command)()
    except BaseException as error:
        ending = how_to_continue(cfg, saved_before) if command == 'train' else ''
        if interruption := interruption_behind(error):
            if command == 'train':
                interruption.message = f'interrupted after iteration {runner.iter}, {ending}'
            raise interruption from None
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            place = error.filename or f'{cfg.work_dir} or the folder of temporary files'
            raise UsageError(f'{error.strerror}: {place}; make room. {ending}') from error
        if isinstance(error, BUILD_ERRORS) and not runner.has_started:
            raise _unbuildable(error) from None
        raise


def require_writable_folder(option: str, folder: str) -> None:
    """Raise UsageError where `folder` could not be made or written to."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise UsageError(f'{option} {folder}: {path} is no folder, name another one or remove it')
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f'{option} {folder}: no permission to write to {path}, name another one')


def _build_runner(cfg: Config) -> Any:
    from .engine import Runner

    try:
        return Runner.from_cfg(cfg)
    except BUILD_ERRORS as error:
        raise _unbuildable(error) from None


def _unbuildable(error: Exception) -> Exception:
    if os.environ.get('MALA_MM_TRACEBACK') or isinstance(error, CheckpointError):
        return error
    reason = ' '.join(str(error.args[0] if len(error.args) == 1 else error).split())
    return UsageError(
        f'the runner cannot be built from this config: {type(error).__name__}: '
        f'{reason[:160]}; with MALA_MM_TRACEBACK=1 set, the traceback is shown'
    )


def _key_value(text: str) -> str:
    if '=' not in text:
        raise argparse.ArgumentTypeError(f'expected KEY=VALUE, got {text!r}')
    return text


def _reason(error: Exception) -> str:
    """In one line, with the file and line if a config or a module that it imports raised it."""
    # mmengine's own text of an import has many lines
    while isinstance(error, ImportError) and (inner := error.__cause__ or error.__context__):
        error = inner
    text = ' '.join(str(error.args[0] if isinstance(error, KeyError) else error).split())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if frame.name == '<module>':
        place = f'{os.path.basename(frame.filename)}, line {frame.lineno}'
        return f'{type(error).__name__}: {text[:120]} ({place})'
    return text[:220]


def _require_dicts(cfg: Config, config: str) -> None:
    for name in DICTS:
        value: Any = cfg
        for step in name.split('.'):
            value = value.get(step) if value else None
        if value is not None and not isinstance(value, dict):
            raise UsageError(f'config {config}: {name} is {repr(value)[:60]}, expected a dict')


def _set_pretrained(model: dict) -> None:
    """Write `pretrained`, mmdet 2's habit, as the `init_cfg` of a MAViT, the only checked place."""
    backbone = model.get('backbone') or {}
    if _type_name(backbone) != 'MAViT':
        return
    init_cfg = model.get('init_cfg') or []
    if any(map(is_pretrained, [init_cfg] if isinstance(init_cfg, dict) else init_cfg)):
        raise UsageError(
            'model.init_cfg would load without a check: write load_from=CHECKPOINT for a whole '
            'model, model.backbone.init_cfg for its backbone'
        )
    for owner in (model, backbone):
        checkpoint = owner.pop('pretrained', None)
        if checkpoint and backbone.get('init_cfg'):
            raise UsageError(
                f'pretrained={checkpoint} stands beside model.backbone.init_cfg, give one of them'
            )
        if checkpoint:
            backbone['init_cfg'] = dict(type='Pretrained', checkpoint=checkpoint)


def _type_name(cfg: Any, default: str | None = None) -> str | None:
    kind: Any = cfg.get('type', default) if isinstance(cfg, dict) else None
    return kind.split('.')[-1] if isinstance(kind, str) else getattr(kind, '__name__', kind)


def _with_flips(pipeline: list[dict]) -> list[dict]:
    """Replace the last transform, PackDetInputs, by a plain and a flipped copy of the image."""
    *loading, pack = pipeline
    pack = dict(pack)
    if 'meta_keys' in pack:
        pack['meta_keys'] = (*pack['meta_keys'], 'flip', 'flip_direction')
    flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
    return [*loading, dict(type='TestTimeAug', transforms=[flips, [pack]])]
