_base_ = 'mmdet::_base_/default_runtime.py'

default_hooks = dict(checkpoint=dict(type='mala_mm.ResumableCheckpointHook'))
