"""Where a training's data continue, on hand-made indices."""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader

from mala_mm.engine.seeded_batches import SeededBatchSampler, seed_training_batches

SEED = 3


class Dataset:
    """Five items: their index and a random number."""

    def __init__(self) -> None:
        self.asked = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.asked.append(index)
        return index, torch.rand(()).item()


def runner(sampler: type, is_endless: bool, iteration: int = 0, epoch: int = 0, **loader: object):
    """A runner before its training, whose loader had another seed and was read from."""
    dataset = Dataset()
    used = DataLoader(dataset, 2, sampler=sampler(dataset, seed=99), collate_fn=list, **loader)
    next(iter(used))
    dataset.asked.clear()
    loop = object.__new__(IterBasedTrainLoop if is_endless else EpochBasedTrainLoop)
    vars(loop).update(dataloader=used, _iter=iteration, _epoch=epoch)
    cfg = Config(dict(train_dataloader=dict(sampler=dict(type=sampler.__name__), batch_size=2)))
    return SimpleNamespace(train_loop=loop, train_dataloader=used, cfg=cfg, seed=SEED)


def order(*seeds: int) -> list[int]:
    """The indices of shuffled passes, as mmengine documents its samplers."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return [i for generator in generators for i in torch.randperm(5, generator=generator).tolist()]


def test_endless_data_go_on_without_loading_what_was_trained():
    run = runner(InfiniteSampler, True, iteration=3)
    seed_training_batches(run, 0)
    iterator = run.train_loop.dataloader_iterator
    assert [next(iterator) for _ in range(3)] == [None] * 3
    batches = [next(iterator) for _ in range(2)]
    generator = torch.Generator().manual_seed(SEED)
    stream = [i for _ in range(2) for i in torch.randperm(5, generator=generator).tolist()]
    assert [[index for index, _ in batch] for batch in batches] == [stream[6:8], stream[8:10]]
    assert run.train_loop.dataloader.dataset.asked == stream[6:10]


def test_endless_data_of_a_finite_sampler_are_shuffled_anew_in_each_pass():
    run = runner(DefaultSampler, True)
    seed_training_batches(run, 0)
    batches = islice(run.train_loop.dataloader_iterator, 6)
    assert [i for batch in batches for i, _ in batch] == order(SEED, SEED + 1)


@pytest.mark.parametrize('workers', [{}, dict(num_workers=1, persistent_workers=True)])
def test_an_epoch_goes_on_after_its_first_batches(workers):
    run = runner(DefaultSampler, False, epoch=4, **workers)
    seed_training_batches(run, 1)
    loader = run.train_loop.dataloader
    assert len(loader) == 3
    assert [i for batch in loader for i, _ in batch] == order(SEED + 4)[2:]
    loader.batch_sampler.epoch = 5
    assert [i for batch in loader for i, _ in batch] == order(SEED + 5)


def test_random_numbers_are_those_of_the_batch():
    """Whatever came before, with any number of workers; and the process's own go on untouched."""
    torch.manual_seed(0)
    expected = torch.rand(2)
    loaded = []
    for iteration, loader in ((0, {}), (2, {}), (2, dict(num_workers=2, persistent_workers=True))):
        run = runner(InfiniteSampler, True, iteration, **loader)
        torch.manual_seed(0)
        first = torch.rand(())
        seed_training_batches(run, 0)
        loaded.append(list(islice(run.train_loop.dataloader_iterator, 4)))
        assert torch.equal(torch.stack([first, torch.rand(())]), expected)
    assert loaded[1][2:] == loaded[0][2:]
    assert loaded[2][2:] == loaded[0][2:]
    assert len({number for batch in loaded[0] for _, number in batch}) == 8


def test_epochs_and_ranks_have_their_own_random_numbers():
    def numbers(rank: int, epoch: int) -> list[float]:
        batches = SeededBatchSampler(BatchSampler([0, 1], 2, False), (SEED, rank))
        batches.epoch = epoch
        return [torch.rand(()).item() for batch in batches for _ in batch]

    assert len({*numbers(0, 0), *numbers(0, 1), *numbers(1, 0)}) == 6


@pytest.mark.parametrize('drop_last', [True, False])
def test_settings_of_the_loader_stay(drop_last):
    run = runner(DefaultSampler, False)
    run.train_dataloader = run.train_loop.dataloader = DataLoader(
        Dataset(), 2, drop_last=drop_last, num_workers=1, prefetch_factor=5, collate_fn=tuple
    )
    seed_training_batches(run, 0)
    loader = run.train_loop.dataloader
    assert (loader.num_workers, loader.prefetch_factor, loader.collate_fn) == (1, 5, tuple)
    assert len(loader) == (2 if drop_last else 3)
