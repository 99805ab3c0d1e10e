"""A training of a few numbers, in the working directory: what a run does around its model.

As a script it trains until a signal ends it, with two loader workers.
"""

import sys
from typing import Any

import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from torch import Tensor, nn
from torch.utils.data import Dataset

from mala_mm import cli
from mala_mm.engine.interrupts import interruptible


@MODELS.register_module()
class ToyModel(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: list[Tensor], mode: str = 'loss') -> dict[str, Tensor]:
        return dict(loss=self.linear(torch.stack(x)).square().mean())


@DATASETS.register_module()
class ToyDataset(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(x=torch.tensor([float(index)]))


def toy_config(work_dir: str, iterations: int = 4, workers: int = 0, **changes: Any) -> Config:
    """A checkpoint every two iterations, a line in the log for each."""
    hooks = dict(
        logger=dict(type='LoggerHook', interval=1),
        checkpoint=dict(
            type='mala_mm.ResumableCheckpointHook', by_epoch=False, interval=2, max_keep_ckpts=2
        ),
    )
    cfg = dict(
        default_scope='mmengine',
        work_dir=work_dir,
        launcher='none',
        model=dict(type='ToyModel'),
        train_dataloader=dict(
            batch_size=2,
            num_workers=workers,
            dataset=dict(type='ToyDataset'),
            sampler=dict(type='InfiniteSampler', shuffle=True),
            collate_fn=dict(type='pseudo_collate'),
        ),
        train_cfg=dict(by_epoch=False, max_iters=iterations),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=hooks,
        log_processor=dict(by_epoch=False),
        visualizer=dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')]),
    )
    return Config({**cfg, **changes})


@interruptible()
def train(cfg: Config) -> None:
    cli.run(cfg, 'train', [])


if __name__ == '__main__':
    train(toy_config(sys.argv[1], iterations=10**9, workers=2))
