"""Groups from a stream of events, each used once, as the staleness policy selects them.

Trajectories that still run are tracked as the groups that they will form. While the source waits
for samples, it reports what it waits for, and its wait is bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollbook.store import patience as store
from rollbook.store.cut import Cut
from rollbook.store.errors import IdleError
from rollbook.store.events import VOID, Event, TrajectoryFinished, TrajectoryOpened, TurnCompleted
from rollbook.store.fold.history import History
from rollbook.store.fold.staleness import PromptGroup, StalenessPolicy
from rollbook.store.fold.trajectory import TrajectoryFold
from rollbook.train.select.groups import Begun, CompleteGroup
from rollbook.train.select.recipe import Candidate, Drop, ModelLimits, mark_decided, mixture_in
from rollbook.train.select.routing import FitCheck
from rollbook.train.select.sample_ref import SampleRef
from rollbook.train.select.samples import Sample
from rollbook.train.select.sorting import candidates_in, select
from rollbook.train.sources.backlog import Backlog, Ended
from rollbook.train.sources.selection import Choosing, Evicted, Selection

# size: one queue; what comes into it, what waits, and what is chosen and let go change the same tables


POLL_S = 0.02
BROKEN_OFF = ("aborted", "failed")
NEWER = "newer_version"
COMPARED = ("zero_variance", "group_incomplete", "no_reward")
"""Rules by which a reward that is still to come may decide otherwise."""


class QueueSource:
    """Groups that are used once each, from a stream of events.

    Args:
        more: gives further events (an empty list when there are none yet), or None at the end.
        cut: gives the cut of the events handed out so far.
        backlog: what there is before the first of these events.
        live: whether rewards of finished trajectories may still come.
        limits: of the model.
        say: called with what is waited for, where nothing comes for `admission.stall_s`.
    """

    def __init__(
        self,
        config: Choosing,
        history: History,
        more: Callable[[], list[Event] | None],
        cut: Callable[[], Cut],
        backlog: Backlog | None = None,
        *,
        live: bool = True,
        limits: ModelLimits | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._say = say
        self._config, self._more, self._cut, self._live, self._limits = config, more, cut, live, limits
        self._check = None if (mixture := mixture_in(limits)) is None else FitCheck(mixture)
        self._backlog, self._ended = backlog, dict[str, Ended]()
        """What there was before, and those trajectories of it that may be used."""
        recipe, demand = config.recipe, config.algorithm.demand
        self._grouped, self._size = "groups" in config.algorithm.needs, demand.group_size
        self._groups_of_step = demand.groups
        order = config.admission.order
        self._policy = StalenessPolicy(demand.groups, recipe.max_staleness, order, demand.steps)
        self._share = recipe.deciding_share
        self._used = history.consumed() | history.dropped
        self._trained = history.trained_trajectories() if recipe.paths != "all" else set[str]()
        """Of which no path is taken any more: it would train the turns that they share once more."""
        self._folding = TrajectoryFold()
        self._complete_groups: dict[str, CompleteGroup] = {}
        """Complete ones, in the order in which they completed."""
        self._held: dict[str, None] = {}
        """Those that the next selection will have."""
        self._by_trajectory: dict[str, list[CompleteGroup]] = {}
        """Trajectory -> its group, or the groups of its samples."""
        self._running = Running(self._size, self._share, grouped=self._grouped)
        self._groups: dict[str, dict[str, Begun]] = {}
        """Group -> its finished trajectories, while they are too few."""
        self._spent: Counter[str | None] = Counter()
        """Group -> how many members of it are known that was used before this process began."""
        self._made = 0
        self._seen = 0 if backlog is None else len(backlog)
        self._fit: dict[str, tuple[int, list[Candidate], list[Drop]]] = {}
        """Group -> (version, what the recipe keeps and drops of it), until an event changes it."""
        self._served = self._served_before = -1
        self._begun = backlog is None
        self._waits_since: float | None = None
        """When the wait for the next selection began."""

    def take(self, version: int, served: int, evicted: Evicted) -> Selection | None:
        """Wait for the groups that the policy selects, held ones first.

        Raises:
            IdleError: nothing came for `idle_timeout_s`.
        """
        chosen = self._wait(version, served, evicted, self._groups_of_step)
        while chosen is not None:
            selection = self._selection(chosen, version)
            if selection.samples:
                self._waits_since = None
                return selection
            # Groups without a difference in reward have had their turn: others wait for their places.
            evicted(mark_decided(selection.drops, version, selection.cut))
            chosen = self._wait(version, served, evicted, self._groups_of_step)
        return None

    def hold(self, version: int, served: int, evicted: Evicted, count: int) -> list[Sample] | None:
        """Wait until so many groups of the next selection are there, and hold them for it; returns
        the samples of those that were not held before, in order. Arguments as of `take`.

        Until then nothing is decided about them: a reward may still come by which the recipe
        drops one.

        Raises:
            IdleError: nothing came for `idle_timeout_s`.
        """
        chosen = self._wait(version, served, evicted, count)
        if chosen is None:
            return None
        fresh = [group for group in chosen[:count] if group.name not in self._held]
        self._held |= dict.fromkeys(group.name for group in fresh)
        return self._with_tokens([sample for group in fresh for sample in self._fitting(group, version)[0]])

    def _wait(self, version: int, served: int, evicted: Evicted, count: int) -> list[CompleteGroup] | None:
        """Wait until at least so many groups are there for the next step; None at the end."""
        # What began while the last step was taken may have begun under the version before.
        self._served_before = served if self._served < 0 else self._served
        self._served = served
        if not self._begun:
            self._take_backlog()
        moved, limits = time.monotonic(), (self._config.idle_timeout_s, self._config.admission.stall_s)
        patience = Patience(self._config.run, *limits, self._say)
        self._waits_since = moved if self._waits_since is None else self._waits_since
        while True:
            self._evict(version, evicted)
            impatient = time.monotonic() - self._waits_since > self._config.admission.wait_s
            chosen = self._chosen(version, waits=not impatient)
            if len(chosen) >= count:
                return chosen
            made_before, events = self._made, self._more()
            if events is None:
                return None
            self._take_in(events)
            self._served_before = served
            if self._made > made_before:
                moved = time.monotonic()
            elif not events:
                patience.check(moved, lambda: self._awaits(version))
                time.sleep(POLL_S)

    def unfilled(self, version: int) -> list[Drop]:
        """What the recipe drops of the complete groups; the others stay waiting in the log."""
        drops = [
            drop for group in self._complete_groups.values() for drop in self._fitting(group, version)[1]
        ]
        return mark_decided(drops, version, self._cut())

    # Choosing ---------------------------------------------------------------------------------

    def _evict(self, version: int, evicted: Evicted) -> None:
        """Drop complete groups that can never be used, at once: new ones wait for their places."""
        drops: list[Drop] = []
        for group in list(self._complete_groups.values()):
            if self._unfit(group, version) and not self._awaited(group, version):
                drops += self._fitting(group, version)[1]
                self._remove(group)
        if drops:
            evicted(mark_decided(drops, version, self._cut()))

    def _awaited(self, group: CompleteGroup, version: int) -> bool:
        """Whether the group waits for a reward: a judge gives one after the other, but none for a
        trajectory that broke off."""
        if time.monotonic() - group.completed_s > self._config.admission.wait_s:
            return False
        return self._lacks_reward(group, version)

    def _lacks_reward(self, group: CompleteGroup, version: int) -> bool:
        """Whether the group lacks a reward that may still come."""
        if not self._live:
            return False
        lacking = [d.sample for d in self._fitting(group, version)[1] if d.rule == "no_reward"]
        return any(self._status(sample.trajectory_id) not in (None, *BROKEN_OFF) for sample in lacking)

    def _status(self, trajectory_id: str) -> str | None:
        """How a trajectory ended; None if it has not."""
        if trajectory_id in self._ended:
            return self._ended[trajectory_id].status
        finished = self._folding[trajectory_id].finished
        return None if finished is None else finished.status

    def _chosen(self, version: int, *, waits: bool) -> list[CompleteGroup]:
        """The groups that are ready for the next step, held ones first.

        Args:
            waits: whether to wait for groups that run, or lack a reward, where the policy would.
        """
        awaited = {group.name for group in self._complete_groups.values() if self._awaited(group, version)}
        ready = [
            group
            for group in self._complete_groups.values()
            if (waits if group.name in awaited else not self._unfit(group, version))
        ]
        begun = {group.name: group.began for group in ready}
        groups = [self._as_prompt_group(g, version, complete=g.name not in awaited) for g in ready]
        running = self._running.groups(self._groups, lambda ages: self._oldest(ages, version))
        for began, group in running if waits else ():
            begun[group.name] = began
            groups.append(group)
        if self._policy.order == "fifo":
            groups.sort(key=lambda group: begun[group.name])
        chosen = self._policy.early(groups, version, self._held)
        return [self._complete_groups[group.name] for group in chosen]

    def _oldest(self, ages: Sequence[int], version: int) -> int | None:
        """The oldest of these versions; those that are already too old count only if all are."""
        limit = self._policy.max_staleness
        fresh = [age for age in ages if limit is None or version - age <= limit]
        return min(fresh or ages, default=None)

    def _unfit(self, group: CompleteGroup, version: int) -> bool:
        """Whether the recipe drops all of it; a group without a difference in reward still takes
        its turn, unless the step is to be filled with another."""
        kept, dropped = self._fitting(group, version)
        refill = self._config.recipe.refill
        return not kept and any(refill or drop.rule != "zero_variance" for drop in dropped)

    def _as_prompt_group(self, group: CompleteGroup, version: int, *, complete: bool) -> PromptGroup:
        kept, dropped = self._fitting(group, version)
        usable = [drop.sample for drop in dropped if drop.rule in COMPARED]
        ages = [self._age(sample) for sample in [*kept, *usable]]
        return PromptGroup(group.name, self._oldest([a for a in ages if a is not None], version), complete)

    def _age(self, sample: Candidate) -> int | None:
        """The version by which a sample becomes too old."""
        return sample.deciding_version(self._share)

    def _selection(self, chosen: list[CompleteGroup], version: int) -> Selection:
        """The chosen groups' samples, if any are left of them, and what is dropped."""
        fits = [self._fitting(group, version) for group in chosen]
        kept = self._with_tokens([sample for samples, _ in fits for sample in samples])
        for group in chosen:
            self._remove(group)
        return Selection(kept, [drop for _, drops in fits for drop in drops], self._cut())

    def _with_tokens(self, kept: Sequence[Candidate]) -> list[Sample]:
        refs = [sample for sample in kept if isinstance(sample, SampleRef)]
        read = iter(self._backlog.samples(refs) if self._backlog is not None and refs else ())
        return [sample if isinstance(sample, Sample) else next(read) for sample in kept]

    def _fitting(self, group: CompleteGroup, version: int) -> tuple[list[Candidate], list[Drop]]:
        """What the recipe keeps and drops of a group, given every event handed out: a replay sees
        the same."""
        held = self._fit.get(group.name)
        if held is None or not self._still_fits(held[0], held[2], version):
            samples = [
                sample
                for trajectory_id in group.trajectories
                for sample in self._fresh(trajectory_id)
                if group.leaf in (None, sample.leaf_turn_id)
            ]
            fit = select(samples, self._config.recipe, self._config.algorithm, version, self._limits)
            held = self._fit[group.name] = (version, *fit)
        return held[1], held[2]

    def _still_fits(self, at: int, drops: Sequence[Drop], version: int) -> bool:
        """Whether what the recipe kept and dropped of a group for one version is also right for
        another."""
        if at == version:
            return True
        ages = self._policy.max_staleness is not None  # nothing else becomes another with a later version
        return not ages and at < version and all(drop.rule != NEWER for drop in drops)

    def _samples(self, trajectory_id: str) -> Sequence[Candidate]:
        if trajectory_id in self._ended:
            return self._ended[trajectory_id].samples
        config = self._config
        candidates = candidates_in(self._folding[trajectory_id], config.recipe, self._check, config.policy)
        if trajectory_id in self._trained:
            return [replace(sample, preferred=False) for sample in candidates]
        return candidates

    def _fresh(self, trajectory_id: str) -> list[Candidate]:
        """Its samples that no step has used or dropped."""
        return [sample for sample in self._samples(trajectory_id) if sample.leaf_turn_id not in self._used]

    def _awaits(self, version: int) -> Awaited:
        complete, lacking = self._complete_groups.values(), self._groups.values()
        unrewarded = sum(self._awaited(group, version) for group in complete)
        missing = sum(self._size - len(members) for members in lacking)
        counts = (len(complete), unrewarded, len(lacking), missing, len(self._running))
        return Awaited(self._groups_of_step, *counts)

    # What happens -----------------------------------------------------------------------------

    def _take_in(self, events: list[Event]) -> None:
        """Fold events up to a closed cut, and only then look at the trajectories that they finish.

        The beginning of an adopted trajectory may be in another lane, and be read later.
        """
        self._unfold({getattr(event.record, "trajectory_id", "") for event in events})
        for event in events:
            if event.run == self._config.run:
                self._folding.add(event)
                self._note(event)
        self._folding.close()
        ended = [e.record.trajectory_id for e in events if isinstance(e.record, TrajectoryFinished)]
        there = filter(self._folding.__contains__, ended)
        # What was used comes first: who has no sample may have been of its group.
        for trajectory_id in sorted(there, key=lambda finished_id: not self._was_used(finished_id)):
            self._finish(trajectory_id)

    def _take_backlog(self) -> None:
        """Take in the backlog: running trajectories as events, and finished ones by reference."""
        assert self._backlog is not None
        self._begun = True
        self._spent.update(self._backlog.spent)
        self._take_in(self._backlog.events(self._backlog.opened))
        for ended in self._backlog.ended():
            group = (ended.group or ended.trajectory_id) if self._grouped else None
            ages = [age for sample in ended.samples if (age := self._age(sample)) is not None]
            served = (self._served_before, self._served)
            self._running.begin(ended.trajectory_id, group, ended.began, served)
            self._running.sampled(ended.trajectory_id, ages)
            self._ended[ended.trajectory_id] = ended
            self._finish(ended.trajectory_id)

    def _unfold(self, trajectories: set[str]) -> None:
        """Read the events of backlog trajectories that get a further event: a reward, or an
        erasure."""
        touched = trajectories & self._ended.keys()
        if self._backlog is not None and touched:
            for event in self._backlog.events(touched):
                self._folding.add(event)
            for trajectory_id in touched:
                del self._ended[trajectory_id]
                self._backlog.forget(trajectory_id)

    def _forget(self, trajectory_id: str) -> None:
        """Keep nothing of a trajectory: the log has it."""
        if self._ended.pop(trajectory_id, None) is not None and self._backlog is not None:
            self._backlog.forget(trajectory_id)
        self._folding.forget(trajectory_id)

    def _was_used(self, trajectory_id: str) -> bool:
        leaves = (path[-1].turn_id for path in self._folding[trajectory_id].paths())
        return bool(self._used) and any(leaf in self._used for leaf in leaves)

    def _note(self, event: Event) -> None:
        """Note what an event tells about the ages of trajectories and about what can be chosen."""
        record = event.record
        trajectory_id = getattr(record, "trajectory_id", None) or ""
        for used in self._by_trajectory.get(trajectory_id, ()):
            self._fit.pop(used.name, None)
        if isinstance(record, TrajectoryOpened):
            wanted = event.run == self._config.run and record.split in self._config.recipe.splits
            if wanted and trajectory_id not in self._by_trajectory:
                group = (record.group or trajectory_id) if self._grouped else None
                ages = (self._served_before, self._served)
                self._running.begin(trajectory_id, group, self._place(trajectory_id), ages)
        elif isinstance(record, TurnCompleted):
            own = self._config.recipe.own(self._config.policy)
            spans = (span.version for span in record.version_spans if own in (None, span.policy))
            self._running.sampled(trajectory_id, spans)

    def _place(self, trajectory_id: str) -> int:
        """Its position in the order in which trajectories began."""
        if self._backlog is not None and trajectory_id in self._backlog.opened:
            return self._backlog.opened[trajectory_id]
        self._seen += 1
        return self._seen

    def _finish(self, trajectory_id: str) -> None:
        ended = self._running.end(trajectory_id)
        begun = None if self._status(trajectory_id) == VOID else ended
        samples = [] if begun is None else self._samples(trajectory_id)
        fresh = self._fresh(trajectory_id) if samples else []
        if begun is None or (samples and not fresh) or (not samples and self._spent[begun.group]):
            self._forget(trajectory_id)  # of another run or split, void, or used already
            if begun is not None:
                self._spent[begun.group] = (self._spent[begun.group] + 1) % self._size
        elif begun.group is not None:
            self._add_to_group(begun.group, trajectory_id, begun)
        else:
            for sample in fresh:
                self._complete((trajectory_id,), begun.began, sample.leaf_turn_id)
            if not fresh:
                self._forget(trajectory_id)

    def _add_to_group(self, name: str, trajectory_id: str, begun: Begun) -> None:
        """Add a finished trajectory to its group. The first to finish make the group, since more
        may have been asked for than are needed."""
        group = self._groups.setdefault(name, {})
        group[trajectory_id] = begun
        if len(group) < self._size:
            return
        del self._groups[name]
        if any(self._fresh(trajectory_id) for trajectory_id in group):
            self._complete(tuple(group), min(member.began for member in group.values()), None)
        else:
            for member in group:
                self._forget(member)  # nothing in it can be trained

    def _complete(self, trajectories: tuple[str, ...], began: int, leaf: str | None) -> None:
        self._made += 1
        group = CompleteGroup(f"{self._made}", began, trajectories, leaf, time.monotonic())
        self._complete_groups[group.name] = group
        for trajectory_id in trajectories:
            self._by_trajectory.setdefault(trajectory_id, []).append(group)

    def _remove(self, group: CompleteGroup) -> None:
        """Forget the trajectories of a group that no other group needs: the log has them."""
        del self._complete_groups[group.name]
        self._held.pop(group.name, None)
        self._fit.pop(group.name, None)
        for trajectory_id in group.trajectories:
            self._by_trajectory[trajectory_id].remove(group)
            if not self._by_trajectory[trajectory_id]:
                del self._by_trajectory[trajectory_id]
                self._forget(trajectory_id)


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a source waits for.

    Attributes:
        groups: number that the next step takes; complete: number that are complete.
        unrewarded: of the complete ones, those that lack a reward.
        short, missing: groups that lack trajectories, and how many they lack.
        running: trajectories that run.
    """

    groups: int
    complete: int
    unrewarded: int
    short: int
    missing: int
    running: int

    def in_words(self) -> str:
        """The same in words."""
        parts = [f"{self.complete} of {self.groups} groups are complete"]
        if self.unrewarded:
            parts.append(f"{self.unrewarded} of these lack a reward (a judge's?)")
        lack = f" and lack {self.missing} trajectories" if self.missing else ""
        parts.append(f"{self.short} groups are incomplete{lack}")
        parts.append(f"{self.running} trajectories run" if self.running else "none runs")
        if not self.running and not self.unrewarded:
            parts.append(
                "agents have ended, or proxies hold new trajectories (max_staleness, or no engine serves)"
            )
        return "; ".join(parts)


class Patience:
    """The patience of one wait for groups.

    Args:
        idle_s: the wait ends after so long without a new group.
        stall_s: after each so long, what is waited for is reported; the first time after 10 s,
            if that is less.
        say: called with that report.
    """

    def __init__(self, run: str, idle_s: float, stall_s: float, say: Callable[[str], None]) -> None:
        self._run, self._idle_s, self._stall_s, self._say = run, idle_s, stall_s, say
        self._patience: store.Patience | None = None

    def check(self, since: float, awaited: Callable[[], Awaited]) -> None:
        """Report, or end the wait, if it is time to.

        Args:
            since: when the last group came, by the monotonic clock.

        Raises:
            IdleError: nothing came for too long.
        """
        waited = time.monotonic() - since
        if waited > self._idle_s:
            state = awaited()
            raise IdleError(
                f"no complete batch for {self._idle_s:g} s: are agents finishing trajectories of run "
                f"{self._run!r}? ({state.in_words()})"
            )
        if self._patience is None or self._patience.began != since:
            self._patience = store.Patience(since, min(store.SAY_AFTER_S, self._stall_s), self._stall_s)
        if self._patience.due(time.monotonic()):
            until = store.clock(time.time() + self._idle_s - waited)
            self._say(
                f"no new group for {waited:.0f} s: {awaited().in_words()}; waiting until {until} at most "
                "(idle_timeout_s)"
            )


class Running:
    """What is known of trajectories while they run.

    Args:
        grouped: whether groups are used, or each trajectory by itself.
        size: trajectories of a group.
        deciding_share: of a sample's tokens, as the recipe has it.
    """

    def __init__(self, size: int, deciding_share: float, *, grouped: bool) -> None:
        self._grouped, self._size = grouped, size
        self._deciding: Callable[[Iterable[int]], int] = max if deciding_share == 1 else min
        """Of what is known so far of a trajectory, the version by which it becomes too old."""
        self._begun: dict[str, Begun] = {}

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def unsampled(self) -> bool:
        """Whether there is a trajectory of which no token is known."""
        return not all(begun.sampled for begun in self._begun.values())

    def begin(self, trajectory_id: str, group: str | None, began: int, ages: tuple[int, ...]) -> None:
        """A trajectory begins; its oldest token may be of one of these versions."""
        self._begun[trajectory_id] = Begun(group, began, ages)

    def sampled(self, trajectory_id: str, versions: Iterable[int]) -> None:
        """Note the versions of tokens that were sampled for a trajectory, if it runs."""
        if (begun := self._begun.get(trajectory_id)) is not None and (new_versions := list(versions)):
            begun.ages = (self._deciding([*(begun.ages if begun.sampled else ()), *new_versions]),)
            begun.sampled = True

    def end(self, trajectory_id: str) -> Begun | None:
        """A trajectory ends; returns what was known of it, or None if it is not wanted."""
        return self._begun.pop(trajectory_id, None)

    def groups(
        self, ended: Mapping[str, Mapping[str, Begun]], oldest: Callable[[Sequence[int]], int | None]
    ) -> Iterator[tuple[int, PromptGroup]]:
        """The groups that running trajectories will complete, with their positions in the order of
        beginning.

        Args:
            ended: group -> those of its trajectories that finished.
            oldest: of versions, the one that counts.
        """
        if not self._grouped:
            for name, begun in self._begun.items():
                yield begun.began, PromptGroup(f"running {name}", oldest(begun.ages), complete=False)
            return
        groups: dict[str, list[Begun]] = {}
        for begun in self._begun.values():
            groups.setdefault(str(begun.group), []).append(begun)
        for group, members in groups.items():
            members += ended.get(group, {}).values()
            if len(members) >= self._size:
                ages = oldest([age for member in members for age in member.ages])
                yield min(m.began for m in members), PromptGroup(f"running {group}", ages, complete=False)
