"""The teachers of an algorithm: models whose logprobs of the policy's tokens it learns from.

A teacher's weights are a line of their own in the log, copied into the store as the training begins, so a
replay needs nothing else. What an engine answers cannot be computed again: it is recorded with the first step
on the rollout batch, before that runs, and replays take it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollbook.store import Store
from rollbook.store.digest import digest_json
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, Json
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import (
    MicroBatch,
    Partition,
    collate_tokens,
    micro_batches_of,
    without_experts,
)
from rollbook.train.batches.experience import Bools
from rollbook.train.checkpoints.checkpoint import weights_named
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.select.conditions import has_labels
from rollbook.train.select.samples import Sample
from rollbook.train.step.apart import ModelProcess
from rollbook.train.step.forward import ordered, passed
from rollbook.train.step.predictions import logprobs_of
from rollbook.train.step.teacher_engine import TeacherEngine


class Teacher(Protocol):
    """A model that gives logprobs."""

    def logprobs(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], parts: Partition
    ) -> Callable[[], Singles]:
        """A function that returns the logprobs of the trained tokens of samples, in their order, float32 [P].

        Args:
            micro_batches: of the samples, as `parts` divides them.

        Raises:
            TrainError, ModelError: it cannot score them; the function may raise these, too.
        """

    def close(self) -> None:
        """End what runs for it."""


@dataclass(frozen=True, slots=True)
class TeacherInPlace:
    """A teacher beside the policy, on the same ranks."""

    policy: Policy

    def logprobs(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], parts: Partition
    ) -> Callable[[], Singles]:
        """As `Teacher`, computed at once."""
        values = passed(self.policy, micro_batches, parts, logprobs_of)
        return lambda: values

    def close(self) -> None:
        """Nothing runs for it."""


@dataclass(frozen=True, slots=True)
class TeacherApart:
    """A teacher in a process of its own.

    Attributes:
        folder: of its checkpoint; digest: of its weights.
    """

    process: ModelProcess
    folder: Path
    digest: str

    def logprobs(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], parts: Partition
    ) -> Callable[[], Singles]:
        """As `Teacher`, computed while the policy does."""
        pending = self.process.logprobs(self.folder, self.digest, micro_batches)
        return lambda: ordered(micro_batches, parts, pending())

    def close(self) -> None:
        """End the process."""
        self.process.close()


@dataclass(slots=True)
class Teachers:
    """The teachers that manifests describe, put in place when they are first needed; those of the last one
    stay. A manifest has of each its `name`, the `labels` of the trajectories that it teaches, and the
    `version` of which `line` of weights it is, or the `engine` that serves it, with its `weights_digest`.

    Attributes:
        run: that is trained.
        how: the policy computes.
        apart: names of those that have processes of their own.
        engines: what talks to those that servers serve, by name; a replay has none, and needs none.
    """

    log: Store
    run: str
    ranks: Ranks
    how: Build
    apart: Collection[str | None] = ()
    engines: Mapping[str | None, TeacherEngine] = field(default_factory=dict)
    _described: Sequence[Json] = ()
    _each: Sequence[Teacher | None] = ()

    def digest(self, described: Sequence[Json]) -> str:
        """The digest of the weights of teachers: of one it is its own.

        Raises:
            TrainError: the log has no checkpoint of one.
        """
        digests = {what["name"]: self._digest(what) for what in described}
        return next(iter(digests.values())) if len(digests) == 1 else digest_json(digests)

    def _digest(self, what: Json) -> str:
        if "engine" in what:
            return str(what["weights_digest"])
        return teacher_checkpoint(self.log, self.run, what["line"], what["version"]).weights_digest

    def put(self, described: Sequence[Json]) -> Sequence[Teacher | None]:
        """The teachers, put in place if they are not yet; None for one of an engine that is not asked again.

        Raises:
            TrainError: the log has no checkpoint of one.
            ModelError: one is damaged, or cannot be spread as the policy is.
            ConfigError: one cannot have a process of its own.
        """
        if list(described) != list(self._described):
            self.close()
            self._each = [self._made(number, what) for number, what in enumerate(described)]
            self._described = described
        return self._each

    def _made(self, number: int, what: Json) -> Teacher | None:
        if "engine" in what:
            return self.engines.get(what["name"])
        record = teacher_checkpoint(self.log, self.run, what["line"], what["version"])
        folder, own = (
            self.log.folder(record.path),
            replace(self.how, recompute=False, trains=False, lora=None),
        )
        shape = read_shape(folder)
        if what["name"] in self.apart:
            called = "the teacher" if what["name"] is None else f"teacher {what['name']}"
            process = ModelProcess(called, shape, own, self.ranks.parallel, self.ranks.count)
            return TeacherApart(process, folder, record.weights_digest)
        policy = self.ranks.policy(f"teacher {number}", shape, OptimizerConfig(), own)
        policy.load_weights(weights_named(folder, record.weights_digest))
        return TeacherInPlace(policy)

    def logprobs(
        self,
        described: Sequence[Json],
        samples: Sequence[Sample],
        masks: Sequence[Bools],
        parts: Partition,
        answers: Singles | None = None,
        *,
        packed: bool,
    ) -> Callable[[], Singles]:
        """A function that returns the logprobs that trained tokens have by their trajectory's teacher, in
        sample order, float32 [P]; NaN where there is none.

        Args:
            masks: the trained tokens of each sample; parts: their micro-batches.
            answers: what was recorded of all these tokens, float32 [P], if engines are not to be asked again.
            packed: whether samples of a micro-batch are packed.

        Raises:
            TrainError, ModelError, ConfigError: as `put`.
        """
        teacher_of = [_teacher_of(sample, described) for sample in samples]
        lengths = [np.count_nonzero(mask) for mask in masks]
        recorded = [] if answers is None else np.split(answers, np.cumsum(lengths)[:-1])
        pending = []
        for number, teacher in enumerate(self.put(described)):
            mine = [i for i, taught_by in enumerate(teacher_of) if taught_by == number]
            if not mine or (recorded and "engine" in described[number]):
                continue
            if teacher is None:
                raise TrainError(f"{described[number]['engine']}: its answers were not recorded")
            own, places = [samples[i] for i in mine], _places(parts, mine)
            micro_batches = _collated(own, [masks[i] for i in mine], places, packed)
            pending.append((mine, teacher.logprobs(own, micro_batches, places)))

        def whole() -> Singles:
            by_sample = [np.full(length, np.nan, np.float32) for length in lengths]
            for i, (number, given) in enumerate(zip(teacher_of, recorded, strict=False)):
                if number is not None and "engine" in described[number]:
                    by_sample[i] = given
            for mine, values in pending:
                ends = np.cumsum([lengths[i] for i in mine])
                for i, own in zip(mine, np.split(values(), ends[:-1]), strict=True):
                    by_sample[i] = own
            return np.concatenate([np.zeros(0, np.float32), *by_sample])

        return whole

    @property
    def policies(self) -> list[Policy]:
        """Those whose memory is on the training's devices."""
        return [teacher.policy for teacher in self._each if isinstance(teacher, TeacherInPlace)]

    def close(self) -> None:
        """End what runs for them."""
        for teacher in self._each:
            if teacher is not None:
                teacher.close()
        self._described, self._each = (), ()


def teacher_line(policy: str, name: str | None) -> str:
    """The name under which the log has the weights of a policy's teacher, as a line of weights of its own."""
    return f"{policy}.teacher" if name is None else f"{policy}.teacher.{name}"


def asks_engines(described: Sequence[Json] | None) -> bool:
    """Whether a server serves one of the teachers."""
    return any("engine" in what for what in described or ())


def teacher_checkpoint(log: Store, run: str, line: str, version: int) -> CheckpointWritten:
    """The checkpoint of a teacher.

    Raises:
        TrainError: the log has none.
    """
    held = [record for record in checkpoints_of(log, run, line) if record.policy_version == version]
    if not held:
        raise TrainError(
            f"run {run!r} has no checkpoint of version {version} of {line!r}, whose logprobs its steps learn "
            "from: restore it from a copy"
        )
    return held[-1]


def checkpoints_of(log: Store, run: str, line: str) -> list[CheckpointWritten]:
    """The checkpoints of a line of weights, in the order in which they were written."""
    events = (event for event in log.events_of({CheckpointWritten.KIND}) if event.run == run)
    records = (event.record for event in events)
    return [r for r in records if isinstance(r, CheckpointWritten) and r.policy == line]


def _teacher_of(sample: Sample, described: Sequence[Mapping[str, Any]]) -> int | None:
    """The number of the first teacher that teaches a sample's trajectory; None: none does."""
    takes = (i for i, what in enumerate(described) if has_labels(sample.labels, what["labels"]))
    return next(takes, None)


def _places(parts: Partition, mine: Sequence[int]) -> Partition:
    """The micro-batches of a partition without the samples that are not mine, renumbered from 0; those that
    are left empty are left out."""
    number = {sample: place for place, sample in enumerate(mine)}
    kept = [[[number[i] for i in micro if i in number] for micro in rank] for rank in parts]
    return [[micro for micro in rank if micro] for rank in kept]


def _collated(
    samples: Sequence[Sample], masks: Sequence[Bools], parts: Partition, packed: bool
) -> list[MicroBatch]:
    return without_experts(
        [
            collate_tokens([samples[i] for i in part], [masks[i] for i in part], packed=packed)
            for part in micro_batches_of(parts)
        ]
    )
