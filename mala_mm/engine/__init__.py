"""Hooks for mmengine's runner."""

from .empty_detections_hook import EmptyDetectionsHook

__all__ = ['EmptyDetectionsHook']
