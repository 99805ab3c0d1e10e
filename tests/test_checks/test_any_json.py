"""Whatever JSON an annotation file holds, the checker ends with findings."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mala_mm.checks.coco_annotations import CocoSplit, check_annotations
from mala_mm.checks.detection_data import check_num_classes
from mala_mm.checks.findings import Findings

SPLIT = CocoSplit(
    'any.json',
    'images',
    classes=('kite', 'clock'),
    trains=True,
    evaluates=True,
    masks=True,
    filter_empty_gt=True,
    min_size=8,
    scales=((1333, 800),),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def often(value: st.SearchStrategy) -> st.SearchStrategy:
    return value | value | value | VALUES


def entries(**fields: st.SearchStrategy) -> st.SearchStrategy:
    fields = {key: often(value) for key, value in fields.items()}
    return often(st.lists(often(st.fixed_dictionaries({}, optional=fields)), max_size=4))


IDS = st.integers(0, 3) | st.sampled_from(['1', '2', 1.0, 1.5, 10**30])
NUMBERS = st.integers(-5, 70) | st.floats() | st.sampled_from([10**400, -1, 0])
NUMBER_LISTS = st.lists(NUMBERS, max_size=9)
RLE = st.fixed_dictionaries(
    dict(
        size=often(st.lists(st.integers(1, 64), min_size=2, max_size=2)),
        counts=often(NUMBER_LISTS | st.text('0PQ`oz~\0', max_size=9)),
    )
)
COCO = st.fixed_dictionaries(
    dict(
        images=entries(id=IDS, file_name=st.text(), width=NUMBERS, height=NUMBERS),
        categories=entries(id=IDS, name=st.sampled_from(['kite', 'clock', 'Kite', ''])),
        annotations=entries(
            id=IDS,
            image_id=IDS,
            category_id=IDS,
            area=NUMBERS,
            iscrowd=st.integers(0, 2),
            bbox=st.lists(NUMBERS, min_size=3, max_size=5),
            segmentation=st.lists(often(NUMBER_LISTS), max_size=3) | RLE,
        ),
    )
)


@QUICK
@given(VALUES | COCO)
def test_never_crashes(content):
    content = json.loads(json.dumps(content))
    findings = Findings()
    check_annotations(content, SPLIT, findings)
    for finding in [*findings.errors, *findings.warnings]:
        assert '\n' not in finding.message
        assert len(finding.message) < 300
        assert 'any.json' in finding.message


def valid() -> dict:
    return dict(
        images=[dict(id=1, file_name='a.png', width=64, height=48)],
        categories=[dict(id=1, name='kite'), dict(id=2, name='clock')],
        annotations=[
            dict(
                id=1,
                image_id=1,
                category_id=1,
                bbox=[8, 10, 20, 24],
                area=480,
                iscrowd=0,
                segmentation=[[8, 10, 28, 10, 28, 34]],
            )
        ],
    )


@QUICK
@given(st.data())
def test_one_changed_value_never_crashes(data):
    """Replace one value, anywhere in a valid file."""
    content = valid()
    check_annotations(content, SPLIT, findings := Findings())
    assert not str(findings)
    places = [(content, key) for key in content]
    places += [(rows[0], key) for rows in content.values() for key in rows[0]]
    places += [(content['annotations'][0]['bbox'], i) for i in range(4)]
    owner, key = data.draw(st.sampled_from(places))
    owner[key] = data.draw(VALUES | NUMBERS | NUMBER_LISTS | RLE)
    check_annotations(content, SPLIT, Findings())


@QUICK
@given(VALUES)
def test_any_model_config(model):
    check_num_classes(model, ('kite',), Findings())
