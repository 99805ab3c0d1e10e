_base_ = [
    '_base_/models/upernet_mavit.py',
    '_base_/datasets/ade20k.py',
    '_base_/schedules/upernet_160k.py',
    'mmseg::_base_/default_runtime.py',
]
model = dict(
    backbone=dict(arch='l'),
    decode_head=dict(in_channels=[96, 192, 448, 640]),
    auxiliary_head=dict(in_channels=448),
)
train_dataloader = dict(batch_size=1)
auto_scale_lr = dict(base_batch_size=8)
