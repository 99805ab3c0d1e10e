"""The torchvision-backed operators, through mmcv's own functions where it has them."""

import itertools
import math

import numpy as np
import pytest
import torch
from mmcv.ops import RoIAlign, batched_nms, nms, sigmoid_focal_loss, soft_nms

BOXES = torch.tensor(
    [
        [0.0, 0.0, 10.0, 10.0],
        [0.0, 0.0, 10.0, 8.0],  # IoU 0.8 with the first
        [0.0, 0.0, 10.0, 5.0],  # IoU 0.5 with the first, 0.625 with the second
        [20.0, 20.0, 30.0, 30.0],  # alone
        [5.0, 5.0, 5.0, 9.0],  # no area
    ]
)
SCORES = torch.tensor([0.9, 0.8, 0.7, 0.95, 0.1])


@pytest.mark.parametrize(
    ('threshold', 'kept'),
    [(0.9, [3, 0, 1, 2, 4]), (0.7, [3, 0, 2, 4]), (0.5, [3, 0, 2, 4]), (0.4, [3, 0, 4])],
)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16])
def test_nms(threshold, kept, dtype):
    dets, indices = nms(BOXES.to(dtype), SCORES.to(dtype), threshold)
    assert indices.tolist() == kept
    assert torch.equal(dets[:, :4], BOXES.to(dtype)[kept])
    assert torch.equal(dets[:, 4], SCORES.to(dtype)[kept])


def test_nms_offset_counts_the_last_pixel():
    # widths 2 and 1 of height 1: IoU 1/2 as corners, 2/3 as last pixels
    boxes = torch.tensor([[0.0, 0.0, 2.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    scores = torch.tensor([0.9, 0.8])
    assert nms(boxes, scores, 0.6, offset=0)[1].tolist() == [0, 1]
    assert nms(boxes, scores, 0.6, offset=1)[1].tolist() == [0]


def test_nms_of_nothing():
    dets, indices = nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
    assert dets.shape == (0, 5)
    assert indices.shape == (0,)


@pytest.mark.parametrize('split_thr', [10000, 1])
def test_batched_nms_keeps_classes_apart(split_thr):
    classes = torch.tensor([0, 1, 0, 0, 0])
    cfg = dict(type='nms', iou_threshold=0.4, split_thr=split_thr)
    dets, kept = batched_nms(BOXES, SCORES, classes, cfg)
    assert kept.tolist() == [3, 0, 1, 4]
    assert torch.equal(dets[:, 4], SCORES[kept])


@pytest.mark.parametrize(
    ('method', 'scores'),
    [
        # the second box has IoU 0.8 with the first, the third 0.5 with the first and 0.625 with
        # the second; linear decay acts from the threshold 0.6 on
        ('naive', [0.95, 0.9, 0.7, 0.1]),
        ('linear', [0.95, 0.9, 0.7, 0.8 * 0.2 * 0.375, 0.1]),
        (
            'gaussian',
            [
                0.95,
                0.9,
                0.7 * math.exp(-0.25 / 0.5),
                0.8 * math.exp(-0.64 / 0.5) * math.exp(-(0.625**2) / 0.5),
                0.1,
            ],
        ),
    ],
)
def test_soft_nms(method, scores):
    dets, indices = soft_nms(BOXES, SCORES, 0.6, sigma=0.5, min_score=1e-3, method=method)
    expected = torch.tensor(sorted(scores, reverse=True))
    torch.testing.assert_close(dets[:, 4], expected)
    assert torch.equal(dets[:, :4], BOXES[indices])


def test_soft_nms_drops_below_min_score():
    indices = soft_nms(BOXES, SCORES, 0.6, min_score=0.1, method='linear')[1]
    assert indices.tolist() == [3, 0, 2, 4]
    assert soft_nms(BOXES[:0], SCORES[:0])[0].shape == (0, 5)


def reference_roi_align(features, rois, size, scale, sampling_ratio, aligned):
    """RoIAlign (He et al., ICCV 2017) by its definition, in float64 and autograd."""
    _, channels, height, width = features.shape

    def at(image, y, x):
        if y < -1 or y > height or x < -1 or x > width:
            return features.new_zeros(channels)
        y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
        y0, x0 = int(y), int(x)
        y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
        dy, dx = y - y0, x - x0
        top = features[image, :, y0, x0] * (1 - dx) + features[image, :, y0, x1] * dx
        bottom = features[image, :, y1, x0] * (1 - dx) + features[image, :, y1, x1] * dx
        return top * (1 - dy) + bottom * dy

    pooled = []
    for image, *corners in rois.tolist():
        x1, y1, x2, y2 = (c * scale - (0.5 if aligned else 0.0) for c in corners)
        roi_width, roi_height = x2 - x1, y2 - y1
        if not aligned:
            roi_width, roi_height = max(roi_width, 1.0), max(roi_height, 1.0)
        bin_width, bin_height = roi_width / size[1], roi_height / size[0]
        nx = sampling_ratio or math.ceil(bin_width)
        ny = sampling_ratio or math.ceil(bin_height)
        for i, j in itertools.product(range(size[0]), range(size[1])):
            samples = [
                at(
                    int(image),
                    y1 + (i + (m + 0.5) / ny) * bin_height,
                    x1 + (j + (n + 0.5) / nx) * bin_width,
                )
                for m, n in itertools.product(range(ny), range(nx))
            ]
            total = sum(samples) if samples else features.new_zeros(channels)
            pooled.append(total / max(nx * ny, 1))
    return torch.stack(pooled).reshape(len(rois), *size, channels).permute(0, 3, 1, 2)


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('sampling_ratio', [0, 2])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_roi_align(aligned, sampling_ratio, dtype):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 9, 13, generator=generator, dtype=torch.float64)
    rois = torch.tensor(
        [
            [0, 4.0, 6.0, 30.0, 22.0],
            [1, 0.0, 0.0, 52.0, 36.0],
            [1, 10.0, 10.0, 10.0, 10.0],  # no area
            [0, -20.0, -20.0, 4.0, 4.0],  # partly outside
            [1, 300.0, 300.0, 340.0, 340.0],  # wholly outside
        ],
        dtype=torch.float64,
    )
    size, scale = (3, 4), 0.25
    truth = features.clone().requires_grad_()
    expected = reference_roi_align(truth, rois, size, scale, sampling_ratio, aligned)
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(gradient)

    actual = features.to(dtype).requires_grad_()
    align = RoIAlign(size, scale, sampling_ratio, aligned=aligned)
    out = align(actual, rois.to(dtype))
    out.backward(gradient.to(dtype))
    tolerance = dict(rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-5)
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(actual.grad.double(), truth.grad, **tolerance)


def test_roi_align_of_a_ramp():
    # on f(y, x) = x with corners as pixel centres, a bin's mean is the x of its centre
    features = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    rois = torch.tensor([[0, 1.0, 1.0, 5.0, 5.0]])
    assert RoIAlign(2, 1.0, 2, aligned=False)(features, rois)[0, 0, 0].tolist() == [2.0, 4.0]
    assert RoIAlign(2, 1.0, 2, aligned=True)(features, rois)[0, 0, 0].tolist() == [1.5, 3.5]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_roi_align_in_half_precision(dtype):
    features = torch.full((1, 2, 8, 8), 3.0, dtype=dtype)
    out = RoIAlign(2, 1.0, 2)(features, torch.tensor([[0, 1.0, 1.0, 5.0, 5.0]], dtype=dtype))
    assert out.dtype == dtype
    assert (out == 3).all()


def test_roi_align_without_rois():
    features = torch.ones(1, 2, 8, 8, requires_grad=True)
    out = RoIAlign(7, 1.0)(features, torch.zeros(0, 5))
    assert out.shape == (0, 2, 7, 7)
    out.sum().backward()
    assert (features.grad == 0).all()


def test_roi_align_max_pooling_is_refused():
    with pytest.raises(NotImplementedError, match="pool_mode='max'"):
        RoIAlign(2, pool_mode='max')(torch.ones(1, 1, 4, 4), torch.tensor([[0, 0.0, 0, 2, 2]]))


def test_sigmoid_focal_loss():
    logits = np.array([[0.3, -1.2], [2.0, 0.5], [-0.7, 40.0]])
    target, alpha, gamma, step = [0, 2, 1], 0.25, 2.0, 1e-5  # class 2 is the background
    weight = np.array([0.5, 2.0])
    factor = np.array([0.5, 1.0, 2.0])[:, None]

    def loss(x):
        p, cross_entropy = 1 / (1 + np.exp(-x)), np.log1p(np.exp(-x))
        is_target = np.array([[t == c for c in range(2)] for t in target])
        hit = alpha * (1 - p) ** gamma * cross_entropy
        miss = (1 - alpha) * p**gamma * (cross_entropy + x)
        return np.where(is_target, hit, miss) * factor

    x = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    out = sigmoid_focal_loss(
        x, torch.tensor(target), gamma, alpha, torch.tensor(weight, dtype=torch.float32), 'none'
    )
    np.testing.assert_allclose(out.detach().numpy(), loss(logits), rtol=1e-4, atol=1e-6)
    out.backward(torch.ones_like(out))
    slope = (loss(logits + step) - loss(logits - step)) / (2 * step)
    np.testing.assert_allclose(x.grad.numpy(), slope, rtol=1e-3, atol=1e-5)


def test_other_ops_are_named_when_called():
    from mmcv.ops import ModulatedDeformConv2dPack  # imports without complaint

    conv = ModulatedDeformConv2dPack(2, 2, kernel_size=3)
    with pytest.raises(
        NotImplementedError, match=r"'modulated_deform_conv_forward'.*compiled mmcv"
    ):
        conv(torch.ones(1, 2, 5, 5))
