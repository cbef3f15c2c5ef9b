"""One version, one digest: the first event that names a version binds it, however the log is read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.stories.records import turn_completed
from tests.fakes.stories.versions import fold_versions

from rollbook.store import Event
from rollbook.store.errors import VersionError
from rollbook.store.events import (
    CheckpointWritten,
    PolicyActivated,
    PolicyPublished,
    StepCommitted,
    SyncStarted,
    VersionSpan,
)
from rollbook.store.fold.versions import BINDING, Origin, VersionDigests, unversioned


def said(kind: str, version: int, digest: str, policy: str = "actor") -> Any:
    """A record that says a version's digest."""
    match kind:
        case "checkpoint.written":
            return CheckpointWritten(policy, version, "path", digest, None, None, 1)
        case "policy.published":
            return PolicyPublished(policy, version, None, "path", digest)
        case "policy.activated":
            return PolicyActivated(policy, version, "http://e", digest, "path")
    return StepCommitted(version - 1, 1, policy, version, {"weights": digest}, {})


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(sorted(BINDING)),
        st.integers(0, 2),
        st.sampled_from("ab"),
        st.sampled_from(["actor", "critic"]),
    ),
    max_size=12,
)


@given(EVENTS, st.integers())
def test_the_first_binds_whatever_the_order_of_reading(made: Any, seed: int) -> None:
    """The first by event id; every other digest of the version is disputed, and nothing else."""
    events = [
        Event(said(kind, version, digest, policy), "run", f"e{number:03}")
        for number, (kind, version, digest, policy) in enumerate(made)
    ]
    wanted: dict[Any, str] = {}
    for _, version, digest, policy in made:
        wanted.setdefault((policy, version), digest)
    read = [*events]
    random.Random(seed).shuffle(read)
    folded = fold_versions(read)
    for (policy, version), digest in wanted.items():
        bound = folded.of("run", policy, version)
        assert bound is not None
        assert bound.digest == digest
        assert folded.of("other", policy, version) is None
    others = [(p, v) for _, v, d, p in made if d != wanted[p, v]]
    disputed = {key for key, digests in folded.disputed.items() if digests}
    assert disputed == {("run", *key) for key in others}


@pytest.mark.parametrize("kind", sorted(BINDING))
def test_what_disagrees_is_refused(kind: str) -> None:
    """With what the version is, since when, and what to do; what agrees, or is new, is fine."""
    folded = fold_versions([Event(said(kind, 3, "d" * 64), "run")])
    folded.check("run", "actor", 3, "d" * 64, "./model")
    folded.check("run", "actor", 4, "e" * 64, "./model")
    folded.check("other", "actor", 3, "e" * 64, "./model")
    wanted = rf"./model is not version 3 of policy actor in run 'run': .* is {'d' * 16} since {kind}.*--run"
    with pytest.raises(VersionError, match=wanted):
        folded.check("run", "actor", 3, "e" * 64, "./model")


def test_what_says_no_digest() -> None:
    """Nothing is bound by it."""
    folded = VersionDigests()
    for record in (
        SyncStarted("actor", 1, "s", "http://e", "disk"),
        StepCommitted(0, 1, "actor", 1, {}, {}),
        PolicyActivated("actor", 1, "http://e", "", ""),
    ):
        folded.add(Event(record, "run"))
    assert folded.of("run", "actor", 1) is None


def test_tokens_of_no_version() -> None:
    """Those that no span covers."""
    ids = np.arange(5, dtype=np.int32)
    spans = (VersionSpan("actor", 1, 0, 2), VersionSpan("actor", 2, 3, 4))
    done = turn_completed(
        "t",
        "u",
        policy_version=2,
        prompt_ids=ids,
        completion_ids=ids,
        version_spans=spans,
        prompt_length=5,
        prompt_sha256="sha",
    )
    assert unversioned(done) == 2


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (Origin("run", "actor", 3, "d"), 3),
        (Origin("run", "actor", 3, "e"), None),  # of a run of that name in another store
        (Origin("run", "actor", 4, "d"), None),
        (Origin("run", "critic", 3, "d"), None),
        (Origin("other", "actor", 3, "d"), None),
        (Origin("", "", 3, "d"), None),
        (None, None),
    ],
)
def test_a_folder_is_a_version_only_by_all_that_names_one(origin: Origin | None, wanted: int | None) -> None:
    """Run, policy, version and digest, as this log has them."""
    folded = fold_versions([Event(said("checkpoint.written", 3, "d"), "run")])
    assert folded.own("run", "actor", origin) == wanted
