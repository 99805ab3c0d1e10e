_base_ = [
    '_base_/models/upernet_mavit.py',
    '_base_/datasets/ade20k.py',
    '_base_/schedules/upernet_160k.py',
    'mmseg::_base_/default_runtime.py',
]
model = dict(
    backbone=dict(arch='t'),
    decode_head=dict(in_channels=[64, 128, 256, 512]),
    auxiliary_head=dict(in_channels=256),
)
