"""What a run of tools/train.py or tools/test.py has logged below its work_dir."""

import json
from pathlib import Path


def logged_metrics(work_dir: Path) -> dict:
    """The metrics of the newest test."""
    return json.loads(_newest(work_dir, '[0-9]*/[0-9]*.json').read_text())


def logged_steps(work_dir: Path) -> list[int]:
    """The iterations of the newest training."""
    lines = _newest(work_dir, '[0-9]*/vis_data/scalars.json').read_text().splitlines()
    return [entry['step'] for entry in map(json.loads, lines) if 'loss' in entry]


def _newest(work_dir: Path, pattern: str) -> Path:
    return max(work_dir.glob(pattern), key=lambda path: path.stat().st_mtime)
