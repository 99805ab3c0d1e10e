"""Evaluate a checkpoint of a detector or a segmentor, whichever the config describes."""

import argparse

import mala_mm  # noqa: F401  prepares current PyTorch for mmengine, mmdet and mmseg
from mala_mm import cli
from mala_mm.checkpoint import CheckpointError
from mala_mm.engine.interrupts import interruptible


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    cli.add_common_arguments(parser)
    parser.add_argument(
        '--out',
        metavar='FILE.pkl|DIR',
        help='write the predictions: detection one pickle file, segmentation a PNG per image',
    )
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR', help='draw the predictions into DIR')
    parser.add_argument(
        '--wait-time', type=float, default=2.0, help='seconds that --show waits per image [2]'
    )
    parser.add_argument(
        '--tta', action='store_true', help='test-time augmentation (segmentation, boxes)'
    )
    return parser


@interruptible()
def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    try:
        cfg = cli.load_config(args)
        cli.set_checkpoint(cfg, args.checkpoint)
        if args.out:
            cli.set_out(cfg, args.out)
        if args.show or args.show_dir:
            cli.set_show(cfg, args.show, args.show_dir, args.wait_time)
        if args.tta:
            cli.set_tta(cfg)
        warnings = [] if args.no_check else cli.check(cfg, 'test')
        cli.add_empty_detections_hook(cfg)
        cli.run(cfg, 'test', warnings)
    except (cli.UsageError, CheckpointError) as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')


if __name__ == '__main__':
    main()
