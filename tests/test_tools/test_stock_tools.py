"""mmdet's and mmseg's own tools run our configs where mmcv's operators are importable before."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ONE_THREAD = {'OMP_NUM_THREADS': '1'}  # two that share a busy machine wait for each other

# A compiled mmcv is simulated: its operator module is there without mala_mm having been imported.
STOCK_TOOL = """
import runpy, sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location('mmcv._ext', sys.argv[1])
ext = sys.modules['mmcv._ext'] = module_from_spec(spec)
spec.loader.exec_module(ext)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.parametrize(
    ('package', 'config', 'checkpoint', 'metrics'),
    [
        ('mmdet', 'tiny_mask_rcnn', 'epoch_1.pth', ['coco/bbox_mAP: ', 'coco/segm_mAP: ']),
        ('mmseg', 'tiny_semfpn', 'iter_8.pth', ['aAcc: ', 'mIoU: ']),
    ],
)
def test_stock_tools(request, root, tmp_path, package, config, checkpoint, metrics):
    config = request.getfixturevalue(config)
    tools = Path(find_spec(package).origin).parent / '.mim' / 'tools'
    script = tmp_path / 'stock_tool.py'
    script.write_text(STOCK_TOOL)

    def run(tool: str, *args: object) -> str:
        command = [sys.executable, script, root / 'mala_mm' / 'mmcv_ext.py', tools / tool, *args]
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'} | ONE_THREAD,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    options = ('--work-dir', 'work')
    if package == 'mmdet':
        options += ('--cfg-options', 'model.test_cfg.rcnn.score_thr=0.0')
    run('train.py', config, *options)
    log = run('test.py', config, tmp_path / 'work' / checkpoint, *options)
    for metric in metrics:
        assert metric in log
