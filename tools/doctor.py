"""Say what is installed, which versions conflict, what does not work, and how to mend it."""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
CHECKOUT, INSTALLED = HERE.parents[1] / 'mala_mm', HERE.parents[2]
# Not through mala_mm, which imports torch and mmengine: they may be what is broken.
sys.path[0] = str(CHECKOUT if CHECKOUT.is_dir() else INSTALLED)

from checks.environment import (  # noqa: E402
    check_machine,
    check_versions,
    installed_versions,
    try_machine,
)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, version in installed_versions().items():
        print(f'{name:>24}  {version}', flush=True)
    print()
    findings = check_versions()
    found = try_machine()
    for step, result in found.items():
        print(f'{step:>24}  {result.get("info", "does not work")}')
    findings.extend(check_machine(found))
    print()
    print(findings if findings.errors or findings.warnings else 'Nothing to mend.')
    sys.exit(1 if findings.errors else 0)


if __name__ == '__main__':
    main()
