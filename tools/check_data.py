"""Check the data sets of a config before a training meets their faults.

Prints everything that is wrong, grouped, with file names. Exit code 0: no errors (perhaps
warnings), 1: errors, 2: the command line or the config cannot be used.
"""

import argparse
import os
import sys
from concurrent.futures.process import BrokenProcessPool

import mala_mm  # noqa: F401  prepares current PyTorch for mmengine, mmdet and mmseg
from mala_mm import cli
from mala_mm.checks.data import check_data


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config file')
    cli.add_cfg_options(parser)
    parser.add_argument(
        '--workers',
        type=int,
        default=os.cpu_count(),
        help='processes that decode the images [%(default)s, one for each CPU core]',
    )
    parser.add_argument(
        '--quick',
        action='store_true',
        help='decode only a few images, as training and testing do when they start',
    )
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    try:
        cfg = cli.read_config(args.config, args.cfg_options)
        findings = check_data(cfg, full=not args.quick, workers=args.workers, progress=True)
    except (cli.UsageError, BrokenProcessPool) as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')
    sys.stdout.reconfigure(errors='backslashreplace')  # any file name can be printed
    if str(findings):
        print(findings)
    print(f'{args.config}: {len(findings.errors)} errors, {len(findings.warnings)} warnings')
    return 1 if findings.errors else 0


if __name__ == '__main__':
    sys.exit(main())
