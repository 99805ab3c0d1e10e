"""Arrays that are a function of their name and shape, and the comparison with golden summaries.

The golden values were computed in float64 with the authors' published model on exactly these
weights, images and gradients, so that no weight file has to be stored.
"""

import zlib

import numpy as np
import torch
from torch import Tensor, nn

# The smallest arch worth a test
TINY = dict(
    embed_dims=(8, 16, 16, 32),
    depths=(1, 1, 1, 1),
    num_heads=(1, 2, 2, 4),
    mlp_ratios=(2, 2, 2, 2),
    layer_scale_init=(1, 1, 0.5, 0.5),
    drop_path_rate=0.0,
)


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in [-1, 1) from PCG64, seeded with the crc32 of the name."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return generator.random(size=tuple(shape)) * 2.0 - 1.0


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values, leaf = uniform(name, shape), name.rpartition('.')[2]
    if leaf == 'num_batches_tracked':
        return np.zeros(shape)
    if leaf in ('gamma_1', 'gamma_2'):
        return 0.8 + 0.2 * values
    if leaf in ('bias', 'running_mean'):
        return 0.1 * values
    if leaf == 'running_var' or len(shape) == 1:
        return 1.0 + 0.2 * values
    return values * np.sqrt(3.0 / np.prod(shape[1:]))


def image(batch: int, height: int, width: int) -> np.ndarray:
    noise = uniform(f'image-{batch}x{height}x{width}', (batch, 3, height, width)) * np.sqrt(3.0)
    pattern = np.sin(np.linspace(0, 3, height)[:, None] + 2 * np.linspace(0, 5, width)[None, :])
    return noise + pattern


def output_gradient(name: int | str, shape: tuple[int, ...]) -> np.ndarray:
    return uniform(f'grad-{name}', shape) / np.sqrt(np.prod(shape))


def load_parameters(model: nn.Module) -> None:
    """Fill every entry of the model's state dict, except the rotary angles."""
    model.load_state_dict(
        {
            key: value
            if key.endswith('RoPE.angle')
            else torch.from_numpy(parameter(key, tuple(value.shape)))
            for key, value in model.state_dict().items()
        }
    )


def assert_matches(
    actual: Tensor, golden: dict, tolerance: float, scale: float | None = None
) -> None:
    """Compare with a golden summary, in units of ``scale`` (default: the array's own rms)."""
    values = actual.detach().double().numpy()
    assert list(values.shape) == golden['shape']
    flat = values.reshape(-1)
    index = np.linspace(0, flat.size - 1, len(golden['probe'])).astype(np.int64)
    bound = tolerance * (scale or golden['rms'])
    assert np.abs(flat[index] - np.array(golden['probe'])).max() <= bound
    assert abs(flat.mean() - golden['mean']) <= bound
    assert abs(np.sqrt((flat**2).mean()) - golden['rms']) <= bound


def assert_golden(model: nn.Module, case: dict, dtype: torch.dtype, tolerance: float) -> None:
    """Compare a backbone with a golden case: outputs, loss and gradients where it has them.

    The model is in a mode, and maybe a memory format, in which norms keep their statistics and no
    branch is dropped.
    """
    model.to(dtype)
    load_parameters(model)
    batch, _, height, width = case['input']
    x = torch.from_numpy(image(batch, height, width)).to(dtype)
    with_gradients = 'loss' in case
    x.requires_grad_(with_gradients)
    with torch.set_grad_enabled(with_gradients):
        outs = model(x)
    for out, golden in zip(outs, case['outputs'], strict=True):
        assert_matches(out, golden, tolerance)
    if not with_gradients:
        return
    loss = sum(
        (out * torch.from_numpy(output_gradient(i, out.shape)).to(dtype)).sum()
        for i, out in enumerate(outs)
    )
    assert abs(loss.item() - case['loss']) <= 10 * tolerance
    loss.backward()
    assert_matches(x.grad, case['input_grad'], tolerance)
    parameters = dict(model.named_parameters())
    for name, golden in case['param_grads'].items():
        assert_matches(parameters[name].grad, golden, tolerance)
