"""Checkpoints that are written whole and from which training continues exactly."""

from pathlib import Path
from typing import Any

from mmengine.dist import all_gather_object, get_rank, get_world_size, is_main_process
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.hooks import CheckpointHook
from mmengine.runner import Runner

from mala_mm.registry import HOOKS

from .generator_states import get_generator_states, set_generator_states
from .seeded_batches import seed_training_batches
from .whole_file import PARTIAL, write_whole


@HOOKS.register_module()
class ResumableCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, with the same arguments, for exact resume.

    On one device, a run that was interrupted anywhere and resumed ends with the weights, the
    optimizer state and the learning rates of an uninterrupted one, to the bit where the device
    computes reproducibly:

    * The generators' states of every rank are in the checkpoint (`resume_state`) and are put back.
      Validation leaves them as they were.
    * Batches depend on the seed and their number only, see :mod:`.seeded_batches`. Iteration-based
      training goes on with the next batch without loading those before it again. An epoch-based
      run goes on after the last finished epoch, or, from a checkpoint with `by_epoch=False`, with
      the next batch of that epoch, which the log then counts from 1.
    * A checkpoint and `last_checkpoint` replace older files only once they are on the disk; what
      `max_keep_ckpts` and `save_best` drop is removed after that. An object store as `out_dir`
      works as in mmengine.

    Not in a checkpoint: the gradients that `accumulative_counts` has summed up so far, and caches
    of transforms such as CachedMosaic.
    """

    generator_states: list[dict[str, Any]] | None = None  # of each rank, while they are needed
    resume_state: dict[str, Any] | None = None  # of the checkpoint that was loaded

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.resume_state = checkpoint.get('resume_state')

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        if self.file_client_args is None and type(self.file_backend) is LocalBackend:
            self.backend_args = dict(backend='mala_mm.WholeFileBackend')
            self.file_backend = get_file_backend(backend_args=self.backend_args)
            if is_main_process():
                for leftover in Path(self.out_dir).glob(f'*.pth{PARTIAL}'):
                    leftover.unlink()
        state = self.resume_state if runner.iter > 0 else None
        epoch_batches = state['epoch_batches'] if state else 0
        seed_training_batches(runner, epoch_batches)
        self.epoch_start = runner.epoch, runner.iter - epoch_batches
        if state:
            self._restore_generators(runner, state['generators'])
        elif runner.iter > 0:
            runner.logger.warning(
                'The checkpoint is not one of ResumableCheckpointHook: other random numbers are '
                'drawn than without the interruption, and an unfinished epoch starts anew.'
            )

    def _restore_generators(self, runner: Runner, states: list[dict[str, Any]]) -> None:
        if len(states) == get_world_size():
            set_generator_states(states[get_rank()])
        else:
            runner.logger.warning(
                f'The checkpoint holds generator states of {len(states)} processes, this run has '
                f'{get_world_size()}: it draws other random numbers than without the interruption.'
            )

    def before_train_epoch(self, runner: Runner) -> None:
        runner.train_dataloader.batch_sampler.epoch = runner.epoch
        if runner.epoch != self.epoch_start[0]:
            self.epoch_start = runner.epoch, runner.iter

    def before_val(self, runner: Runner) -> None:
        self.generator_states = all_gather_object(get_generator_states())

    def after_val(self, runner: Runner) -> None:
        set_generator_states(self.generator_states[get_rank()])
        self.generator_states = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        meta = checkpoint['meta']
        epoch, first_iter = self.epoch_start
        checkpoint['resume_state'] = dict(
            generators=self.generator_states or [get_generator_states()],
            epoch_batches=meta['iter'] - first_iter if meta['epoch'] == epoch else 0,
        )

    def _save_checkpoint(self, runner: Runner) -> None:
        # Here, since mmengine calls before_save_checkpoint in the main process only.
        self.generator_states = all_gather_object(get_generator_states())
        super()._save_checkpoint(runner)
        self.generator_states = None

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        """Save, then point `last_checkpoint` to it, then remove what is too old."""
        outdated = []
        if self.max_keep_ckpts > 0:
            steps = [*(kept for kept in self.keep_ckpt_ids if kept != step), step]
            outdated = steps[: -self.max_keep_ckpts]
            self.keep_ckpt_ids = steps[-self.max_keep_ckpts :]
            runner.message_hub.update_info('keep_ckpt_ids', self.keep_ckpt_ids)
        name = self.filename_tmpl.format(step)
        self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
        runner.message_hub.update_info('last_ckpt', self.last_ckpt)
        runner.save_checkpoint(
            self.out_dir,
            name,
            file_client_args=self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args,
        )
        if is_main_process():
            write_whole(Path(runner.work_dir, 'last_checkpoint'), self.last_ckpt.encode())
            for old in outdated:
                path = self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(old))
                if self.file_backend.isfile(path):
                    self.file_backend.remove(path)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict[str, float]) -> None:
        outdated = []
        self.file_backend.remove = outdated.append  # mmengine removes before it saves
        super()._save_best_checkpoint(runner, metrics)
        del self.file_backend.remove
        for path in outdated:
            self.file_backend.remove(path)
