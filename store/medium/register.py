"""A register: one value that hosts replace in turn, each having seen the one before.

It is a sequence of which only the newest entry counts. Who replaces a value puts the next number, so that of
two who have seen the same value one succeeds. Older entries are removed by whoever replaced them.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollbook.store.errors import CorruptionError
from rollbook.store.medium.medium import Medium

KEPT = 16
"""Older entries that stay: who reads the newest one's number may be slow to read the entry."""


class Register:
    """A JSON value in a sequence of a medium."""

    def __init__(self, medium: Medium, sequence: str) -> None:
        self._medium, self.sequence = medium, sequence
        self.number = -1
        """Of the newest entry that was seen; -1: there was none."""

    def read(self) -> Any:
        """The newest value; None where there is none.

        Raises:
            MediumError: no answer, or a refusal.
            CorruptionError: it is no JSON.
        """
        # Whoever has seen an entry asks for what follows it: to look for the newest one costs more.
        value: Any = None
        if self.number < 0 or not self._medium.read(self.sequence, self.number):
            self.number = self._medium.last(self.sequence) or 0
        while entry := self._medium.read(self.sequence, self.number):
            value = entry[0]
            self.number += 1
        self.number -= 1
        return None if value is None else self._parsed(value)

    def _parsed(self, entry: bytes) -> Any:
        try:
            return orjson.loads(entry)
        except ValueError as error:
            raise CorruptionError(f"{self._medium.address}, {self.sequence}: {error}: remove it") from error

    def replace(self, value: Any) -> bool:
        """Put a value after the newest one that was seen; False: another one is there by now.

        Raises:
            MediumError: no answer, or a refusal; the value may be there or not.
        """
        if not self._medium.put(self.sequence, self.number + 1, orjson.dumps(value)):
            return False
        self.number += 1
        if self.number % KEPT == 0:
            self._medium.forget(self.sequence, self.number - KEPT)
        return True
