"""Class names of a data set, as a config gives them."""

import difflib
import os
from typing import Any


def class_names_problem(kind: type, metainfo: Any) -> str:
    """Return what is wrong with a config's ``metainfo``, '' where nothing is.

    Args:
        kind (type): The data set's class. mmseg's take a part of the classes that they know.
        metainfo (dict, optional): As in the config.
    """
    metainfo = metainfo or {}
    if not isinstance(metainfo, dict):
        return f'metainfo={metainfo!r}, expected dict(classes=(...))'
    if 'CLASSES' in metainfo:
        return 'metainfo.CLASSES is not read: write classes'
    classes = metainfo.get('classes')
    if classes is None or (isinstance(classes, str) and os.path.isfile(classes)):
        return ''
    if isinstance(classes, str):
        return (
            f'metainfo.classes={classes[:60]!r} is a text, expected a tuple of names: write '
            f'({classes[:60]!r},) with a comma'
        )
    if not isinstance(classes, list | tuple) or not all(isinstance(c, str) for c in classes):
        return f'metainfo.classes={classes!r}, expected a tuple of names'
    known = kind.METAINFO.get('classes') if hasattr(kind, 'get_label_map') else None
    unknown = [name for name in classes if known and name not in known]
    if unknown:
        return (
            f'metainfo.classes has {len(unknown)} names that {kind.__name__} does not have, '
            f'such as {unknown[0]!r}{near_misses(unknown[0], known)}; for classes of your own '
            'take type BaseSegDataset'
        )
    return ''


def near_misses(name: str, known: Any) -> str:
    """Return a question such as ', did you mean sky?', '' where nothing known looks alike."""
    by_case = {str(one).lower(): str(one) for one in known}
    found = difflib.get_close_matches(name.lower(), list(by_case), n=2)
    return f', did you mean {" or ".join(by_case[one] for one in found)}?' if found else ''
