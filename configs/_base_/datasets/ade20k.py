_base_ = 'mmseg::_base_/datasets/ade20k.py'

train_dataloader = dict(batch_size=2)
