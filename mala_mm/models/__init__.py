from .layers import MagnitudeAwareLinearAttention, SoftmaxAttention
from .mavit import MAViT

__all__ = ['MAViT', 'MagnitudeAwareLinearAttention', 'SoftmaxAttention']
