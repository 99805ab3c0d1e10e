_base_ = 'mask_rcnn_3x.py'

# Frees every norm layer of weight decay, the stem's and the box heads' too.
optim_wrapper = dict(paramwise_cfg=dict(norm_decay_mult=0.0))
