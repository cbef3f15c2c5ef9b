"""Binds each policy version to one weights digest, that of the first event that names the version. Pure.

Several kinds of events name the weights digest of a version: a checkpoint written or published, an engine
verified to hold it, a step that made it. They must agree. In the order of event ids, which sort by time
across lanes, the first event binds the version; a later event with another digest is disputed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbook.store.digest import is_tree
from rollbook.store.errors import VersionError
from rollbook.store.events import (
    CheckpointWritten,
    Event,
    PolicyActivated,
    PolicyPublished,
    StepCommitted,
    TurnCompleted,
)

BINDING = frozenset(r.KIND for r in (CheckpointWritten, PolicyActivated, PolicyPublished, StepCommitted))
"""Kinds of events that say a version's digest."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A version's weights digest, and the event that first named it."""

    digest: str
    event_id: str
    kind: str
    where: str
    """The path or the engine that the event names, or the step."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The run, policy and version that a folder of weights claims to be. Names are reused, also by
    other stores: the claim holds only for a log that binds that version to the same digest."""

    run: str
    policy: str
    version: int
    digest: str


@dataclass(slots=True)
class VersionDigests:
    """The weights digest of each (run, policy, version); events may come in any order.

    Attributes:
        disputed: bindings of later events to another digest.
    """

    _bound: dict[tuple[str, str, int], Bound] = field(default_factory=dict)
    disputed: dict[tuple[str, str, int], list[Bound]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take an event, of whichever kind."""
        named = _named_version(event)
        if named is None:
            return
        version, bound = named
        key = (event.run, *version)
        first = self._bound.setdefault(key, bound)
        if bound.event_id < first.event_id:
            self._bound[key], bound, first = bound, first, bound
        if bound.digest != first.digest:
            self.disputed.setdefault(key, []).append(bound)

    def of(self, run: str, policy: str, version: int) -> Bound | None:
        """What the version is bound to, None where no event has named it."""
        return self._bound.get((run, policy, version))

    def own(self, run: str, policy: str, origin: Origin | None) -> int | None:
        """Which of a policy's versions a folder of weights is; None if it is none: a model without
        an origin, or a version of another run, policy or store."""
        if origin is None or (origin.run, origin.policy) != (run, policy):
            return None
        bound = self.of(run, policy, origin.version)
        return None if bound is None or bound.digest != origin.digest else origin.version

    def trees(self, run: str, policy: str) -> bool:
        """Whether a policy's weights are digested by blocks: all of its versions are, or none; those of one
        that no event has named are going to be."""
        digests = (bound.digest for (r, p, _), bound in self._bound.items() if (r, p) == (run, policy))
        return all(map(is_tree, digests))

    def newest(self, run: str, policy: str) -> int:
        """The highest version that any event has named, -1 where none has named one."""
        return max((v for r, p, v in self._bound if (r, p) == (run, policy)), default=-1)

    def check(self, run: str, policy: str, version: int, digest: str, what: str) -> None:
        """Check that weights are not bound to another digest as this version.

        Args:
            what: description, for the error, of what has these weights.

        Raises:
            VersionError: the version has other weights; with the remedy.
        """
        bound = self.of(run, policy, version)
        if bound is None or bound.digest == digest:
            return
        raise VersionError(
            f"{what} is not version {version} of policy {policy} in run {run!r}: its weights digest is "
            f"{digest[:16]}, and that of version {version} is {bound.digest[:16]} since {bound.kind} "
            f"({bound.where}). Use another --run, or the weights that version {version} is"
        )


def unversioned(done: TurnCompleted) -> int:
    """How many of a turn's sampled tokens no known policy version made: they are never trained."""
    return len(done.completion_ids) - sum(span.end - span.start for span in done.version_spans)


def _named_version(event: Event) -> tuple[tuple[str, int], Bound] | None:
    """((policy, version), its binding by this event); None if the event names no weights digest."""
    match event.record:
        case CheckpointWritten() | PolicyPublished() as record:
            digest, where = record.weights_digest, record.path
        case PolicyActivated() as record:
            digest, where = record.weights_digest, record.engine
        case StepCommitted() as record:
            digest, where = str(record.digests.get("weights", "")), f"step {record.step}"
        case _:
            return None
    if not digest:
        return None
    return (record.policy, record.policy_version), Bound(digest, event.event_id, event.kind, where)
