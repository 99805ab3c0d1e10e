"""mmengine's runner with strict loading."""

from typing import Any

import mmengine.runner
import torch
from mmengine.hooks import EMAHook
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.registry import DefaultScope
from mmengine.runner.base_loop import BaseLoop
from torch import nn

from mala_mm.checkpoint import CheckpointError, first_few, read_checkpoint, weights_of
from mala_mm.resume import require_training_state
from mala_mm.weights import fit_model


class Runner(mmengine.runner.Runner):
    """Where mmengine's runner logs what does not fit a model and goes on, this one stops.

    What it builds while it trains or tests, it builds in its own scope, also where a runner of
    another one was made after it.

    Attributes:
        has_started (bool): Whether all that it needs was built and its loop runs.
    """

    has_started = False

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        if fn_name in ('before_train', 'before_val', 'before_test'):
            self.has_started = True
        super().call_hook(fn_name, **kwargs)

    def train(self) -> nn.Module:
        with DefaultScope.overwrite_default_scope(self.default_scope.scope_name):
            return super().train()

    def val(self) -> dict[str, float]:
        with DefaultScope.overwrite_default_scope(self.default_scope.scope_name):
            return super().val()

    def test(self) -> dict[str, float]:
        with DefaultScope.overwrite_default_scope(self.default_scope.scope_name):
            return super().test()

    def resume(self, filename: str, *args: Any, **kwargs: Any) -> None:
        """Continue from a checkpoint's weights and training state, as mmengine's runner does.

        Raises:
            CheckpointError: As of `load_checkpoint`, or if the training state is damaged or of
                another optimizer.
        """
        try:
            super().resume(filename, *args, **kwargs)
        except (CheckpointError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # depends on what is wrong with the state
            raise CheckpointError(
                f'checkpoint {filename} cannot be resumed, its training state does not fit this '
                f'training or is damaged: {type(error).__name__}: {error}'
            ) from error

    def load_checkpoint(self, filename: str, map_location: str = 'cpu') -> dict:
        """Load a whole model, as a whole or not at all.

        Only where training starts from the file (``load_from``) may it have another number of
        classes.

        Args:
            filename (str): A path or a URL, see :func:`mala_mm.checkpoint.read_checkpoint`.
            map_location (str): The device of the tensors. Defaults to 'cpu'.

        Returns:
            dict: The checkpoint, its ``state_dict`` under the model's own names.

        Raises:
            CheckpointError: If the file cannot be used, does not fit the model, or lacks the
                training state that resuming needs, or another kind of training's.
        """
        checkpoint = read_checkpoint(filename, map_location)
        weights = weights_of(checkpoint, filename)
        if self._resume:
            require_training_state(checkpoint, filename)
            self._require_same_kind_of_training(checkpoint, filename)
            self._require_same_optimizer(checkpoint['optimizer'], filename)
            # mmengine would run this text as Python code, to find mmdet 2's gpu_ids in it
            checkpoint['meta'].pop('config', None)
        model = self.model
        while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
            model = model.module
        is_training = isinstance(self._train_loop, BaseLoop)
        fine_tune = is_training and not self._resume
        checkpoint['state_dict'] = fit_model(model, weights, filename, fine_tune)
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        model.load_state_dict(checkpoint['state_dict'], strict=False)
        self._has_loaded = True
        return checkpoint

    def _require_same_optimizer(self, saved: dict, filename: str) -> None:
        """Raise CheckpointError where both have settings that the other one does not know."""
        if isinstance(self.optim_wrapper, OptimWrapperDict):
            return
        optimizer = self.optim_wrapper.optimizer
        groups = [group for group in saved.get('param_groups', ()) if isinstance(group, dict)]
        for group, own in zip(groups, optimizer.param_groups, strict=False):
            unknown, lacking = sorted(group.keys() - own.keys()), sorted(own.keys() - group.keys())
            if unknown and lacking:
                raise CheckpointError(
                    f'checkpoint {filename} cannot be resumed, it is of another optimizer than '
                    f'{type(optimizer).__name__}: it has {first_few(unknown)}, not '
                    f'{first_few(lacking)}. Take that one, or start from the weights with '
                    '--cfg-options load_from=...'
                )

    def _require_same_kind_of_training(self, checkpoint: dict, filename: str) -> None:
        """Raise CheckpointError for what mmengine would leave out without a word."""
        schedulers, saved = self.param_schedulers, checkpoint.get('param_schedulers')
        if schedulers and len(saved or ()) != len(schedulers):
            raise CheckpointError(
                f'checkpoint {filename} cannot be resumed: it has the state of {len(saved or ())} '
                f'parameter schedulers, the config has {len(schedulers)}'
            )
        is_averaging = any(isinstance(hook, EMAHook) for hook in self.hooks)
        if is_averaging != ('ema_state_dict' in checkpoint):
            having, lacking = ('config', 'checkpoint') if is_averaging else ('checkpoint', 'config')
            raise CheckpointError(
                f'checkpoint {filename} cannot be resumed: the {having} has averaged weights '
                f'(EMAHook), the {lacking} has none'
            )
