import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope='session')
def check_data_tool(root: Path) -> Callable[..., int]:
    """Run tools/check_data.py in this process and return its exit code."""
    main = runpy.run_path(str(root / 'tools' / 'check_data.py'))['main']

    def run(*args: object) -> int:
        argv, sys.argv = sys.argv, ['check_data.py', *map(str, args)]
        try:
            return main()
        except SystemExit as end:
            return end.code
        finally:
            sys.argv = argv

    return run
