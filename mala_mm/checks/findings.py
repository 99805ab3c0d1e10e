"""What checks find: one line for each kind of fault, with the places where it was met."""

from dataclasses import dataclass, field
from typing import Literal

MAX_MESSAGE = 300
SHOWN_PLACES = 10


@dataclass
class Finding:
    """A fault or an oddity.

    Args:
        severity (str): 'error' keeps a run from starting, 'warning' does not.
        message (str): One line of fewer than 300 characters: what was found where, what was
            expected, what to do.
        places (list[str]): File names, ids and values, one for each time it was met. May be empty.
    """

    severity: Literal['error', 'warning']
    message: str
    places: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.message = ' '.join(self.message.split())
        if len(self.message) >= MAX_MESSAGE:
            self.message = f'{self.message[: MAX_MESSAGE - 4]}...'

    def __str__(self) -> str:
        lines = [f'{self.severity}: {self.message}']
        if len(self.places) > 1:
            lines[0] += f' ({len(self.places)} times)'
        lines += [f'    {place}' for place in self.places[:SHOWN_PLACES]]
        if len(self.places) > SHOWN_PLACES:
            lines.append(f'    ... and {len(self.places) - SHOWN_PLACES} more')
        return '\n'.join(lines)


class Findings:
    """Findings in the order they were first met, equal messages joined into one."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, str], Finding] = {}

    def error(self, message: str, place: str | None = None) -> None:
        """Add what keeps a run from starting."""
        self._add(Finding('error', message), [] if place is None else [place])

    def warning(self, message: str, place: str | None = None) -> None:
        """Add what a user should know of."""
        self._add(Finding('warning', message), [] if place is None else [place])

    def extend(self, other: 'Findings') -> None:
        """Add the findings of another check."""
        for finding in other._by_kind.values():
            self._add(finding, finding.places)

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self._by_kind.values() if f.severity == 'error']

    @property
    def warnings(self) -> list[Finding]:
        return [f for f in self._by_kind.values() if f.severity == 'warning']

    def __str__(self) -> str:
        return '\n'.join(map(str, [*self.errors, *self.warnings]))

    def _add(self, finding: Finding, places: list[str]) -> None:
        kept = self._by_kind.setdefault(
            (finding.severity, finding.message), Finding(finding.severity, finding.message)
        )
        kept.places += [' '.join(place.split()) for place in places]
