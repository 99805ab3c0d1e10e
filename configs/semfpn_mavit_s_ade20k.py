_base_ = [
    '_base_/models/semfpn_mavit.py',
    '_base_/datasets/ade20k.py',
    '_base_/schedules/semfpn_80k.py',
    'mmseg::_base_/default_runtime.py',
]
model = dict(backbone=dict(arch='s'), neck=dict(in_channels=[64, 128, 320, 512]))
