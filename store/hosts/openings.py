"""Which lanes are written: a sequence in the medium that has the name of a lane once its writer has begun.

Who follows reads it, so that a new lane is found by one request, however many there are, and lanes that were
idle for long need not be looked at often. A name comes behind the lane's first chunk: whoever has listed the
lanes before that chunk was there has yet to read the name.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.store.hosts.session import seconds
from rollbook.store.medium.medium import LANES, OPENED, Medium

KEPT = 4096
"""Names that stay; who has missed one that is gone lists all lanes."""
IDLE_S = 600.0
"""A lane that was idle for so long is announced when something is put there: others look at it less often."""
AT_ONCE = 32
GAP_LOOK_S = 30.0
"""Between two looks whether names were missed."""


def announce(medium: Medium, sequence: str) -> None:
    """Have followers look at a lane, in which something was put.

    Raises:
        MediumError: the medium does not answer.
    """
    newest = medium.last(OPENED)
    number = 0 if newest is None else newest + 1
    while not medium.put(OPENED, number, sequence.encode()):
        number += 1
    if number % (KEPT // 4) == 0:
        medium.forget(OPENED, number - KEPT)


@dataclass(slots=True)
class Openings:
    """Lists all lanes when it is first asked, and reads the names from then on. One thread uses it."""

    medium: Medium
    _number: int | None = None
    """Of the entry to come; None: it is not known which lanes there are."""
    _looked: float = 0.0

    def since(self) -> list[str]:
        """The sequences of lanes that were taken since the last call that returned; perhaps of all.

        Raises:
            MediumError: the medium does not answer.
        """
        if self._number is None or self._missed(self._number):
            newest = self.medium.last(OPENED)
            every = self.medium.sequences(LANES)
            self._number, self._looked = 0 if newest is None else newest + 1, seconds()
            return every
        names: list[str] = []
        most = 1  # mostly there is none, and each that is asked for is a request
        while entries := self.medium.read(OPENED, self._number + len(names), most):
            names += [entry.decode() for entry in entries]
            most = AT_ONCE
        self._number += len(names)
        return names

    def _missed(self, number: int) -> bool:
        """Whether the entry to come is gone, as this process was away for long."""
        if seconds() - self._looked < GAP_LOOK_S:
            return False
        self._looked = seconds()
        oldest = self.medium.first(OPENED)
        return oldest is not None and oldest > number
