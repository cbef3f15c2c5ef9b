"""The results of one run of the loop, from its log: how fast it went, and what became of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.bench.loop_checks import committed_steps
from rollbook.store import Event, Store
from rollbook.store.cut import Cut
from rollbook.store.events import StepCommitted, StepPlanned, SyncFinished
from rollbook.store.fold.trajectory import fold
from rollbook.testing.ledger import DROPPED, Ledger, fold_ledger
from rollbook.train.select.samples import Sample, all_samples

STALE = "staleness"


@dataclass(frozen=True, slots=True)
class Lap:
    """One run.

    Attributes:
        turns_per_s: turns that the counted steps trained, over the time from the last step before them on.
        wait_s, step_s, sync_s: of each counted step: for samples, for itself, for checkpoint and engines.
        staleness: of every trained sample, in versions.
        stale: trained samples beyond the budget.
        generated, dropped: tokens of completed turns; of these, dropped for their age.
        unaccounted: tokens, over all cuts that were looked at.
        cuts: how many those were.
    """

    turns_per_s: float
    wait_s: list[float]
    step_s: list[float]
    sync_s: list[float]
    staleness: list[int]
    stale: int
    generated: int
    dropped: int
    unaccounted: int
    cuts: int

    @property
    def dropped_share(self) -> float:
        """Of the generated tokens, those dropped for their age."""
        return self.dropped / max(self.generated, 1)


def lap_of(log: Store, cuts: Sequence[Cut], warm_up: int, max_staleness: int) -> Lap:
    """Read a run's log.

    Args:
        cuts: earlier heads, at each of which the ledger must balance too.
        warm_up: steps at the beginning that are not timed.
    """
    events = list(log.events())
    samples = {s.leaf_turn_id: s for s in all_samples(fold(events).values())}
    ledgers = [fold_ledger(events), *(fold_ledger(log.events(cut)) for cut in cuts)]
    staleness = _staleness(events, samples)
    return Lap(
        _rate(events, samples, warm_up),
        *_parts(events, warm_up),
        staleness,
        sum(versions > max_staleness for versions in staleness),
        sum(ledgers[0].generated.values()),
        _dropped(ledgers[0]),
        sum(abs(tokens) for ledger in ledgers for tokens in ledger.unaccounted().values()),
        len(ledgers),
    )


def _rate(events: Sequence[Event], samples: dict[str, Sample], warm_up: int) -> float:
    ended = [e.time_us for e in events if isinstance(e.record, StepCommitted)]
    trained = {
        turn_id
        for plan, _ in committed_steps(events)[warm_up:]
        for ref in plan.samples
        for turn_id in samples[ref["turn_id"]].turn_ids
    }
    return 1e6 * len(trained) / (ended[-1] - ended[warm_up - 1])


def _parts(events: Sequence[Event], warm_up: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each counted step: waiting for samples, the step itself, checkpoint and sync after it."""
    wait, step, sync = [], [], []
    planned = committed = ready = 0
    count = 0
    for event in events:
        if isinstance(event.record, SyncFinished):
            ready = event.time_us
        elif isinstance(event.record, StepPlanned):
            if count > warm_up:  # the step before was counted, and what followed it
                sync.append(max(ready - committed, 0) / 1e6)
            planned = event.time_us
            if count >= warm_up:
                wait.append((planned - max(ready, committed)) / 1e6)
        elif isinstance(event.record, StepCommitted):
            committed, count = event.time_us, count + 1
            if count > warm_up:
                step.append((committed - planned) / 1e6)
    return wait, step, sync


def _staleness(events: Sequence[Event], samples: dict[str, Sample]) -> list[int]:
    """Of each trained sample: the trainer's version less that of its oldest token."""
    ages = []
    for plan, _ in committed_steps(events):
        for ref in plan.samples:
            oldest = samples[ref["turn_id"]].oldest_version
            ages.append(0 if oldest is None else plan.policy_version - oldest)
    return ages


def _dropped(ledger: Ledger) -> int:
    return sum(entry.tokens for (_, where), entry in ledger.entries.items() if where == (DROPPED, STALE))
