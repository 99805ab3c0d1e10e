_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=4e-4, weight_decay=1e-4),
)
