"""tools/get_flops.py on models small enough to count by hand."""

import json

import pytest
import torch
from mmengine.config import Config
from torch import nn
from torch.nn import functional as F

from mala_mm import cli
from mala_mm.models import MAViT

HEIGHT, WIDTH = 6, 8
PIXELS = HEIGHT * WIDTH
POINTS = PIXELS // 4  # after a stride of 2


class Tiny(nn.Module):
    """A backbone of convolutions, a head of attentions, and one product outside both."""

    def __init__(self, pretrained=None):
        super().__init__()
        assert pretrained is None
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 5, padding=2, groups=8),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
        )
        self.head = nn.Module()
        self.head.qkv = nn.Linear(4, 12, bias=False)
        self.head.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.auxiliary = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, image, data_samples, mode):
        assert mode == 'tensor'
        assert data_samples[0].batch_input_shape == (HEIGHT, WIDTH)
        tokens = self.backbone(image).flatten(2).transpose(1, 2)
        q, k, v = self.head.qkv(tokens).chunk(3, dim=-1)
        tokens = self.head.attention(*[F.scaled_dot_product_attention(q, k, v)] * 3)[0]
        return tokens @ self.scale


class Choosy(nn.Module):
    """Does as much as its values say."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, image, *args, **kwargs):
        return self.layer(image.new_zeros(2 + int(image.sum().item()), 1))


@pytest.fixture(scope='module')
def get_flops(tool):
    return tool('get_flops')


@pytest.fixture
def run_main(get_flops, monkeypatch, capsys):
    """Run main with arguments, tell exit code, standard output and standard error."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr('sys.argv', ['get_flops.py', *map(str, args)])
        code = 0
        try:
            get_flops.main()
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize('device', ['meta', 'cpu'])
def test_both_columns_by_hand(get_flops, device):
    costs = get_flops.count(Tiny().to(device), (HEIGHT, WIDTH))

    convolutions = POINTS * (8 * 27 + 8 * 25 + 8 * 4 * 4)
    projections = PIXELS * (4 * 12 + 4 * 16)  # qkv; in and out of nn.MultiheadAttention
    products = 2 * PIXELS * PIXELS * 4  # QK^T and AV
    outside = products + PIXELS * 4 * 4
    layers = convolutions + projections
    assert costs == {
        'backbone': (224 + 16 + 208 + 132, convolutions, convolutions),
        'head': (48 + 60 + 20, projections + products, projections),
        'auxiliary': (25, 0, 0),
        'other': (16, outside, 0),
        'total': (749, layers + products + outside, layers),
    }


def test_attention_of_mavit_by_hand(get_flops):
    arch = dict(
        embed_dims=(16, 16, 32, 32),
        depths=(1, 1, 1, 1),
        num_heads=(2, 1, 1, 2),
        mlp_ratios=(2.0, 2.0, 2.0, 2.0),
        layer_scale_init=(1.0, 1.0, 1.0, 1.0),
        drop_path_rate=0.0,
    )

    class Backbone(MAViT):
        def forward(self, image, *args, **kwargs):
            return super().forward(image)

    total = get_flops.count(Backbone(arch).to('meta'), (64, 128))['total']
    # KV and R phi(q) KV of the linear stages have D^2 for each token and head, z has D
    linear = 512 * 2 * 8 * (2 * 8 + 1) + 128 * 16 * (2 * 16 + 1)
    softmax = 2 * 32 * 32 * 32 + 2 * 8 * 8 * 32
    attention = total.multiply_adds - total.layer_multiply_adds
    assert attention == linear + softmax


@pytest.mark.parametrize(
    ('name', 'stages', 'box'),
    [
        ('mask_rcnn_mavit_t_coco', 1, 12544 * 1024 + 1024 * 1024),
        ('cascade_mavit_s_coco', 3, 4 * 49 * 256 * 256 * 9 + 12544 * 1024),
    ],
)
def test_number_of_rois(get_flops, root, name, stages, box):
    with torch.device('meta'):
        model = get_flops.build_model(cli.read_config(str(root / 'configs' / f'{name}.py')))
    costs = get_flops.count(model, (64, 64))
    box = 1000 * (box + 1024 * 81 + 1024 * 320)
    mask = 100 * (196 * (4 * 256 * 256 * 9 + 256 * 256 * 4) + 784 * 256 * 80)
    assert costs['roi_head.bbox_head'][1:] == (stages * box, stages * box)
    assert costs['roi_head.mask_head'][1:] == (stages * mask, stages * mask)
    # one anchor head for all levels, of 16x16 to 1x1
    cells = 256 + 64 + 16 + 4 + 1
    assert costs['rpn_head'][1:] == (cells * 256 * (256 * 9 + 3 + 12),) * 2


def test_work_that_depends_on_values(get_flops):
    with pytest.raises(cli.UsageError, match=r'^Choosy cannot take .* 4x4 on meta: .* try --dev'):
        get_flops.count(Choosy().to('meta'), (4, 4))
    assert get_flops.count(Choosy(), (4, 4))['total'] == (2, 2, 2)


def test_other_roi_heads_are_refused(get_flops):
    model = Choosy().to('meta')
    model.with_roi_head, model.roi_head = True, nn.Identity()
    with pytest.raises(cli.UsageError, match=r'^the RoI head must be .* got Identity$'):
        get_flops.count(model, (4, 4))


def test_weights_are_not_loaded(get_flops):
    model = dict(type=Tiny, pretrained='nowhere.pth')
    assert isinstance(get_flops.build_model(Config(dict(default_scope='mmdet', model=model))), Tiny)


def test_table_and_json(run_main, tiny_semfpn, tmp_path):
    config = tmp_path / 'c.py'
    config.write_text(f"""
_base_ = {str(tiny_semfpn)!r}
model = dict(pretrained='nowhere.pth')
""")
    report = tmp_path / 'flops.json'
    code, out, _ = run_main(config, '--shape', 64, 96, '--json', report)
    assert code == 0
    written = json.loads(report.read_text())
    assert written['config'] == str(config)
    assert written['shape'] == [64, 96]
    assert list(written['parts']) == ['backbone', 'neck', 'decode_head', 'total']
    neck = written['parts']['neck']
    cells = 24 * 16 + 12 * 8 + 6 * 4 + 3 * 2
    assert neck['multiply_adds'] == (
        256 * (16 * (24 * 16 + 12 * 8) + 32 * (6 * 4 + 3 * 2)) + cells * 256 * 256 * 9
    )
    assert neck['parameters'] == 256 * (16 + 16 + 32 + 32) + 4 * 256 * 256 * 9 + 8 * 256
    lines = out.splitlines()
    assert lines[0] == f'{config} at 64x96'
    assert lines[-3] == '| neck | 2.4 | 0.3 | 0.3 |'


def test_json_that_cannot_be_written(run_main, get_flops, tmp_path, monkeypatch):
    monkeypatch.setattr(get_flops, 'build_model', lambda cfg: Tiny())
    config = tmp_path / 'c.py'
    config.write_text("default_scope = 'mmseg'")
    report = tmp_path / 'no' / 'flops.json'
    code, _, err = run_main(config, '--shape', HEIGHT, WIDTH, '--json', report)
    assert code == 2
    assert err == f'get_flops.py: error: --json {report}: No such file or directory\n'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ("default_scope = 'mmdet'", 'c.py has no model'),
        ("model = dict(type='RetinaNet')", "expected default_scope 'mmdet' (detection) or"),
        (
            "default_scope, model = 'mmseg', dict(type='Nowhere')",
            'c.py cannot be built: Nowhere is not in the',
        ),
        (
            "default_scope, model = 'mmdet', dict(type='RetinaNet', neck=1)",
            'c.py cannot be built: RetinaNet.__init__() missing 2 required',
        ),
    ],
)
def test_config_of_no_model(run_main, tmp_path, text, message):
    config = tmp_path / 'c.py'
    config.write_text(text)
    code, _, err = run_main(config)
    assert code == 2
    assert message in err
    assert err.startswith('get_flops.py: error: ')
    assert err.count('\n') == 1


@pytest.mark.parametrize('shape', [('0', '8'), ('8', '-8'), ('8', '8.5'), ('8',)])
def test_shape_must_be_positive(run_main, shape):
    code, _, err = run_main('c.py', '--shape', *shape)
    assert code == 2
    assert 'expected a positive number of pixels' in err or 'expected 2 arguments' in err


def test_device_that_is_not_there(get_flops):
    with pytest.raises(cli.UsageError, match=r'^--device gpu cannot be used: .*device type'):
        get_flops.move(Tiny(), 'gpu')
