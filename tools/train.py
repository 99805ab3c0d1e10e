"""Train a detector or a segmentor, whichever the config describes."""

import argparse

import mala_mm  # noqa: F401  prepares current PyTorch for mmengine, mmdet and mmseg
from mala_mm import cli
from mala_mm.checkpoint import CheckpointError
from mala_mm.engine.interrupts import interruptible


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    cli.add_common_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='auto|CHECKPOINT',
        help='continue from this checkpoint; alone or as "auto", from the newest in the work_dir',
    )
    parser.add_argument('--amp', action='store_true', help='train in mixed precision')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate with the batch size over auto_scale_lr.base_batch_size',
    )
    return parser


@interruptible()
def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    try:
        cfg = cli.load_config(args)
        warnings = []
        if cfg.get('resume') and args.resume is None:
            args.resume = cfg.get('load_from') or 'auto'
        if args.resume is not None:
            warnings += cli.set_resume(cfg, args.resume)
        elif cfg.get('load_from'):
            cli.set_checkpoint(cfg, cfg.load_from)
        if args.amp:
            warnings += cli.set_amp(cfg)
        if args.auto_scale_lr:
            cli.set_auto_scale_lr(cfg)
        if not args.no_check:
            warnings += cli.check(cfg, 'train')
        cli.add_empty_detections_hook(cfg)
        cli.run(cfg, 'train', warnings)
    except (cli.UsageError, CheckpointError) as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')


if __name__ == '__main__':
    main()
