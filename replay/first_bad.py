"""Finds the first step of a training that differs, without running all of it.

From a step on at which code, settings or the machine changed, every step differs when it is run by itself. So
the steps that follow checkpoints are bisected, and then those between two checkpoints run in order: of n
checkpoints that are m steps apart, at most 1 + log2(n) + m steps are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollbook.replay.run_log import RunLog
from rollbook.replay.stretch import Break, chain, prove_segment, segments
from rollbook.replay.verdict import StepReplay
from rollbook.store.errors import ReplayError
from rollbook.store.fold.history import History
from rollbook.store.log.store import Store


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The result of a search.

    Attributes:
        broken: where the chain of recorded digests does not hold, which is seen without running a step.
        ran: steps that were run, in this order.
        first: the first step that differs; None where none of those that were run does.
    """

    run: str
    policy: str
    broken: list[Break]
    ran: list[int]
    first: StepReplay | None


def find_first_bad(
    log: Store,
    history: History,
    first: int,
    last: int,
    *,
    trust_parts: bool = False,
    ran: Callable[[int], None] = lambda step: None,
) -> FirstBad:
    """Find the first step of a stretch that differs, where all that follow it differ too.

    Args:
        ran: told of each step that is run.

    Raises:
        ReplayError: the run has no step there, or one that is needed cannot be replayed.
    """
    parts = segments(history, first, last)
    if not parts:
        raise ReplayError(f"run {history.run!r} has no committed step from {first} to {last}")
    broken, order = chain(history, [n for part in parts for n in part]), list[int]()
    of = RunLog(log, history)

    def replays(steps: Sequence[int]) -> StepReplay | None:
        """The first of these steps that differs."""
        for one in prove_segment(of, steps, trust_parts=trust_parts):
            if one.replay is None:
                raise ReplayError(f"step {one.step} cannot be replayed: {one.why}")
            order.extend(n for n in one.replay.reran if n not in order)
            ran(one.step)
            if not one.replay.equal:
                return one.replay
        return None

    good, bad = 0, len(parts)  # the first steps of parts before `good` are good, of `bad` and after bad
    found: StepReplay | None = None
    while good < bad:
        middle = (good + bad) // 2
        if (differs := replays(parts[middle][:1])) is None:
            good = middle + 1
        else:
            found, bad = differs, middle
    if good > 0 and (within := replays(parts[good - 1])) is not None:
        found = within
    return FirstBad(history.run, history.policy, broken, order, found)
