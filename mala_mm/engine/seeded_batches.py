"""Training batches that depend on the seed and their number alone.

Whatever a transform draws for a batch follows from (seed, rank, epoch, number of the batch). So a
resumed run gets the batches of an uninterrupted one, without loading again what was trained
already, and with any number of workers, persistent or not.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, count, islice, repeat

import torch
from mmengine.dist import broadcast_object_list, get_rank
from mmengine.registry import DATA_SAMPLERS
from mmengine.runner import IterBasedTrainLoop, Runner
from torch.utils.data import BatchSampler, DataLoader

from .generator_states import seeded_generators

KEPT_SETTINGS = (
    'num_workers',
    'collate_fn',
    'pin_memory',
    'timeout',
    'worker_init_fn',
    'multiprocessing_context',
    'prefetch_factor',
    'persistent_workers',
)


class SeededBatch:
    """The indices of one batch. Whoever walks through them draws from seeded generators."""

    def __init__(self, indices: list[int], seed: tuple[int, ...]) -> None:
        self.indices = indices
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        with seeded_generators(*self.seed):
            yield from self.indices


class SeededBatchSampler:
    """The batches of one epoch, those of the first epoch without the first `start` ones."""

    def __init__(
        self,
        batch_sampler: Iterable[list[int]],
        seed: tuple[int, ...],
        first_epoch: int = 0,
        start: int = 0,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = batch_sampler.sampler  # where mmengine's DistSamplerSeedHook looks for it
        self.seed = seed
        self.epoch = self.first_epoch = first_epoch
        self.start = start

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[SeededBatch]:
        start = self.start if self.epoch == self.first_epoch else 0
        return islice(self._batches(self.epoch), start, None)

    def _batches(self, epoch: int) -> Iterator[SeededBatch]:
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(epoch)
        for number, indices in enumerate(self.batch_sampler):
            yield SeededBatch(indices, (*self.seed, epoch, number))


class EndlessSeededBatchSampler(SeededBatchSampler):
    """The batches of all epochs, one after the other, without the first `start` ones."""

    def __iter__(self) -> Iterator[SeededBatch]:
        return islice(chain.from_iterable(map(self._batches, count())), self.start, None)


def seed_training_batches(runner: Runner, epoch_batches: int) -> None:
    """Replace the loader of the training loop by one with seeded batches.

    It starts after the iterations that the runner has behind it.

    Args:
        runner (Runner): A runner whose training is about to start, resumed or not.
        epoch_batches (int): In epoch-based training, how many batches of the current epoch are
            trained already.
    """
    loop, loader = runner.train_loop, runner.train_dataloader
    seed = [runner.seed]
    broadcast_object_list(seed)  # with `diff_rank_seed` each rank has its own
    batch_sampler = _new_batch_sampler(runner, seed[0])
    is_endless = isinstance(loop, IterBasedTrainLoop)
    if is_endless:
        batches = EndlessSeededBatchSampler(batch_sampler, (seed[0], get_rank()), start=loop.iter)
    else:
        batches = SeededBatchSampler(
            batch_sampler, (seed[0], get_rank()), loop.epoch, start=epoch_batches
        )
    loop.dataloader = DataLoader(
        loader.dataset,
        batch_sampler=batches,
        generator=torch.Generator(),  # starting workers would draw from the global one
        **{name: getattr(loader, name) for name in KEPT_SETTINGS},
    )
    if is_endless:
        # On resume the loop throws away as many batches as it has iterations behind it.
        loop.dataloader_iterator = chain(repeat(None, loop.iter), loop.dataloader)


def _new_batch_sampler(runner: Runner, seed: int) -> Iterable[list[int]]:
    """Build the samplers anew: those of the loader have another seed and are read from already."""
    cfg, loader = runner.cfg.train_dataloader, runner.train_dataloader
    sampler = DATA_SAMPLERS.build(cfg.sampler, default_args=dict(dataset=loader.dataset, seed=seed))
    if cfg.get('batch_sampler') is None:
        plain = getattr(loader.batch_sampler, 'batch_sampler', loader.batch_sampler)  # not seeded
        return BatchSampler(sampler, plain.batch_size, plain.drop_last)
    return DATA_SAMPLERS.build(
        cfg.batch_sampler, default_args=dict(sampler=sampler, batch_size=cfg.batch_size)
    )
