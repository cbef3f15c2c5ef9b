"""What a step records beside the digest of each stage: hashes of the stage's parts, which tell a
replay in which sample or tensor a stage begins to differ, and, where a training asks for it, the
values of some stages.

A stage's digest proves that it is equal. A part's hash only locates a difference, and is as
short as that allows: a difference goes unseen in one of 17 million samples, and of 3e14 tensors.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, StepVectors
from rollbook.train.algorithms.rollouts import Ints, Singles
from rollbook.train.batches.batch import Batch
from rollbook.train.select.samples import Sample

if TYPE_CHECKING:
    from rollbook.train.ranks.kept_digests import Digest

SAMPLE_BYTES = 3
"""Of the hash of a sample's part of a stage."""
TENSOR_BYTES = 6
"""Of the hash of a tensor."""
BESIDE = {"entropies": "logprobs"}
"""Values without a stage of their own, which are as exact as the stage that they are computed with."""
Hashes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The parts of a step's stages.

    Attributes:
        samples: stage -> hashes of its values for each sample, uint8 [N, 3], in the order of the
            manifest.
        tensors: stage -> its tensors, as lines of a digest.
        values: stage -> the value of each trained token, float32 [P], sample by sample.
    """

    samples: Mapping[str, Hashes] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Mapping[str, Singles] = field(default_factory=dict)

    def __or__(self, other: Evidence) -> Evidence:
        """The evidence of both."""
        return Evidence(
            {**self.samples, **other.samples},
            {**self.tensors, **other.tensors},
            {**self.values, **other.values},
        )

    def described(self) -> Json:
        """The hashes as `step.committed` records them."""
        stacked = np.stack(list(self.samples.values())) if self.samples else np.zeros(0, np.uint8)
        return {
            "stages": list(self.samples),
            "samples": _packed(stacked),
            "tensors": {stage: _packed(tensor_hashes(lines)) for stage, lines in self.tensors.items()},
        }

    def vectors(self, stages: Iterable[str], step: int, attempt: int, policy: str) -> list[StepVectors]:
        """The events that record the values of stages, as far as the step has them."""
        return [
            StepVectors(step, attempt, policy, stage, _packed(self.values[stage].astype("<f4")))
            for stage in stages
            if stage in self.values
        ]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedHashes:
    """The hashes that a committed step recorded, as in `Evidence`; `tensors` are uint8 [T, 6], by
    name."""

    samples: Mapping[str, Hashes]
    tensors: Mapping[str, Hashes]


def recorded_hashes(recorded: Json | None) -> RecordedHashes:
    """The inverse of `Evidence.described`; empty for a step that recorded none.

    Raises:
        ReplayError: the record cannot be read.
    """
    if not recorded:
        return RecordedHashes({}, {})
    try:
        stages = list(recorded["stages"])
        flat = _bytes(recorded["samples"])
        each = flat.reshape(len(stages), -1, SAMPLE_BYTES) if stages else flat
        tensors = {
            stage: _bytes(data).reshape(-1, TENSOR_BYTES) for stage, data in recorded["tensors"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReplayError(f"the hashes that the step recorded cannot be read: {error!r}") from error
    return RecordedHashes(dict(zip(stages, each, strict=True)), tensors)


def tensor_hashes(lines: Sequence[str]) -> Hashes:
    """The hashes of tensors, by name, uint8 [T, 6], from their lines in a digest."""
    words = (line.rsplit(" ", 1)[1] for line in sorted(lines, key=name_in))
    return np.frombuffer(b"".join(bytes.fromhex(w)[:TENSOR_BYTES] for w in words), np.uint8).reshape(
        -1, TENSOR_BYTES
    )


def name_in(line: str) -> str:
    """The tensor's name in its line in a digest."""
    return line.partition(" ")[0]


def of_tensors(**stages: Digest) -> Evidence:
    """The evidence of the tensors of stages."""
    return Evidence(tensors={stage: digest.lines for stage, digest in stages.items()})


def of_tokens(batch: Batch, **stages: Singles) -> Evidence:
    """The evidence of values of a batch's trained tokens, [P] each."""
    return Evidence(
        {stage: _hashed(_split(values, batch.experience.ends)) for stage, values in stages.items()},
        values=stages,
    )


def of_samples(**stages: npt.NDArray[np.floating]) -> Evidence:
    """The evidence of values per sample: a row of each stage for each sample."""
    return Evidence({stage: _hashed(list(values)) for stage, values in stages.items()})


def of_batch(batch: Batch) -> Evidence:
    """The evidence of what a step is given for each sample, by the stages before the loss."""
    experience, count = batch.experience, len(batch.samples)
    advantages = experience.advantages.values
    scores = {
        "proximal_logprobs": experience.scores.old_logprobs,
        "reference_logprobs": experience.scores.reference_logprobs,
        "values": experience.scores.values,
    }
    evidence = Evidence(
        {
            "samples": _hashed_all([_arrays(sample) for sample in batch.samples]),
            "old_logprobs": _hashed([sample.logprobs for sample in batch.samples]),
            "rewards": _hashed(experience.rewards.reshape(count, 1)),
            "advantages": _hashed(
                _split(advantages, experience.ends)
                if experience.advantages.per_token
                else advantages.reshape(count, 1)
            ),
        }
    )
    evidence |= of_tokens(batch, **{stage: values for stage, values in scores.items() if values is not None})
    wide = {"returns": experience.advantages.returns, "importance_weights": experience.weights}
    more = {
        stage: _hashed(_split(values, experience.ends))
        for stage, values in wide.items()
        if values is not None
    }
    return evidence | Evidence(more)


def _arrays(sample: Sample) -> list[npt.NDArray[np.generic]]:
    return [sample.tokens, sample.loss_mask, sample.versions, sample.temperatures]


def _split(values: npt.NDArray[np.generic], ends: Ints) -> list[npt.NDArray[np.generic]]:
    """The values [P], split by sample."""
    return np.split(values, ends[1:-1]) if len(ends) > 1 else []


def _hashed(parts: Iterable[npt.NDArray[np.generic]]) -> Hashes:
    return _hashed_all([[part] for part in parts])


def _hashed_all(parts: Sequence[Sequence[npt.NDArray[np.generic]]]) -> Hashes:
    """The hash of the bytes in each of N lists of arrays, uint8 [N, 3]."""
    digests = b"".join(
        xxhash.xxh3_128_digest(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays))[:SAMPLE_BYTES]
        for arrays in parts
    )
    return np.frombuffer(digests, np.uint8).reshape(-1, SAMPLE_BYTES)


def _packed(array: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _bytes(data: str) -> Hashes:
    return np.frombuffer(base64.b64decode(data, validate=True), np.uint8)
