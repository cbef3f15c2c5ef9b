"""The versions of a policy in a run: which step made each from which, and where each was served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from rollbook.lineage.records import Engine, Evaluation, Place, Sync, Version
from rollbook.store.sql.sandbox import Connection

_OF = "run = $run AND policy = $policy"
_POLICIES = f"""
    SELECT policy_version, parent_version, weights_digest, CASE WHEN published IS NOT NULL THEN path END
    FROM policies WHERE {_OF}"""
_MADE = f"""
    SELECT output_version, policy_version, step, attempt, status = 'abandoned', digests->>'$.weights'
    FROM steps WHERE {_OF} AND output_version IS NOT NULL"""
_SYNCS = f"""
    SELECT policy_version, engine, sync_id, transport, status, bytes, seconds, started, ended, error
    FROM syncs WHERE {_OF} ORDER BY started, sync_id"""
_ACTIVATIONS = f"""
    SELECT policy_version, engine, time, lane, seq, event_id FROM activations WHERE {_OF}
    ORDER BY event_id, lane, seq"""
_EVALUATIONS = f"""
    SELECT policy_version, loss, reward, success, time, whole, trajectories, expected
    FROM evaluations WHERE {_OF} ORDER BY time"""


@dataclass(frozen=True, slots=True)
class Line:
    """The versions of one policy in one run, by number."""

    run: str
    policy: str
    versions: dict[int, Version]

    def version(self, number: int) -> Version:
        """A version; one of which the log says nothing has only its number."""
        return self.versions.get(number) or Version(self.run, self.policy, number)

    def back(self, number: int) -> tuple[Version, ...]:
        """The versions that one was made from, the nearest first."""
        ancestors: dict[int, Version] = {}
        parent = self.version(number).parent
        while parent is not None and parent not in ancestors and parent != number:
            ancestors[parent] = self.version(parent)
            parent = ancestors[parent].parent
        return tuple(ancestors.values())

    def descendants(self, numbers: Iterable[int]) -> tuple[Version, ...]:
        """The versions that were made from these, step by step, without themselves, in order."""
        children = defaultdict(list)
        for version in self.versions.values():
            if version.parent is not None:
                children[version.parent].append(version.version)
        starts = set(numbers)
        reached, waiting = set(starts), list(starts)
        while waiting:
            new = [child for child in children[waiting.pop()] if child not in reached]
            reached.update(new)
            waiting += new
        return tuple(self.versions[number] for number in sorted(reached - starts))


def read_line(connection: Connection, run: str, policy: str) -> Line:
    """The versions of a policy in a run, of which the log says something."""
    parameters = {"run": run, "policy": policy}

    def rows(query: str) -> list[tuple[Any, ...]]:
        return connection.execute(query, parameters).fetchall()

    known: dict[int, Version] = {}
    for number, parent, digest, checkpoint in rows(_POLICIES):
        known[number] = Version(
            run, policy, number, parent, weights_digest=digest or None, checkpoint=checkpoint
        )
    for number, parent, step, attempt, abandoned, digest in rows(_MADE):
        version = known.get(number) or Version(run, policy, number)
        # A checkpoint's parent is the checkpoint before it; the step knows the version.
        known[number] = replace(
            version,
            parent=parent,
            step=step,
            attempt=attempt,
            abandoned=abandoned,
            weights_digest=version.weights_digest or digest,
        )
    engines = _engines(rows(_SYNCS), rows(_ACTIVATIONS))
    evaluations = defaultdict(list)
    for number, *values in rows(_EVALUATIONS):
        evaluations[number].append(Evaluation(*values))
    for number in {*known, *engines, *evaluations}:
        version = known.get(number) or Version(run, policy, number)
        known[number] = replace(
            version,
            engines=tuple(engines.get(number, ())),
            evaluations=tuple(evaluations[number]),
        )
    return Line(run, policy, _marked(known))


def _engines(
    syncs: Iterable[tuple[Any, ...]], activations: Iterable[tuple[Any, ...]]
) -> dict[int, list[Engine]]:
    """Version -> the engines that it came to, those first that were first seen to hold it."""
    engines: dict[tuple[int, str], Engine] = {}
    for number, name, time, *place in activations:
        engine = engines.get((number, name)) or Engine(name, time, (), ())
        held = (*engine.activations, Place(*place))
        engines[number, name] = replace(engine, activations=held)
    for number, name, *values in syncs:
        engine, sync = engines.get((number, name)) or Engine(name, None, (), ()), Sync(*values)
        verified = engine.verified or (sync.ended if sync.status == "finished" else None)
        engines[number, name] = replace(engine, verified=verified, syncs=(*engine.syncs, sync))
    of_version = defaultdict(list)
    for (number, _), engine in engines.items():
        of_version[number].append(engine)
    return of_version


def _marked(versions: dict[int, Version]) -> dict[int, Version]:
    """The versions, each marked that has another's weights under a new number; such a one is abandoned
    where the other is."""
    marked: dict[int, Version] = {}
    for number, version in sorted(versions.items()):  # such a number is higher than any before it
        before = None if version.parent is None else marked.get(version.parent)
        if version.step is None and before is not None and version.weights_digest is not None:
            same = version.weights_digest == before.weights_digest
            version = replace(version, renumbered=same, abandoned=same and before.abandoned)
        marked[number] = version
    return marked


class Lines:
    """The lines of policies, each read once.

    Args:
        read: gives the line of a policy in a run.
    """

    def __init__(self, read: Callable[[str, str], Line]) -> None:
        self.line = cache(read)

    @classmethod
    def over(cls, connection: Connection) -> Lines:
        """Those of a connection's log."""
        return cls(partial(read_line, connection))

    def version(self, run: str, policy: str, number: int) -> Version:
        """One version."""
        return self.line(run, policy).version(number)

    def versions(self, wanted: Iterable[tuple[str, str | None, int | None]]) -> tuple[Version, ...]:
        """The versions of these (run, policy, number), without those of which one is None, in order."""
        keys = {(run, policy, v) for run, policy, v in wanted if policy is not None and v is not None}
        return tuple(self.version(*key) for key in sorted(keys))

    def descendants(self, versions: Iterable[tuple[str, str, int | None]]) -> tuple[Version, ...]:
        """All versions after these, without themselves."""
        by_line: dict[tuple[str, str], set[int]] = {}
        for run, policy, number in versions:
            if number is not None:
                by_line.setdefault((run, policy), set()).add(number)
        return tuple(
            version
            for key, numbers in sorted(by_line.items())
            for version in self.line(*key).descendants(numbers)
        )
