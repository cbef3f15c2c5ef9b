"""The invariants of a loop's log, whichever process was killed while it was written. From the
events alone; pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollbook.store.events import (
    Event,
    PolicyActivated,
    PolicyPublished,
    SampleDropped,
    StepAbandoned,
    StepCommitted,
    StepPlanned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
)
from rollbook.store.fold.trajectory import fold
from rollbook.testing.ledger import IN_FLIGHT, WAITING, fold_ledger
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import is_candidate
from rollbook.train.select.samples import samples_of

SHOWN = 5
"""Violations of a kind that are told."""


@dataclass(frozen=True, slots=True)
class Witness:
    """Observations of the loop from outside its log.

    Attributes:
        answered: (trajectory's name, turn's id, text) of every reply that a client got.
        finished: names of the trajectories whose finish was acknowledged.
        engines: addresses, in the order of the marks with which their replies begin.
        group_size: trajectories that make a group.
    """

    answered: Sequence[tuple[str, str, str]]
    finished: Sequence[str]
    engines: Sequence[str]
    group_size: int


def violations(events: Sequence[Event], witness: Witness) -> list[str]:
    """Every violated invariant, each in a line; at most a few of each kind."""
    problems: list[str] = []
    for check in (_once, _all_used, _balanced, _answered, _versions, _digests, _spans):
        wrong = list(check(events, witness))
        problems += wrong[:SHOWN]
        if len(wrong) > SHOWN:
            problems.append(f"... and {len(wrong) - SHOWN} more like that")
    return problems


def committed_steps(events: Iterable[Event]) -> list[tuple[StepPlanned, StepCommitted]]:
    """The committed steps that were not abandoned, with their plans, in the order in which they committed."""
    plans: dict[tuple[int, int], StepPlanned] = {}
    steps = []
    for event in events:
        if isinstance(event.record, StepPlanned):
            plans[event.record.step, event.record.attempt] = event.record
        elif isinstance(event.record, StepCommitted):
            steps.append((plans[event.record.step, event.record.attempt], event.record))
        elif isinstance(event.record, StepAbandoned):
            steps = [step for step in steps if step[1].step != event.record.step]
    return steps


def _once(events: Sequence[Event], witness: Witness) -> Iterator[str]:
    """Every sample of every whole group was used or dropped exactly once."""
    ways: dict[str, Counter[str]] = defaultdict(Counter)
    committed = set()
    for plan, _ in committed_steps(events):
        committed.add((plan.step, plan.attempt))
        for ref in plan.samples:
            ways[str(ref["turn_id"])][f"trained by step {plan.step}"] += 1
    # The same decision may be told twice: by a trainer that was killed before its plan, and by the next.
    drops = {
        (e.record.turn_id, f"dropped at step {e.record.step} ({e.record.rule})")
        for e in events
        if isinstance(e.record, SampleDropped) and (e.record.step, e.record.attempt) in committed
    }
    for turn_id, way in drops:
        ways[turn_id][way] += 1
    wanted = samples_to_use(events, witness.group_size)
    for leaf, name in wanted.items():
        if ways[leaf].total() != 1:
            yield f"sample {leaf} of {name} went {ways[leaf].total()} ways: {dict(ways[leaf])}"
    for leaf in ways.keys() - wanted.keys():
        if ways[leaf].total():
            yield f"{leaf} went {dict(ways[leaf])}, but is no sample of a whole group"


def samples_to_use(events: Iterable[Event], group_size: int) -> dict[str, str]:
    """Leaf turn -> trajectory's name, of every sample of the groups whose members all finished."""
    recipe = RecipeConfig()
    groups = defaultdict(list)
    for trajectory in fold(events).values():
        if trajectory.finished is not None:
            groups[trajectory.opened.group].append(trajectory)
    return {
        sample.leaf_turn_id: sample.name
        for members in groups.values()
        if len(members) >= group_size
        for trajectory in members
        for sample in samples_of(trajectory, recipe.reward_source)
        if is_candidate(sample, recipe)
    }


def _all_used(events: Sequence[Event], witness: Witness) -> Iterator[str]:
    """Nothing that was finished is left, in tokens; nothing that a client finished is open."""
    for (maker, (term, _)), entry in fold_ledger(events).entries.items():
        if term in (WAITING, IN_FLIGHT) and entry.tokens:
            yield f"{entry.tokens} tokens of {entry.turns} turns by version {maker.version} are {term}"
    names = {e.record.trajectory_id: e.record.name for e in events if isinstance(e.record, TrajectoryOpened)}
    ended = Counter(names[e.record.trajectory_id] for e in events if isinstance(e.record, TrajectoryFinished))
    for name in witness.finished:
        if ended[name] != 1:
            yield f"trajectory {name}, which its client finished, has {ended[name]} ends in the log"


def _balanced(events: Sequence[Event], witness: Witness) -> Iterator[str]:
    """The ledger accounts for every token."""
    for maker, tokens in fold_ledger(events).unaccounted().items():
        yield f"the ledger does not account for {tokens} tokens of version {maker.version}"


def _answered(events: Sequence[Event], witness: Witness) -> Iterator[str]:
    """Every reply that a client got is in the log unchanged."""
    names = {e.record.trajectory_id: e.record.name for e in events if isinstance(e.record, TrajectoryOpened)}
    logged = {
        e.record.turn_id: (names[e.record.trajectory_id], str(e.record.reply.get("content") or ""))
        for e in events
        if isinstance(e.record, TurnCompleted)
    }
    for name, turn_id, text in witness.answered:
        if logged.get(turn_id) != (name, text):
            yield f"{name} was answered {text!r} by turn {turn_id}; the log has {logged.get(turn_id)}"


def _versions(events: Sequence[Event], witness: Witness) -> Iterator[str]:
    """Steps and versions follow each other without a gap, and each begins where the last one ended."""
    last: str | None = None
    for number, (plan, done) in enumerate(committed_steps(events)):
        if (plan.step, plan.policy_version, done.policy_version) != (number, number, number + 1):
            versions = f"{plan.policy_version} to {done.policy_version}"
            yield f"step {plan.step} goes from version {versions}, where {number} to {number + 1} was due"
        if last is not None and plan.input_digests["input_weights"] != last:
            yield f"step {plan.step} began with other weights than the step before it made"
        last = str(done.digests["weights"])


def _digests(events: Sequence[Event], witness: Witness) -> Iterator[str]:
    """Weights published or activated as a version are those that its step made."""
    known: dict[int, set[str]] = defaultdict(set)
    for _, done in committed_steps(events):
        known[done.policy_version].add(str(done.digests["weights"]))
    for event in events:
        if isinstance(event.record, PolicyPublished):
            known[event.record.policy_version].add(event.record.weights_digest)
    for version, digests in sorted(known.items()):
        if len(digests) > 1:
            yield f"version {version} has {len(digests)} weights: {sorted(digests)}"
    for event in events:
        record = event.record
        if isinstance(record, PolicyActivated) and record.weights_digest not in known[record.policy_version]:
            yield f"{record.engine} was given weights as version {record.policy_version} that nobody made"


def _spans(events: Sequence[Event], witness: Witness) -> Iterator[str]:
    """Tokens name only versions that their engine held by then, as its checksums proved.

    Lanes are compared by the clock of the one machine that wrote them.
    """
    activated: dict[tuple[str, int], int] = {}
    for event in events:
        if isinstance(event.record, PolicyActivated):
            key = (event.record.engine, event.record.policy_version)
            activated[key] = min(event.time_us, activated.get(key, event.time_us))
    for event in events:
        record = event.record
        if not isinstance(record, TurnCompleted) or not record.version_spans:
            continue
        engine = witness.engines[int(str(record.reply["content"])[0])]
        for span in record.version_spans:
            since = activated.get((engine, span.version))
            if since is None or since > event.time_us:
                yield f"turn {record.turn_id} has tokens of version {span.version}, not yet given to {engine}"
        covered = [i for span in record.version_spans for i in range(span.start, span.end)]
        if covered != list(range(len(record.completion_ids))):
            yield f"turn {record.turn_id}: its version spans do not cover its tokens once each"
