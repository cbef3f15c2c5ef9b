"""The staleness policy: what it lets begin is never too old, and never stands still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store.fold.staleness import Order, PromptGroup, StalenessPolicy

counts = st.integers(1, 4)
limits = st.integers(0, 4)


@given(counts, limits, st.integers(0, 20), st.integers(0, 60))
def test_capacity_is_areals(batch: int, limit: int, step: int, begun: int) -> None:
    """Where each step uses a batch and engines serve what is trained: (limit + step + 1) * batch - begun."""
    policy = StalenessPolicy(batch, limit)
    assert policy.capacity(begun - step * batch, step, step) == (limit + step + 1) * batch - begun


@given(counts, limits, st.integers(0, 20), st.integers(0, 6))
def test_a_lag_of_the_engines_takes_its_batches(batch: int, limit: int, version: int, lag: int) -> None:
    """What begins under an older version is that much older already; a newer one makes nothing younger."""
    policy = StalenessPolicy(batch, limit)
    assert policy.capacity(0, version, version - lag) == (limit - lag + 1) * batch
    assert policy.capacity(0, version, version + lag) == (limit + 1) * batch
    assert StalenessPolicy(batch).capacity(10**6, version, 0) is None


# A loop of agents and a trainer -------------------------------------------------------------------


def _select(
    policy: StalenessPolicy, units: Sequence[PromptGroup], version: int, held: Sequence[str] = ()
) -> list[PromptGroup] | None:
    """What a step uses, once all of it is there; None: it waits."""
    chosen = policy.early(units, version, held)
    return chosen if len(chosen) == policy.batch else None


@dataclass
class Loop:
    """Agents that begin whenever they may, and a trainer that takes a step whenever it can."""

    policy: StalenessPolicy
    sync_every: int = 1
    version: int = 0
    served: int = 0
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    """PromptGroup -> (version of its oldest token, ticks until it is complete)."""
    ready: dict[str, int] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    used: list[tuple[str, int]] = field(default_factory=list)
    """Units in the order in which they were used, with their staleness then."""
    evicted: int = 0
    holds: bool = False
    """Whether the trainer holds the units of its next step as they complete."""
    held: list[str] = field(default_factory=list)

    def tick(self, durations: st.SearchStrategy[int], data: st.DataObject) -> None:
        """One moment: some begin, some end, and a step is taken if there is one to take."""
        outstanding = len(self.running) + len(self.ready)
        room = self.policy.capacity(outstanding, self.version, self.served)
        for _ in range(max(min(6, 6 if room is None else room), 0)):
            name = f"u{len(self.begun)}"
            self.begun.append(name)
            self.running[name] = (self.served, data.draw(durations))
        for name, (oldest, left) in list(self.running.items()):
            self.running[name] = (oldest, left - 1)
            if left <= 1:
                del self.running[name]
                self.ready[name] = oldest
        self._step()

    def _units(self) -> list[PromptGroup]:
        units = [PromptGroup(name, oldest, complete=True) for name, oldest in self.ready.items()]
        units += [PromptGroup(name, oldest, complete=False) for name, (oldest, _) in self.running.items()]
        if self.policy.order == "fifo":
            units.sort(key=lambda unit: self.begun.index(unit.name))
        return units

    def _step(self) -> None:
        for unit in _evicted(self.policy, self._units(), self.version):
            self.evicted += 1
            del self.ready[unit.name]
        early = self.policy.early(self._units(), self.version, self.held)
        assert [unit.name for unit in early[: len(self.held)]] == self.held, "what is held comes first"
        if self.holds:
            self.held = [unit.name for unit in early]
        chosen = _select(self.policy, self._units(), self.version, self.held)
        if chosen is None:
            return
        self.held = []
        assert len(chosen) == self.policy.batch
        for unit in chosen:
            self.used.append((unit.name, self.version - self.ready.pop(unit.name)))
        self.version += 1
        if self.version % self.sync_every == 0:
            self.served = self.version


@pytest.mark.parametrize("order", ["windowed", "fifo"])
@given(data=st.data(), batch=counts, limit=limits, longest=st.integers(1, 40))
@settings(max_examples=60)
def test_nothing_is_ever_too_old_and_nothing_waits_for_ever(
    order: Order, data: st.DataObject, batch: int, limit: int, longest: int
) -> None:
    """However long units run, and however often engines are synced: each is used in time, none is lost.

    Engines that are synced more rarely than `limit` allows could serve nothing that may begin.
    """
    every = data.draw(st.integers(1, limit + 1), "sync every")
    loop = Loop(StalenessPolicy(batch, limit, order), every, holds=data.draw(st.booleans(), "holds"))
    durations = st.integers(1, longest)
    for _ in range(60 + 4 * longest):
        before = loop.version
        loop.tick(durations, data)
        held = [*loop.ready.values(), *(oldest for oldest, _ in loop.running.values())]
        assert all(loop.version - oldest <= limit for oldest in held), "what is there may still be used"
        assert before <= loop.version <= before + 1
        assert set(loop.held) <= loop.ready.keys()
    assert all(staleness <= limit for _, staleness in loop.used)
    assert loop.evicted == 0
    assert loop.version >= 60 // longest, "it goes on"
    if order == "fifo":
        assert [name for name, _ in loop.used] == loop.begun[: len(loop.used)]


@given(data=st.data(), batch=counts, limit=limits)
@settings(max_examples=40)
def test_age_waits_for_none(data: st.DataObject, batch: int, limit: int) -> None:
    """It may lose slow units, uses none that is too old, and takes a step as soon as a batch is ready."""
    loop = Loop(StalenessPolicy(batch, limit, "age"))
    for _ in range(60):
        loop.tick(st.sampled_from([1, 1, 1, 30]), data)
        assert len(loop.ready) < 2 * batch * (limit + 1)
        fresh = [u for u in loop.ready.values() if loop.version - u <= limit]
        assert len(fresh) < batch * (limit + 1) or _select(loop.policy, loop._units(), loop.version) is None
    assert all(staleness <= limit for _, staleness in loop.used)


# Selection ----------------------------------------------------------------------------------------


def _units(*said: tuple[str, int | None, bool]) -> list[PromptGroup]:
    return [PromptGroup(name, oldest, complete) for name, oldest, complete in said]


def _evicted(policy: StalenessPolicy, units: Sequence[PromptGroup], version: int) -> list[PromptGroup]:
    return [unit for unit in units if unit.complete and policy.stale(unit, version)]


def _names(units: list[PromptGroup] | None) -> list[str] | None:
    return None if units is None else [unit.name for unit in units]


def test_windowed_uses_first_what_would_be_too_old_next() -> None:
    """Then in the order of completion; unknown ages are young."""
    policy = StalenessPolicy(2, 1)
    units = _units(("new", 5, True), ("unknown", None, True), ("old", 4, True))
    assert _names(_select(policy, units, 5)) == ["old", "new"]


def test_windowed_waits_for_a_running_unit_that_would_be_too_old() -> None:
    """Not for a younger one, nor for one that is too old whatever happens."""
    policy = StalenessPolicy(1, 1)
    ready = _units(("new", 5, True))
    assert _select(policy, [*ready, *_units(("runs", 4, False))], 5) is None
    assert _names(_select(policy, [*ready, *_units(("runs", 5, False))], 5)) == ["new"]
    assert _names(_select(policy, [*ready, *_units(("lost", 3, False))], 5)) == ["new"]


def test_fifo_waits_for_each_in_its_turn() -> None:
    """One that runs at the head of the row is waited for; behind the batch it is not."""
    policy = StalenessPolicy(1, 3, "fifo")
    assert _select(policy, _units(("a", 5, False), ("b", 5, True)), 5) is None
    assert _names(_select(policy, _units(("b", 5, True), ("a", 5, False)), 5)) == ["b"]
    assert _names(_select(policy, _units(("lost", 1, False), ("b", 5, True)), 5)) == ["b"]


def test_age_uses_the_oldest() -> None:
    """Whatever runs; unknown ages come first, as nothing says that they are young."""
    policy = StalenessPolicy(2, 3, "age")
    units = _units(("b", 5, True), ("a", 3, True), ("runs", 2, False), ("unknown", None, True))
    assert _names(_select(policy, units, 5)) == ["unknown", "a"]


def test_complete_groups_that_are_too_old_are_evicted() -> None:
    """Complete units that are too old; a running one may lose its oldest member yet."""
    policy = StalenessPolicy(1, 1)
    units = _units(("old", 3, True), ("runs", 3, False), ("just", 4, True), ("unknown", None, True))
    assert _names(_evicted(policy, units, 5)) == ["old"]
    assert _evicted(StalenessPolicy(1), units, 5) == []
