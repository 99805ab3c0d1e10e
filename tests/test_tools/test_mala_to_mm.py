"""tools/model_converters/mala_to_mm.py on files of mmdet 2, mmseg 0 and ImageNet training."""

import hashlib
import json
import math
import os
import resource
from pathlib import Path

import numpy as np
import published_heads
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor

from mala_mm import config_path
from mala_mm.checkpoint import read_checkpoint
from mala_mm.models import MAViT

KEYS = json.loads((Path(__file__).parents[1] / 'golden' / 'checkpoint_keys_t.json').read_text())


@pytest.fixture
def converter(tool):
    return tool('model_converters/mala_to_mm')


@pytest.fixture
def convert(converter, monkeypatch, capsys):
    """Run the tool; returns what it prints."""

    def convert(*args: object) -> str:
        monkeypatch.setattr('sys.argv', ['mala_to_mm.py', *map(str, args)])
        converter.main()
        return capsys.readouterr().out

    return convert


@pytest.fixture
def refused(convert, capsys):
    """Run the tool in vain; returns its one line of error."""

    def refused(*args: object) -> str:
        with pytest.raises(SystemExit) as exit_:
            convert(*args)
        assert exit_.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith('mala_to_mm.py: error: ')
        return line

    return refused


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A tensor for each name, filled with the name's number; each takes the space of one value."""
    numbers = torch.arange(len(shapes), dtype=torch.half)
    return {name: numbers[i].expand(shape) for i, (name, shape) in enumerate(shapes.items())}


def backbone_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    if arch == 't':
        return KEYS['det_t']
    with torch.device('meta'):
        return {name: tuple(value.shape) for name, value in MAViT(arch).state_dict().items()}


PUBLISHED = {
    'mask_rcnn': ('t', 'mask_rcnn_mavit_t_coco.py', published_heads.mask_rcnn),
    'cascade': ('s', 'cascade_mavit_s_coco.py', published_heads.cascade_mask_rcnn),
    'retinanet': ('t', 'retinanet_mavit_t_coco.py', published_heads.retinanet),
    'upernet': ('t', 'upernet_mavit_t_ade20k.py', published_heads.upernet),
    'semantic_fpn': ('t', 'semfpn_mavit_t_ade20k.py', published_heads.semantic_fpn),
}


@pytest.mark.parametrize(('arch', 'config', 'heads'), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_model_loads_strictly(arch, config, heads, convert, tmp_path):
    shapes = {f'backbone.{name}': shape for name, shape in backbone_shapes(arch).items()}
    shapes |= heads(MAViT.arch_settings[arch]['embed_dims'])
    weights = numbered(shapes)
    source, target = tmp_path / 'published.pth', tmp_path / 'converted.pth'
    meta = dict(CLASSES=('person', 'kite'), epoch=36, mmdet_version='2.11.0')
    torch.save(dict(meta=meta, state_dict=weights, optimizer=dict(state={})), source)
    out = convert(source, target, '--check', config_path(config))
    assert 'renamed: nothing\ndropped: no tensors\n' in out
    assert f'kept:    {len(weights)} tensors' in out
    assert 'dropped entries of the file: meta, optimizer\n' in out

    converted = torch.load(target, weights_only=True)
    assert converted.keys() == {'meta', 'state_dict'}
    assert converted['meta'] == dict(
        source='published.pth',
        sha256=hashlib.sha256(source.read_bytes()).hexdigest(),
        arch=arch,
        dataset_meta=dict(classes=('person', 'kite')),
    )
    assert converted['state_dict'].keys() == weights.keys()
    for name, value in converted['state_dict'].items():
        assert torch.equal(value, weights[name]), name
        assert value.is_contiguous()

    cfg = Config.fromfile(config_path(config))
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    loaded = dict(converted['state_dict'])
    if 'retinanet' in config:  # ours builds no norm for the output that the neck skips
        for kind in ('weight', 'bias'):
            loaded.pop(f'backbone.extra_norms.0.norm.{kind}')
    model.load_state_dict(loaded, strict=True, assign=True)


@pytest.fixture
def classifier(tmp_path) -> Path:
    """An ImageNet model's training file, with averaged weights that differ."""
    path = tmp_path / 'mavit_t.pth'
    weights = {f'module.{name}': value for name, value in numbered(KEYS['cls_t']).items()}
    averaged = {name.removeprefix('module.'): -value for name, value in weights.items()}
    torch.save(dict(model=weights, model_ema=averaged, optimizer={}, epoch=300), path)
    return path


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
@pytest.mark.parametrize('ema', [False, True])
def test_classifier(suffix, ema, classifier, convert, tmp_path):
    target = tmp_path / f'converted.{suffix}'
    check = ('--check', config_path('mask_rcnn_mavit_t_coco.py'))
    out = convert(classifier, target, *check, *(['--ema'] if ema else []))
    prefix = '' if ema else 'module.'
    kept = KEYS['cls_t'].keys() & KEYS['det_t'].keys()
    dropped = sorted(prefix + name for name in KEYS['cls_t'].keys() - kept)
    assert f'dropped: {", ".join(dropped)}\n' in out
    assert f'renamed: {"nothing" if ema else f"{len(kept)} tensors, module.* -> *"}\n' in out
    values = sum(math.prod(KEYS['cls_t'][name]) for name in kept)
    assert f'kept:    {len(kept)} tensors, {values:,} values\n' in out

    checkpoint = read_checkpoint(str(target))
    assert checkpoint['meta'] == dict(
        source='mavit_t.pth',
        sha256=hashlib.sha256(classifier.read_bytes()).hexdigest(),
        arch='t',
    )
    assert checkpoint['state_dict'].keys() == kept
    for number, name in enumerate(KEYS['cls_t']):
        if name in kept:
            assert (checkpoint['state_dict'][name] == (-number if ema else number)).all(), name
    assert target.stat().st_size < 2 * values + 200_000
    assert {path.name for path in tmp_path.iterdir()} == {'mavit_t.pth', target.name}


def poison(path: Path) -> None:
    class Call:
        def __reduce__(self):
            return os.system, (f'touch {path}.ran',)

    torch.save(dict(model=torch.load(path)['model'], optimizer=Call()), path)


REFUSED = {
    'code': (poison, 'new.pth', (), 'mavit_t.pth was refused: it names posix.system'),
    'cut off': (
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        'new.pth',
        (),
        'mavit_t.pth cannot be read: it is damaged or cut off',
    ),
    'no MAViT': (
        lambda path: torch.save(dict(weight=torch.ones(1)), path),
        'new.pth',
        (),
        'mavit_t.pth holds no MAViT, but weight',
    ),
    'no average': (
        lambda path: torch.save(dict(weight=torch.ones(1)), path),
        'new.pth',
        ('--ema',),
        'mavit_t.pth holds no EMA weights',
    ),
    'another arch': (
        lambda path: None,
        'new.pth',
        ('--check', config_path('mask_rcnn_mavit_s_coco.py')),
        'this looks like MAViT-T',
    ),
    'no config': (lambda path: None, 'new.pth', ('--check', 'none.py'), 'config none.py cannot be'),
    'the source': (lambda path: None, 'mavit_t.pth', (), 'is the source itself'),
    'a link to it': (
        lambda path: path.with_name('new.pth').symlink_to(path),
        'new.pth',
        (),
        'is the source itself',
    ),
    'a folder': (
        lambda path: path.with_name('new.pth').mkdir(),
        'new.pth',
        (),
        'cannot be written',
    ),
    'no folder': (lambda path: None, 'none/new.pth', (), 'cannot be written'),
    'another suffix': (lambda path: None, 'new.bin', (), 'expected NAME.pth or NAME.safetensors'),
}


@pytest.mark.parametrize(
    ('change', 'target', 'options', 'message'), REFUSED.values(), ids=REFUSED.keys()
)
def test_refused_leaves_everything_as_it_was(
    change, target, options, message, classifier, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    change(classifier)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    assert message in refused('mavit_t.pth', target, *options)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


def test_missing_source_and_url(refused, tmp_path):
    assert 'none.pth does not exist' in refused(tmp_path / 'none.pth', tmp_path / 'new.pth')
    assert 'download it first' in refused('https://example.org/w.pth', tmp_path / 'new.pth')


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
def test_disk_that_fills_up_keeps_the_old_file(suffix, classifier, refused, tmp_path):
    target = tmp_path / f'new.{suffix}'
    target.write_text('old')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        message = refused(classifier, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f'{target} cannot be written: ' in message
    assert target.read_text() == 'old'
    assert len(list(tmp_path.iterdir())) == 2


def test_class_names_are_kept(convert, tmp_path):
    meta = dict(CLASSES=('wall', 'sky'), PALETTE=np.array([[1, 2, 3], [4, 5, 6]]))
    weights = numbered({f'backbone.{name}': shape for name, shape in KEYS['det_t'].items()})
    torch.save(dict(meta=meta, state_dict=weights), tmp_path / 'old.pth')
    convert(tmp_path / 'old.pth', tmp_path / 'new.safetensors')
    texts = read_checkpoint(tmp_path / 'new.safetensors')['meta']
    assert json.loads(texts['dataset_meta']) == dict(
        classes=['wall', 'sky'], palette=[[1, 2, 3], [4, 5, 6]]
    )
    convert(tmp_path / 'old.pth', tmp_path / 'new.pth')
    kept = torch.load(tmp_path / 'new.pth', weights_only=True)['meta']['dataset_meta']
    assert kept['classes'] == ('wall', 'sky')
    assert kept['palette'] == [[1, 2, 3], [4, 5, 6]]
