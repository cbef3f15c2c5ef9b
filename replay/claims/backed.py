"""Whether the log backs published and served weights: by a checkpoint, or by the step that made them.

The digest of a version that was published, or that an engine serves, must be that of one of its
checkpoints or of the committed step that made it. Otherwise a forged or mistaken digest would go
unnoticed until a step that leads to its version is replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from rollbook.engines.model_files import MANIFEST
from rollbook.engines.weights.digests import digest_like
from rollbook.replay.verdict import Place, StageReplay, Verdict
from rollbook.store import Store
from rollbook.store.digest import digest_json
from rollbook.store.errors import ModelError, OutsideError
from rollbook.store.events import (
    CheckpointRemoved,
    CheckpointWritten,
    Event,
    PolicyActivated,
    PolicyPublished,
    StepCommitted,
)
from rollbook.store.fold.checkpoints import held_and_removed
from rollbook.store.sealed.unit import current_units
from rollbook.train.checkpoints.checkpoint import read_checkpoint
from rollbook.train.checkpoints.directory import changed_files
from rollbook.train.step.reference import policy_of

STAGE = "backed"
BACKING = frozenset(
    r.KIND for r in (CheckpointWritten, CheckpointRemoved, StepCommitted, PolicyPublished, PolicyActivated)
)
"""Kinds of events that it is folded from."""


@dataclass(frozen=True, slots=True)
class Unbacked:
    """An event with a digest of a version's weights that nothing else in the log has.

    Attributes:
        where: the path or the engine that it names.
        digest: the event's; known: those that the rest of the log has of the version.
    """

    event_id: str
    kind: str
    run: str
    policy: str
    policy_version: int
    where: str
    digest: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        known = ", ".join(digest[:16] for digest in self.known) or "nothing of it"
        return (
            f"{self.kind} {self.event_id} ({self.where}) says that version {self.policy_version} of policy "
            f"{self.policy} in run {self.run!r} has the digest {self.digest[:16]}; checkpoints and steps say "
            f"{known}"
        )


@dataclass(frozen=True, slots=True)
class CheckpointFault:
    """A checkpoint that is not what the log says, or is not there though nothing removed it."""

    run: str
    path: str
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.path} of run {self.run!r}: {self.reason}"


_Version = tuple[str, str, int]
"""(run, policy, version)"""


def unbacked(events: Iterable[Event], *, whole: bool = True) -> list[Unbacked]:
    """The events of `policy.published` and `policy.activated` that nothing backs, ordered by id.

    Policies that were never trained here are passed over: there is nothing to compare them with. Pure.

    Args:
        whole: the log has all of its events; else a version of which nothing is left is passed over.
    """
    ordered = sorted(events, key=lambda event: event.event_id)
    digests = _known_digests(ordered)
    claims = [
        (event, event.record)
        for event in ordered
        if isinstance(event.record, PolicyPublished | PolicyActivated)
    ]
    trained = {version[:2] for version in digests}
    result = []
    for event, record in claims:
        version = (event.run, policy_of(record.policy), record.policy_version)
        known = digests.get(version, set())
        if version[:2] in trained and record.weights_digest not in known and (known or whole):
            where = record.path if isinstance(record, PolicyPublished) else record.engine
            fields = (event.event_id, event.kind, event.run, record.policy, record.policy_version, where)
            result.append(Unbacked(*fields, record.weights_digest, tuple(sorted(known))))
    return result


def _known_digests(events: Iterable[Event]) -> Mapping[_Version, set[str]]:
    """The digests of each version's weights, by checkpoints and steps."""
    digests = defaultdict[_Version, set[str]](set)
    for event in events:
        match event.record:
            case CheckpointWritten() as record:
                digests[event.run, record.policy, record.policy_version].add(record.weights_digest)
            case StepCommitted() as record if "weights" in record.digests:
                digests[event.run, record.policy, record.policy_version].add(record.digests["weights"])
    return digests


def find_unbacked(log: Store, run: str | None = None) -> list[Unbacked]:
    """The unbacked events of a store, or of one run of it."""
    events = (event for event in log.events_of(BACKING) if run in (None, event.run))
    return unbacked(events, whole=_is_whole(log))


def backed(log: Store, run: str, policy: str, versions: Collection[int]) -> StageReplay | None:
    """The stage `backed` of some versions; None where none of them was published or served, or the log no
    longer has anything that could back them."""
    events = [event for event in log.events_of(BACKING) if event.run == run]
    whole = _is_whole(log)
    left = {} if whole else _known_digests(events)
    claims = {
        event.event_id: record.weights_digest
        for event in events
        if isinstance(record := event.record, PolicyPublished | PolicyActivated)
        and policy_of(record.policy) == policy
        and record.policy_version in versions
        and (whole or (run, policy, record.policy_version) in left)
    }
    if not claims:
        return None
    odd = [mismatch for mismatch in unbacked(events, whole=whole) if mismatch.event_id in claims]
    due = claims | {mismatch.event_id: ",".join(mismatch.known) for mismatch in odd}
    digests = digest_json(claims), digest_json(due)
    if not odd:
        return StageReplay(STAGE, Verdict.equal, *digests)
    recorded, known = odd[0].digest, ", ".join(odd[0].known) or "nothing"
    place = Place(key=f"{odd[0].kind} {odd[0].event_id}", recorded=recorded, replayed=known)
    return StageReplay(STAGE, Verdict.differs, *digests, why=str(odd[0]), place=place)


def _is_whole(log: Store) -> bool:
    """Whether the log has all of its events."""
    units = [unit for lane in log.lanes() for unit in current_units(log.path, lane)]
    return not any(unit.left_out or unit.dropped_us is not None for unit in units)


def checkpoints_of(log: Store) -> list[tuple[str, CheckpointWritten]]:
    """(run, checkpoint) of all that were written and not removed since; the last of each path."""
    of_runs: dict[str, list[Event]] = {}
    for event in log.events_of({CheckpointWritten.KIND, CheckpointRemoved.KIND}):
        of_runs.setdefault(event.run, []).append(event)
    held = [(run, record) for run, events in of_runs.items() for record in held_and_removed(events)[0]]
    return list({(run, record.path): (run, record) for run, record in held}.values())


def checkpoint_faults(
    log: Store, checkpoints: Iterable[tuple[str, CheckpointWritten]], done: Callable[[int], None]
) -> list[CheckpointFault]:
    """Read checkpoints whole, and compare them with their own manifests and with the log.

    Args:
        done: called with 1 after each.
    """
    faults = []
    for run, record in checkpoints:
        if (reason := _fault(log, record)) is not None:
            faults.append(CheckpointFault(run, record.path, reason))
        done(1)
    return faults


def _fault(log: Store, record: CheckpointWritten) -> str | None:
    try:
        path = log.folder(record.path)
        if not path.is_dir():
            return "it is not there, and nothing in the log has removed it"
        held = read_checkpoint(path)
        changed = changed_files(path)
    except (ModelError, OutsideError, OSError) as error:
        return str(error)
    if changed:
        return f"{', '.join(changed)}: not the sha256 that its {MANIFEST} names"
    pairs = [("weights", held.weights, record.weights_digest)]
    if held.optimizer is not None and record.optimizer_digest is not None:
        pairs.append(("optimizer", held.optimizer, record.optimizer_digest))
    for what, tensors, wanted in pairs:
        if (digest := digest_like(tensors, wanted)) != wanted:
            return f"its {what} have the digest {digest[:16]}, and the log says {wanted[:16]}"
    return None
