"""Imports and calls that show whether this machine works, one after the other.

Run as a script in a process of its own, since any of them may end it, and by its path, since
mala_mm may be what cannot be imported:

    python machine.py REPORT ROOT FOUND

REPORT is a file. For each step it gets a line of JSON ``[step, null]`` when the step begins and
``[step, result]`` when it ends. ROOT is where mala_mm lies. FOUND is a JSON object of the steps
that were taken already, and what they gave.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module


def call_nms() -> dict:
    """The second box overlaps the first, which scores better, by 9 / 10."""
    from mmcv.ops import nms

    for device in devices():
        boxes = tensor([[0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]], device)
        kept = nms(boxes, tensor([0.9, 0.8, 0.7], device), 0.5)[1].tolist()
        if kept != [0, 2]:
            raise ValueError(f'mmcv.ops.nms on {device} kept boxes {kept}, expected [0, 2]')
    return {}


def call_roi_align() -> dict:
    """On a map that equals x, the mean of a bin is the x of its centre."""
    from mmcv.ops import roi_align

    for device in devices():
        ramp = tensor([[[[float(x) for x in range(8)]] * 8]], device)
        rois = tensor([[0, 2, 2, 6, 6]], device)
        means = roi_align(ramp, rois, (2, 2), 1.0, 2, 'avg', True)[0, 0].tolist()
        if means != [[2.5, 4.5], [2.5, 4.5]]:
            raise ValueError(
                f'mmcv.ops.roi_align on {device} gave {means}, expected [[2.5, 4.5], [2.5, 4.5]]'
            )
    return {}


def tensor(values: list, device: str) -> 'torch.Tensor':  # noqa: F821  it may be missing
    import torch

    return torch.tensor(values, dtype=torch.float32, device=device)


def devices() -> list[str]:
    import torch

    return ['cpu', 'cuda'] if torch.cuda.is_available() else ['cpu']


def find_gpu() -> dict:
    import torch

    driver = driver_version()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        usable = torch.cuda.is_available()
    if usable:
        with suppress(torch.OutOfMemoryError):  # others use it
            torch.ones(1, device='cuda').sum().item()  # fails without a kernel for this GPU
        major, minor = torch.cuda.get_device_capability()
        return dict(
            info=f'{torch.cuda.get_device_name()}, compute capability {major}.{minor}, driver '
            f'{driver or "unknown"}, PyTorch built for CUDA {torch.version.cuda}'
        )
    if driver is None:
        return dict(info='none, everything runs on the CPU')
    if torch.version.cuda is None:
        why = 'this PyTorch is built for the CPU alone: install one built for CUDA'
    else:
        told = str(caught[0].message) if caught else 'PyTorch finds none, see CUDA_VISIBLE_DEVICES'
        why = f'PyTorch built for CUDA {torch.version.cuda} cannot use it: {told}'
    return dict(info='not usable', warning=f'there is a GPU, driver {driver}, but {why}')


def driver_version() -> str | None:
    """The driver's version, None where there is no GPU or no driver."""
    command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.split('\n')[0].strip() or None


def try_triton() -> dict:
    import torch

    from mala_mm.ops.mala import find_triton_obstacle

    if not torch.cuda.is_available():
        return dict(info='not needed without a GPU')
    obstacle = find_triton_obstacle('cuda', torch.float16, 64)
    if obstacle is None:
        return dict(info='works')
    return dict(
        info='not usable',
        warning=f'{obstacle}. MALA takes the slower PyTorch path on the GPU',
    )


def importing(*modules: str) -> Callable[[], dict]:
    def import_all() -> dict:
        for module in modules:
            import_module(module)
        return {}

    return import_all


# What is tried, and what has to work before
STEPS = {
    'numpy': (importing('numpy'), ()),
    'torch': (importing('torch'), ()),
    'torchvision': (importing('torchvision.ops'), ('torch',)),
    'cv2': (importing('cv2'), ('numpy',)),
    'pkg_resources': (importing('pkg_resources'), ()),
    'mmengine': (importing('mmengine.runner'), ('torch', 'cv2')),
    'mmcv': (importing('mmcv'), ('mmengine', 'torchvision')),
    'mala_mm': (importing('mala_mm.models', 'mmcv.ops'), ('mmcv',)),
    'mmdet': (importing('mala_mm', 'mmdet.apis'), ('mala_mm',)),
    'mmseg': (importing('mala_mm', 'mmseg.apis'), ('mala_mm',)),
    'GPU': (find_gpu, ('torch',)),
    'NMS': (call_nms, ('mala_mm',)),
    'RoIAlign': (call_roi_align, ('mala_mm',)),
    'Triton': (try_triton, ('GPU', 'mala_mm')),
}


def main(report: str, root: str, found: dict[str, dict]) -> None:
    """Take the steps that are not in `found`, and note there what they gave."""
    # a script's own folder comes first, and holds modules with names of their own
    sys.path[:] = [*sys.path[1:], root]
    failed = {step for step, result in found.items() if 'error' in result}
    warnings.simplefilter('ignore')
    with open(report, 'a', encoding='utf-8') as file:
        for step, (take, needs) in STEPS.items():
            if failed.intersection(needs):
                failed.add(step)
                continue
            if step in found:
                continue
            print(json.dumps([step, None]), file=file, flush=True)
            try:
                result = take() or {'info': 'works'}
            except BaseException as error:
                text = ' '.join(f'{type(error).__name__}: {error}'.split())
                result = {'error': text}
                failed.add(step)
            print(json.dumps([step, result]), file=file, flush=True)


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
