"""Hooks for mmengine's runner."""

from .empty_detections_hook import EmptyDetectionsHook
from .resumable_checkpoint_hook import ResumableCheckpointHook

__all__ = ['EmptyDetectionsHook', 'ResumableCheckpointHook']
