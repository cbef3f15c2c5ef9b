"""Samples from columns equal the samples of the folded log, whatever the forests, sealed or not."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.forests import SMALL, forest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store import events as kinds
from rollbook.store.errors import CorruptionError
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.store.log import turn_tokens
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.sealer import Sealer
from rollbook.train.batches.materialize import Materializer
from rollbook.train.config.recipe import Paths, RecipeConfig
from rollbook.train.select.references import NOWHERE, References, find_references
from rollbook.train.select.samples import Sample, samples_of

ARRAYS = ("tokens", "loss_mask", "logprobs", "versions", "temperatures")
SPLITS = ("train", "teacher")
Usage = namedtuple("Usage", "total used free")
ROOM_FOR_ONE = 14_000
"""Bytes: more than any row group of the forests takes, and less than two of them."""


@pytest.fixture(scope="module", params=["live", "sealed", "both"])
def recorded_forests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with 120 forests in two lanes: in the WAL, in sealed units, or in part. Never write to it."""
    rng = np.random.default_rng(7)
    log = rb.open(tmp_path_factory.mktemp("forests") / "store", create=True)
    for half in range(2):
        for lane in ("a", "b"):
            with log.writer(lane, SMALL) as writer:
                for i in range(30):
                    records = forest(rng, f"{lane}-{half}-{i:02}")
                    if records and rng.random() < 0.2:
                        turn = records[1].turn_id
                        records.append(kinds.RewardAssigned(records[0].trajectory_id, turn, 2.5))
                    writer.append(fabric.events(records)).result(30)
        if request.param == "sealed" or (request.param == "both" and not half):
            Sealer(log).run_once()
    return log


@pytest.fixture(scope="module")
def finished(recorded_forests: Store) -> list[Trajectory]:
    """The finished trajectories among the forests, folded from the log's events."""
    return _finished(recorded_forests)


def _finished(log: Store) -> list[Trajectory]:
    return [t for t in fold(log.events()).values() if t.finished is not None and t.run == "demo"]


def _folded(finished: list[Trajectory], paths: Paths = "all") -> dict[str, Sample]:
    samples = [s for trajectory in finished for s in samples_of(trajectory, paths=paths)]
    return {s.leaf_turn_id: s for s in samples if s.split in SPLITS}


def _materializer(log: Store, paths: Paths = "all") -> tuple[References, list[Sample]]:
    head = log.head()
    references = find_references(log, head, "demo", RecipeConfig(splits=SPLITS, paths=paths))
    materializer = Materializer(log, head, references, "demo")
    order = np.random.default_rng(1).permutation(len(references))
    samples = {int(i): s for i, s in zip(order, materializer.samples(order), strict=True)}
    return references, [samples[i] for i in range(len(references))]


def _same(sample: Sample, other: Sample) -> None:
    for name in ARRAYS:
        mine, theirs = getattr(sample, name), getattr(other, name)
        assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes()), (sample.leaf_turn_id, name)
    rest = set(Sample.__slots__) - set(ARRAYS)
    assert {n: getattr(sample, n) for n in rest} == {n: getattr(other, n) for n in rest}


@pytest.mark.more_but("both-all", "both-last")
@pytest.mark.parametrize("paths", ["all", "last", "longest"])
def test_samples_from_columns_are_those_of_the_fold(
    recorded_forests: Store, finished: list[Trajectory], paths: Paths
) -> None:
    """Every array of every sample bit for bit, each once, trajectories by name and leaves in turn order."""
    folded = _folded(finished, paths)
    references, samples = _materializer(recorded_forests, paths)
    assert len(references) > 120
    assert sorted(s.leaf_turn_id for s in samples) == sorted(folded)
    for sample in samples:
        _same(sample, folded[sample.leaf_turn_id])
    in_order = sorted(folded.values(), key=lambda s: s.name)
    assert [s.leaf_turn_id for s in samples] == [s.leaf_turn_id for s in in_order]


@pytest.mark.more_but("live-short of room")
@pytest.mark.parametrize("disk", ["roomy", "full", "short of room"])
def test_tokens_are_read_again_from_scratch(
    recorded_forests: Store, finished: list[Trajectory], monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """Another pass over row groups that memory had no room for gives the same, whatever the disk holds."""
    offsets = list[int]()

    def write(_: int, parts: list[memoryview], at: int) -> int:
        offsets.append(at)
        if disk == "short of room" and len(offsets) > 1:
            raise OSError(errno.ENOSPC, "no space")
        return pwritev(_, parts, at)

    pwritev = os.pwritev
    monkeypatch.setattr(turn_tokens, "KEPT_BYTES", 1)
    monkeypatch.setattr(os, "pwritev", write)
    if disk == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 0))
    head = recorded_forests.head()
    references = find_references(recorded_forests, head, "demo", RecipeConfig(splits=SPLITS))
    materializer = Materializer(recorded_forests, head, references, "demo")
    folded = _folded(finished)
    for _ in range(2):
        for number in range(len(references)):
            [sample] = materializer.samples([number])
            _same(sample, folded[sample.leaf_turn_id])
    sealed = any(current_units(recorded_forests.path, lane) for lane in ("a", "b"))
    assert len(set(offsets)) == len(offsets)
    assert (len(offsets) > 0) == (sealed and disk != "full")


@pytest.mark.more_but("both")
def test_row_groups_go_to_scratch_when_memory_is_full(
    recorded_forests: Store, finished: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before: those that memory has room for are never written. Samples are the same."""
    offsets = list[int]()

    def write(_: int, parts: list[memoryview], at: int) -> int:
        offsets.append(at)
        return pwritev(_, parts, at)

    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", write)
    head, folded, written = recorded_forests.head(), _folded(finished), list[int]()
    references = find_references(recorded_forests, head, "demo", RecipeConfig(splits=SPLITS))
    for room in (ROOM_FOR_ONE, 128 << 20):
        monkeypatch.setattr(turn_tokens, "KEPT_BYTES", room)
        offsets.clear()
        materializer = Materializer(recorded_forests, head, references, "demo")
        for _ in range(2):
            for number in range(0, len(references), 2):
                [sample] = materializer.samples([number])
                _same(sample, folded[sample.leaf_turn_id])
        written.append(len(offsets))
    sealed = any(current_units(recorded_forests.path, lane) for lane in ("a", "b"))
    assert [count > 1 for count in written] == [sealed, False]
    assert written[1] == 0


def test_a_turn_with_too_few_logprobs_is_damage(tmp_path: Path) -> None:
    """Which of its tokens they are of is not known."""
    log = rb.open(tmp_path / "store", create=True)
    records = fabric.records("t", [fabric.T(), fabric.T(parent=0)], reward=1.0)
    broken = [
        replace(r, logprobs=r.logprobs[1:])
        if isinstance(r, kinds.TurnCompleted) and r.logprobs is not None
        else r
        for r in records
    ]
    fabric.append(log, broken)
    with pytest.raises(CorruptionError, match="another number of logprobs"):
        _materializer(log)


def test_what_decides_is_known_without_tokens(recorded_forests: Store) -> None:
    """Trained tokens, unknown versions, missing logprobs, the oldest version and erasure, as arrays say."""
    references, samples = _materializer(recorded_forests)
    for number, sample in enumerate(samples):
        ref = references.ref(number)
        mask = sample.loss_mask
        assert ref.trained == mask.sum()
        assert ref.unknown == (sample.versions[mask] < 0).sum()
        assert ref.exact == (not np.isnan(sample.logprobs).any())
        assert ref.oldest_version == sample.oldest_version
        assert (ref.reference, ref.reward, ref.group) == (sample.reference, sample.reward, sample.group)
        assert int(references.length[number]) == len(sample)
    assert (references.oldest == NOWHERE).any()
    assert (references.unknown > 0).any()
    assert not references.exact.all()


@pytest.mark.more_but("*-0.2", "*-1.0")
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.75, 1.0])
def test_the_deciding_version_is_known_without_tokens(
    recorded_forests: Store, finished: list[Trajectory], share: float
) -> None:
    """As the versions of tokens say, of turns that several versions sampled too."""
    recipe = RecipeConfig(splits=SPLITS, stale_share=share)
    references = find_references(recorded_forests, recorded_forests.head(), "demo", recipe)
    folded, mixed = _folded(finished), 0
    for ref in references.refs(np.arange(len(references))):
        sample = folded[ref.leaf_turn_id]
        assert ref.deciding_version(share) == sample.deciding_version(share)
        mixed += ref.oldest_version != ref.newest_version
    assert mixed > 20


def test_an_erased_trajectory_has_no_loss(tmp_path: Path) -> None:
    """Its sample is named as erased, its tokens are -1, and the others are as they were."""
    log = fabric.record_store(tmp_path / "store", 2, 2, 2)
    Sealer(log).run_once()
    _, before = _materializer(log)
    erase_trajectory(log, "g0.0", "asked", keep_tokens=False)
    references, after = _materializer(log)
    folded = _folded(_finished(log))
    for sample in after:
        _same(sample, folded[sample.leaf_turn_id])
    erased = [s for s in after if s.trajectory_id == "g0.0"]
    assert [s.erased for s in erased] == [True, True]
    assert references.erased.sum() == 2
    assert len(before) == len(after)


def test_a_prompt_that_does_not_fold_is_damage(tmp_path: Path) -> None:
    """As for the fold: the turn is named, and nothing is trained on it."""
    log = rb.open(tmp_path / "store", create=True)
    records = fabric.records("t", [fabric.T(), fabric.T(parent=0)], reward=1.0)
    done = next(r for r in records if isinstance(r, kinds.TurnCompleted) and r.turn_id == "t.1")
    broken = [replace(r, prompt_ids=kinds.token_ids([9, 9])) if r is done else r for r in records]
    fabric.append(log, broken)
    with pytest.raises(CorruptionError, match=r"turn t\.1: its prompt does not fold"):
        _materializer(log)


def test_an_empty_log_has_no_samples(tmp_path: Path) -> None:
    """Neither has one without a finished trajectory of the run."""
    log = rb.open(tmp_path / "store", create=True)
    references, samples = _materializer(log)
    assert (len(references), samples) == (0, [])
