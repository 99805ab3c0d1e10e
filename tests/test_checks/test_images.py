import numpy as np
import pytest
from PIL import Image

from mala_mm.checks.images import ImageError, inspect_image, missing_files, read_image, scan

NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.parametrize(
    ('name', 'pixels', 'mode', 'bit_depth'),
    [
        ('a.jpg', NOISE, 'RGB', 8),
        ('a.png', NOISE[..., 0], 'L', 8),
        ('a.png', NOISE[..., 0] > 99, '1', 1),
        ('a.png', NOISE[..., 0].astype(np.uint16), 'I;16', 16),
        ('a.tif', NOISE[..., 0].astype(np.uint16), 'I;16', 16),
        ('a.png', np.dstack([NOISE, NOISE[..., 0]]), 'RGBA', 8),
        ('a.webp', NOISE, 'RGB', 8),
    ],
)
def test_kinds(name, pixels, mode, bit_depth, tmp_path):
    path = tmp_path / name
    Image.fromarray(pixels).save(path)
    info = inspect_image(str(path))
    assert (info.mode, info.bit_depth) == (mode, bit_depth)
    assert (info.width, info.height) == info.stored_size == (60, 40)


def test_orientation_is_applied_as_asked(tmp_path):
    path = str(tmp_path / 'a.jpg')
    Image.fromarray(NOISE).save(path, exif=TURNED)
    for flag, size in (('color', (40, 60)), ('color_ignore_orientation', (60, 40))):
        pixels, info = read_image(path, flag)
        assert (info.width, info.height) == size == pixels.shape[1::-1]
        assert info.stored_size == (60, 40)


def test_indices_of_a_palette(tmp_path):
    path = str(tmp_path / 'a.png')
    indices = np.arange(6, dtype=np.uint8).reshape(2, 3)
    image = Image.fromarray(indices, 'P')
    image.putpalette([9 * i for i in range(18)])
    image.save(path)
    pixels, info = read_image(path, 'unchanged', 'pillow')
    assert info.mode == 'P'
    np.testing.assert_array_equal(pixels, indices)


@pytest.mark.parametrize('name', ['a.jpg', 'a.png'])
@pytest.mark.parametrize('part', [0.1, 0.5, 0.9, 0.99])
def test_cut_off(name, part, tmp_path):
    path = tmp_path / name
    Image.fromarray(NOISE).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ImageError, match='is cut off or damaged'):
        read_image(str(path))


def test_names_that_no_file_has(tmp_path):
    bad = [f'{tmp_path}/{name}' for name in ('none.png', 'a\0.png', '\ud800.png', 'x' * 999)]
    (tmp_path / 'a.png').touch()
    (tmp_path / 'link.png').symlink_to(tmp_path / 'none.png')
    (tmp_path / 'folder.png').mkdir()
    bad += [f'{tmp_path}/link.png', f'{tmp_path}/folder.png', f'{tmp_path}/no/a.png']
    assert missing_files([f'{tmp_path}/a.png', *bad]) == bad
    assert all(isinstance(inspect_image(path), ImageError) for path in bad)


@pytest.mark.parametrize('workers', [0, 2])
def test_scan_keeps_the_order(workers):
    assert list(scan(abs, range(-40, 0), workers)) == list(range(40, 0, -1))
