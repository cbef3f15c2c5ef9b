"""What rules drop, as columns: candidates by their numbers, and details once somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollbook.store.events import Json

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """What one rule drops.

    Attributes:
        rule: its name.
        at: int64 [D], the candidates' indexes, in order.
        detail: of the candidate of an index, the numbers that the rule compared.
    """

    rule: str
    at: Ints
    detail: Callable[[int], Json]


@dataclass(frozen=True, slots=True, eq=False)
class Drops:
    """All that is dropped of N candidates, each by one rule. Iterating gives (number, rule, detail).

    Attributes:
        alone: by rules that look at each candidate alone, which are read in the order of candidates.
        compared: by rules that compare candidates, which are read after them, rule by rule.
        numbers: int64 [N], what candidates are called; None: by their indexes.
    """

    alone: tuple[Dropped, ...]
    compared: tuple[Dropped, ...] = ()
    numbers: Ints | None = None

    def __len__(self) -> int:
        return sum(len(dropped.at) for dropped in (*self.alone, *self.compared))

    def __iter__(self) -> Iterator[tuple[int, str, Json]]:
        alone = sorted((at, rule) for rule, dropped in enumerate(self.alone) for at in dropped.at.tolist())
        for at, rule in alone:
            yield self._number(at), self.alone[rule].rule, self.alone[rule].detail(at)
        for dropped in self.compared:
            for at in dropped.at.tolist():
                yield self._number(at), dropped.rule, dropped.detail(at)

    def _number(self, at: int) -> int:
        return at if self.numbers is None else int(self.numbers[at])

    def called(self, numbers: Ints) -> Drops:
        """The same, of candidates that are called by these numbers, int64 [N]."""
        return replace(self, numbers=numbers)
