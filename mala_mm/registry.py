"""mala_mm's registries, children of mmengine's: ``type='mala_mm.NAME'`` resolves in any scope."""

from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import Registry

MODELS = Registry('model', parent=MMENGINE_MODELS, scope='mala_mm', locations=['mala_mm.models'])
HOOKS = Registry('hook', parent=MMENGINE_HOOKS, scope='mala_mm', locations=['mala_mm.engine'])
