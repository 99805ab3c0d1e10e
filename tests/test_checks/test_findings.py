from mala_mm.checks.findings import Findings


def test_equal_messages_are_joined_and_errors_come_first():
    findings = Findings()
    findings.warning('grey images: read as RGB')
    findings.error('boxes of a.json outside their image: clip them', 'annotation 3: [1, 2, 3, 4]')
    findings.error('boxes of a.json outside their image: clip them', 'annotation 9: [5, 6, 7, 8]')
    assert str(findings) == (
        'error: boxes of a.json outside their image: clip them (2 times)\n'
        '    annotation 3: [1, 2, 3, 4]\n'
        '    annotation 9: [5, 6, 7, 8]\n'
        'warning: grey images: read as RGB'
    )


def test_long_lists_and_messages_are_cut():
    findings = Findings()
    for i in range(13):
        findings.error('x' * 400, f'line\n{i}')
    lines = str(findings).splitlines()
    assert len(findings.errors[0].message) == 299
    assert lines[1] == '    line 0'
    assert lines[-1] == '    ... and 3 more'
    assert len(lines) == 12


def test_extend_keeps_counts():
    first, second = Findings(), Findings()
    first.error('same', 'a')
    second.error('same', 'b')
    second.warning('other')
    first.extend(second)
    assert [f.places for f in first.errors] == [['a', 'b']]
    assert [f.message for f in first.warnings] == ['other']
