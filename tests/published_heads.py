"""Names and shapes of everything but the backbone in published detectors and segmentors.

Written down from the sources of mmdet 2 and mmseg 0, with their default sizes, 80 COCO and 150
ADE20K classes:

* open-mmlab/mmdetection: ``mmdet/models/necks/fpn.py``, ``dense_heads/{rpn_head,retina_head}.py``,
  ``roi_heads/bbox_heads/{bbox_head,convfc_bbox_head}.py``, ``roi_heads/cascade_roi_head.py`` (one
  mask head for each of the three stages) and ``roi_heads/mask_heads/fcn_mask_head.py``, as they
  stood from 2.0 on; 2.11 is the release of the authors' configs.
* open-mmlab/mmsegmentation: ``mmseg/models/necks/fpn.py`` and
  ``decode_heads/{decode_head,psp_head,uper_head,fcn_head,fpn_head}.py`` of 0.x.

A ``ConvModule`` of mmcv names its parts ``conv`` and ``bn``; its convolution has a bias only
without a norm. The order of classes in these heads last changed with mmdet 2.0
(``docs/compatibility.md`` there; 2.5 changed RPNs with softmax, these have a sigmoid): the
background is the last row of ``fc_cls``, and ``fc_reg`` and ``conv_logits`` have none.
"""

BATCH_NORM = ('weight', 'bias', 'running_mean', 'running_var')


def layer(name: str, *weight: int) -> dict[str, tuple[int, ...]]:
    """A convolution ``[out, in, k, k]`` or a linear layer ``[out, in]`` with bias."""
    return {f'{name}.weight': weight, f'{name}.bias': weight[:1]}


def conv_bn(name: str, *weight: int) -> dict[str, tuple[int, ...]]:
    norm = {f'{name}.bn.{part}': weight[:1] for part in BATCH_NORM}
    return {f'{name}.conv.weight': weight, **norm, f'{name}.bn.num_batches_tracked': ()}


def merged(*parts: dict) -> dict[str, tuple[int, ...]]:
    return {name: shape for part in parts for name, shape in part.items()}


def fpn(widths: tuple[int, ...], extra: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    laterals = (
        layer(f'neck.lateral_convs.{i}.conv', 256, width, 1, 1) for i, width in enumerate(widths)
    )
    outputs = (256,) * len(widths) + extra
    convs = (layer(f'neck.fpn_convs.{i}.conv', 256, c, 3, 3) for i, c in enumerate(outputs))
    return merged(*laterals, *convs)


RPN = merged(
    layer('rpn_head.rpn_conv', 256, 256, 3, 3),
    layer('rpn_head.rpn_cls', 3, 256, 1, 1),
    layer('rpn_head.rpn_reg', 12, 256, 1, 1),
)


def mask_head(name: str) -> dict[str, tuple[int, ...]]:
    return merged(
        *(layer(f'{name}.convs.{i}.conv', 256, 256, 3, 3) for i in range(4)),
        # a transposed convolution, [in, out, 2, 2]
        layer(f'{name}.upsample', 256, 256, 2, 2),
        layer(f'{name}.conv_logits', 80, 256, 1, 1),
    )


def mask_rcnn(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return merged(
        fpn(widths),
        RPN,
        layer('roi_head.bbox_head.fc_cls', 81, 1024),
        layer('roi_head.bbox_head.fc_reg', 320, 1024),
        layer('roi_head.bbox_head.shared_fcs.0', 1024, 12544),
        layer('roi_head.bbox_head.shared_fcs.1', 1024, 1024),
        mask_head('roi_head.mask_head'),
    )


def cascade_stage(stage: int) -> dict[str, tuple[int, ...]]:
    box = f'roi_head.bbox_head.{stage}'
    return merged(
        layer(f'{box}.fc_cls', 81, 1024),
        layer(f'{box}.fc_reg', 320, 1024),
        *(conv_bn(f'{box}.shared_convs.{i}', 256, 256, 3, 3) for i in range(4)),
        layer(f'{box}.shared_fcs.0', 1024, 12544),
        mask_head(f'roi_head.mask_head.{stage}'),
    )


def cascade_mask_rcnn(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return merged(fpn(widths), RPN, *(cascade_stage(stage) for stage in range(3)))


def retinanet(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The FPN starts at the second output; two more convolutions follow the last one."""
    return merged(
        fpn(widths[1:], extra=(widths[-1], 256)),
        *(
            layer(f'bbox_head.{branch}_convs.{i}.conv', 256, 256, 3, 3)
            for branch in ('cls', 'reg')
            for i in range(4)
        ),
        layer('bbox_head.retina_cls', 720, 256, 3, 3),
        layer('bbox_head.retina_reg', 36, 256, 3, 3),
    )


def upernet(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return merged(
        layer('decode_head.conv_seg', 150, 512, 1, 1),
        *(conv_bn(f'decode_head.psp_modules.{i}.1', 512, widths[3], 1, 1) for i in range(4)),
        conv_bn('decode_head.bottleneck', 512, widths[3] + 4 * 512, 3, 3),
        *(conv_bn(f'decode_head.lateral_convs.{i}', 512, widths[i], 1, 1) for i in range(3)),
        *(conv_bn(f'decode_head.fpn_convs.{i}', 512, 512, 3, 3) for i in range(3)),
        conv_bn('decode_head.fpn_bottleneck', 512, 4 * 512, 3, 3),
        layer('auxiliary_head.conv_seg', 150, 256, 1, 1),
        conv_bn('auxiliary_head.convs.0', 256, widths[2], 3, 3),
    )


def semantic_fpn(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Where a level is upsampled, an Upsample without weights follows each convolution."""
    return merged(
        fpn(widths),
        layer('decode_head.conv_seg', 150, 128, 1, 1),
        conv_bn('decode_head.scale_heads.0.0', 128, 256, 3, 3),
        conv_bn('decode_head.scale_heads.1.0', 128, 256, 3, 3),
        conv_bn('decode_head.scale_heads.2.0', 128, 256, 3, 3),
        conv_bn('decode_head.scale_heads.2.2', 128, 128, 3, 3),
        conv_bn('decode_head.scale_heads.3.0', 128, 256, 3, 3),
        conv_bn('decode_head.scale_heads.3.2', 128, 128, 3, 3),
        conv_bn('decode_head.scale_heads.3.4', 128, 128, 3, 3),
    )
