"""Draw a data set, train Mask R-CNN with MAViT-T on it and evaluate it on held-out images.

Starts over when it was interrupted; only complete data is used again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mala_mm

CONFIG = mala_mm.config_path('demo_mask_rcnn_mavit_t.py')
IMAGES = ('--train', '240', '--val', '40')


def run_tool(name: str, work_dir: Path, *arguments: str | Path) -> None:
    """Run a script of this folder in `work_dir`, its output shown as it comes.

    Raises:
        SystemExit: with its exit code, where it fails.
    """
    command = [sys.executable, Path(__file__).absolute().with_name(name), *arguments]
    # Threads that wait by spinning slow training down several times where other programs run.
    env = {'OMP_WAIT_POLICY': 'PASSIVE', **os.environ}
    process = subprocess.run(command, cwd=work_dir, env=env)
    if process.returncode:
        print(f'{name} failed, see above', file=sys.stderr)
        sys.exit(process.returncode)


def train(work_dir: Path) -> Path:
    """Train on the data drawn in `work_dir`/data. Returns the checkpoint."""
    run_tool('train.py', work_dir, CONFIG, '--work-dir', 'train')
    return Path((work_dir / 'train' / 'last_checkpoint').read_text())


def evaluate(checkpoint: Path, work_dir: Path) -> dict[str, float]:
    """Evaluate on the held-out images in `work_dir`/data, draw them in `work_dir`/pictures.

    Returns mmdet's metrics, `coco/segm_mAP_50` and so on, in 0..1.
    """
    options = ('--work-dir', 'test', '--show-dir', 'pictures')
    run_tool('test.py', work_dir, CONFIG, checkpoint.absolute(), *options)
    newest = max(work_dir.glob('test/*/*.json'), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--work-dir', type=Path, default='work_dirs/demo', help='[work_dirs/demo]')
    work_dir = parser.parse_args().work_dir.absolute()
    work_dir.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    print('demo 1/3: drawing the data', flush=True)
    run_tool('make_demo_data.py', work_dir, 'data', *IMAGES)
    print('demo 2/3: training, a few minutes on two CPU cores; "eta" is the time left', flush=True)
    checkpoint = train(work_dir)
    print('demo 3/3: evaluating on the held-out images', flush=True)
    metrics = evaluate(checkpoint, work_dir)

    print(f'\nheld-out images   {"AP":>6} {"AP50":>6}')
    for name, key in (('box', 'bbox'), ('mask', 'segm')):
        print(f'{name:15}   {metrics[f"coco/{key}_mAP"]:6.3f} {metrics[f"coco/{key}_mAP_50"]:6.3f}')
    print(f'pictures (left: ground truth, right: prediction): {work_dir / "pictures"}')
    print(f'checkpoint: {checkpoint}')
    print(f'{(time.monotonic() - start) / 60:.1f} minutes in all')


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('interrupted: run it again to start over')
