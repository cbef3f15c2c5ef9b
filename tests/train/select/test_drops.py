"""What rules drop: read in order, with details made only then."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollbook.train.select.drops import Dropped, Drops


def test_drops_are_read_in_order() -> None:
    """Those of rules that look at one candidate by candidate, then those that compare, rule by rule."""
    calls: list[int] = []

    def detail(at: int) -> dict[str, Any]:
        calls.append(at)
        return {"at": at}

    drops = Drops(
        (Dropped("a", np.array([1, 4]), detail), Dropped("b", np.array([0, 3]), lambda at: {})),
        (Dropped("c", np.array([6]), detail), Dropped("d", np.array([2]), detail)),
    )
    assert (len(drops), calls) == (6, [])
    expected = [
        *[(0, "b", {}), (1, "a", {"at": 1}), (3, "b", {}), (4, "a", {"at": 4})],
        *[(6, "c", {"at": 6}), (2, "d", {"at": 2})],
    ]
    assert list(drops) == expected
    called = drops.called(np.arange(7) * 10)
    assert list(called) == [(10 * at, rule, detail) for at, rule, detail in expected]
    assert (len(Drops(())), list(Drops(()))) == (0, [])
