"""mmengine's runner with strict loading, and hooks for it."""

from .empty_detections_hook import EmptyDetectionsHook
from .resumable_checkpoint_hook import ResumableCheckpointHook
from .runner import Runner

__all__ = ['EmptyDetectionsHook', 'ResumableCheckpointHook', 'Runner']
