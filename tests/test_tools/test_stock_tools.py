"""mmdet's own tools run our configs where mmcv's operators exist before mmdet is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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


def test_mmdet_tools(root, tiny_mask_rcnn, tmp_path):
    tools = Path(find_spec('mmdet').origin).parent / '.mim' / 'tools'
    script = tmp_path / 'stock_tool.py'
    script.write_text(STOCK_TOOL)

    def run(tool: str, *args: object) -> str:
        command = [sys.executable, script, root / 'mala_mm' / 'mmcv_ext.py', tools / tool, *args]
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    threshold = ('--cfg-options', 'model.test_cfg.rcnn.score_thr=0.0')
    run('train.py', tiny_mask_rcnn, '--work-dir', 'work', *threshold)
    log = run('test.py', tiny_mask_rcnn, tmp_path / 'work' / 'epoch_1.pth', *threshold)
    assert 'coco/bbox_mAP: ' in log
    assert 'coco/segm_mAP: ' in log
