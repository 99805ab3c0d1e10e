"""mmcv's compiled operators on top of torchvision, for mmcv-lite.

Stands in for ``mmcv._ext``: the functions have the names, arguments and in-place outputs that
mmcv's Python code expects. Operators that torchvision has no counterpart for raise an error that
names them when they are called, not when mmcv is imported.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the boxes that non-maximum suppression keeps, best score first.

    Args:
        boxes (Tensor): ``[N, 4]`` as x1, y1, x2, y2.
        scores (Tensor): ``[N]``.
        iou_threshold (float): A box whose IoU with a kept one is greater is dropped.
        offset (int): 0, or 1 where x2 and y2 are the last pixels inside (width x2 - x1 + 1).
    """
    from torchvision.ops import nms as torchvision_nms

    # moving the far corner by one pixel gives every width, height and overlap its `+ offset`
    boxes = boxes.float() + boxes.new_tensor([0, 0, offset, offset], dtype=torch.float32)
    return torchvision_nms(boxes, scores.float(), iou_threshold)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Soft-NMS (Bodla et al., ICCV 2017): overlapping boxes lose score instead of being dropped.

    Args:
        boxes (Tensor): ``[N, 4]`` on the CPU.
        scores (Tensor): ``[N]``.
        dets (Tensor): ``[N, 5]``, filled in place: the kept boxes with their new scores.
        iou_threshold (float): Overlap from which methods 0 and 1 act.
        sigma (float): Width of method 2.
        min_score (float): Boxes whose score falls below are dropped.
        method (int): 0 drops (plain NMS), 1 multiplies by 1 - IoU, 2 by exp(-IoU^2 / sigma).
        offset (int): As in :func:`nms`.

    Returns:
        Tensor: Indices of the kept boxes, in the order of ``dets``.
    """
    from torchvision.ops import box_iou

    corners = boxes + boxes.new_tensor([0, 0, offset, offset])
    scores = scores.clone()
    left = torch.arange(len(boxes))
    kept = []
    while len(left):
        best = left[scores[left].argmax()]
        dets[len(kept), :4] = boxes[best]
        dets[len(kept), 4] = scores[best]
        kept.append(best)
        left = left[left != best]
        overlap = box_iou(corners[best, None], corners[left])[0]
        if method == 2:
            scores[left] *= torch.exp(-(overlap**2) / sigma)
        else:
            decay = 1 - overlap if method == 1 else torch.zeros_like(overlap)
            scores[left] *= torch.where(overlap >= iou_threshold, decay, 1)
        left = left[scores[left] >= min_score]
    return torch.tensor(kept, dtype=torch.int64)


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """RoIAlign with average pooling (``pool_mode=1``).

    Args:
        input (Tensor): ``[B, C, H, W]``.
        rois (Tensor): ``[R, 5]`` as batch index, x1, y1, x2, y2.
        output (Tensor): ``[R, C, aligned_height, aligned_width]``, filled in place.
    """
    _require_average_pooling(pool_mode)
    dtype = _roi_align_dtype(input)
    output.copy_(
        _torchvision_op('roi_align')(
            input.to(dtype),
            rois.to(dtype),
            spatial_scale,
            aligned_height,
            aligned_width,
            sampling_ratio,
            aligned,
        )
    )


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Gradient of :func:`roi_align_forward`; fills ``grad_input`` ``[B, C, H, W]`` in place."""
    _require_average_pooling(pool_mode)
    dtype = _roi_align_dtype(grad_output)
    grad_input.copy_(
        _torchvision_op('_roi_align_backward')(
            grad_output.to(dtype),
            rois.to(dtype),
            spatial_scale,
            aligned_height,
            aligned_width,
            *grad_input.shape,
            sampling_ratio,
            aligned,
        )
    )


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Focal loss (Lin et al., ICCV 2017) of each class score.

    Args:
        input (Tensor): Logits ``[N, C]``.
        target (Tensor): Class indices ``[N]``; ``C`` is the background.
        weight (Tensor): Weight of each class, or empty.
        output (Tensor): ``[N, C]``, filled in place.
    """
    output.copy_(_sigmoid_focal_loss(input, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of each loss value by its own logit; fills ``grad_input`` in place."""
    with torch.enable_grad():
        logits = input.detach().requires_grad_()
        loss = _sigmoid_focal_loss(logits, target, weight, gamma, alpha).sum()
    grad_input.copy_(torch.autograd.grad(loss, logits)[0])


def get_compiler_version() -> str:
    return 'none: torchvision operators'


def get_compiling_cuda_version() -> str:
    return 'none: torchvision operators'


def __getattr__(name: str) -> Callable:
    if name.startswith('__'):
        raise AttributeError(name)

    def missing_op(*args, **kwargs):
        raise NotImplementedError(
            f'mmcv operator {name!r} is not in mmcv-lite and has no torchvision counterpart: '
            'it needs a compiled mmcv >=2.0.1,<2.2 (https://mmcv.readthedocs.io)'
        )

    return missing_op


def _torchvision_op(name: str) -> Callable:
    import torchvision  # noqa: F401 - registers torch.ops.torchvision

    return getattr(torch.ops.torchvision, name)


def _require_average_pooling(pool_mode: int) -> None:
    if pool_mode != 1:
        raise NotImplementedError(
            "RoIAlign with pool_mode='max' is not in torchvision: use pool_mode='avg', or a "
            'compiled mmcv >=2.0.1,<2.2'
        )


def _roi_align_dtype(features: Tensor) -> torch.dtype:
    """float64 stays; all else computes in float32, which every torchvision build supports."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def _sigmoid_focal_loss(
    input: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float
) -> Tensor:
    from torchvision.ops import sigmoid_focal_loss

    num_classes = input.shape[1]
    one_hot = torch.nn.functional.one_hot(target.long(), num_classes + 1)[:, :num_classes]
    loss = sigmoid_focal_loss(input.float(), one_hot.float(), alpha, gamma)
    if weight.numel():
        loss = loss * torch.cat([weight, weight.new_ones(1)])[target.long(), None]
    return loss
