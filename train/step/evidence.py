"""What a step records beside the digest of each stage: hashes of its parts, by which a replay says in which
sample or tensor a stage begins to differ, and, where a training asks for it, the numbers of some stages.

The digest of a stage proves it. The hash of a part only finds it, and is as short as that allows: a
difference goes unseen in one of 17 million samples, and of 3e14 tensors.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, StepVectors
from rollbook.train.algorithms.rollouts import Ints, Singles
from rollbook.train.batches.batch import Batch
from rollbook.train.ranks.kept_digests import Digest
from rollbook.train.select.samples import Sample

SAMPLE_BYTES = 3
"""Of the hash of a sample's part of a stage."""
TENSOR_BYTES = 6
"""Of the hash of a tensor."""
Hashes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The parts of a step's stages.

    Attributes:
        samples: stage -> hashes of what it has of each sample, uint8 [N, 3], in the order of the manifest.
        tensors: stage -> its tensors, as lines of a digest.
        values: stage -> the value of each trained token, float32 [P], sample by sample.
    """

    samples: Mapping[str, Hashes] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Mapping[str, Singles] = field(default_factory=dict)

    def __or__(self, other: Evidence) -> Evidence:
        """Both."""
        return Evidence(
            {**self.samples, **other.samples},
            {**self.tensors, **other.tensors},
            {**self.values, **other.values},
        )

    def described(self) -> Json:
        """What `step.committed` records of the hashes."""
        stacked = np.stack(list(self.samples.values())) if self.samples else np.zeros(0, np.uint8)
        return {
            "stages": list(self.samples),
            "samples": _packed(stacked),
            "tensors": {stage: _packed(tensor_hashes(lines)) for stage, lines in self.tensors.items()},
        }

    def vectors(self, stages: Iterable[str], step: int, attempt: int, policy: str) -> list[StepVectors]:
        """The events that record the values of stages, as far as the step has these."""
        return [
            StepVectors(step, attempt, policy, stage, _packed(self.values[stage].astype("<f4")))
            for stage in stages
            if stage in self.values
        ]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedHashes:
    """The hashes that a committed step recorded, as of `Evidence`; `tensors` are uint8 [T, 6], by name."""

    samples: Mapping[str, Hashes]
    tensors: Mapping[str, Hashes]


def recorded_hashes(said: Json | None) -> RecordedHashes:
    """What `Evidence.described` gave; nothing of a step that recorded none.

    Raises:
        ReplayError: it is no such thing.
    """
    if not said:
        return RecordedHashes({}, {})
    try:
        stages = list(said["stages"])
        flat = _bytes(said["samples"])
        each = flat.reshape(len(stages), -1, SAMPLE_BYTES) if stages else flat
        tensors = {stage: _bytes(data).reshape(-1, TENSOR_BYTES) for stage, data in said["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReplayError(f"the hashes that the step recorded cannot be read: {error!r}") from error
    return RecordedHashes(dict(zip(stages, each, strict=True)), tensors)


def recorded_values(vectors: StepVectors) -> Singles:
    """The values of each trained token that a step recorded, float32 [P].

    Raises:
        ReplayError: they cannot be read.
    """
    try:
        return _bytes(vectors.values).view("<f4").astype(np.float32)
    except ValueError as error:
        raise ReplayError(
            f"step {vectors.step}: its vectors of {vectors.stage} cannot be read: {error}"
        ) from error


def tensor_hashes(lines: Sequence[str]) -> Hashes:
    """The hashes of tensors, by name, uint8 [T, 6], from their lines in a digest."""
    words = (line.rsplit(" ", 1)[1] for line in sorted(lines, key=name_in))
    return np.frombuffer(b"".join(bytes.fromhex(w)[:TENSOR_BYTES] for w in words), np.uint8).reshape(
        -1, TENSOR_BYTES
    )


def name_in(line: str) -> str:
    """The name of a tensor, in its line in a digest."""
    return line.partition(" ")[0]


def of_tensors(**stages: Digest) -> Evidence:
    """The tensors of stages."""
    return Evidence(tensors={stage: digest.lines for stage, digest in stages.items()})


def of_tokens(batch: Batch, **stages: Singles) -> Evidence:
    """Values of the trained tokens of a batch, [P] each."""
    return Evidence(
        {stage: _hashed(_split(values, batch.experience.ends)) for stage, values in stages.items()},
        values=stages,
    )


def of_samples(**stages: npt.NDArray[np.floating]) -> Evidence:
    """Values of samples, a row of each stage each."""
    return Evidence({stage: _hashed(list(values)) for stage, values in stages.items()})


def of_batch(batch: Batch) -> Evidence:
    """What a step is given of each sample, by the stages before the loss."""
    of, count = batch.experience, len(batch.samples)
    advantages = of.advantages.values
    scores = {
        "proximal_logprobs": of.scores.old_logprobs,
        "reference_logprobs": of.scores.reference_logprobs,
        "values": of.scores.values,
    }
    found = Evidence(
        {
            "samples": _hashed_all([_arrays(sample) for sample in batch.samples]),
            "old_logprobs": _hashed([sample.logprobs for sample in batch.samples]),
            "rewards": _hashed(of.rewards.reshape(count, 1)),
            "advantages": _hashed(
                _split(advantages, of.ends) if of.advantages.per_token else advantages.reshape(count, 1)
            ),
        }
    )
    found |= of_tokens(batch, **{stage: values for stage, values in scores.items() if values is not None})
    wide = {"returns": of.advantages.returns, "importance_weights": of.weights}
    more = {stage: _hashed(_split(values, of.ends)) for stage, values in wide.items() if values is not None}
    return found | Evidence(more)


def _arrays(sample: Sample) -> list[npt.NDArray[np.generic]]:
    return [sample.tokens, sample.loss_mask, sample.versions, sample.temperatures]


def _split(values: npt.NDArray[np.generic], ends: Ints) -> list[npt.NDArray[np.generic]]:
    """The values [P] of each sample's tokens."""
    return np.split(values, ends[1:-1]) if len(ends) > 1 else []


def _hashed(parts: Iterable[npt.NDArray[np.generic]]) -> Hashes:
    return _hashed_all([[part] for part in parts])


def _hashed_all(parts: Sequence[Sequence[npt.NDArray[np.generic]]]) -> Hashes:
    """The hash of the bytes of each of N lists of arrays, uint8 [N, 3]."""
    found = b"".join(
        xxhash.xxh3_128_digest(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays))[:SAMPLE_BYTES]
        for arrays in parts
    )
    return np.frombuffer(found, np.uint8).reshape(-1, SAMPLE_BYTES)


def _packed(array: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _bytes(data: str) -> Hashes:
    return np.frombuffer(base64.b64decode(data, validate=True), np.uint8)
