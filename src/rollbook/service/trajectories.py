"""What is sampled through the service as trajectories: one of one turn for each sequence. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rollbook.engines.engine import Generation, Sampling
from rollbook.store.events import (
    Json,
    OperationAccepted,
    Record,
    SamplerOpened,
    TokenIds,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    TurnRequested,
    VersionSpan,
)
from rollbook.train.tenants.operations import POLICY, session_of
from rollbook.train.tenants.origins import turn_of

ENDPOINT = "/api/v1/asample"
FULL = "length"
"""Reason to finish of a sequence that had as many tokens as it may have."""


def opened(
    accepted: OperationAccepted, sampler: SamplerOpened, samplings: Sequence[Sampling], caller: str | None
) -> list[Record]:
    """The records of sequences that are to be sampled."""
    records: list[Record] = []
    sequences: list[str] = accepted.resolved["sequence_ids"]
    for choice, (sequence_id, sampling) in enumerate(zip(sequences, samplings, strict=True)):
        labels = {"session": session_of(sampler.sampler_id), "sampler": sampler.sampler_id}
        wire: Json = {"endpoint": ENDPOINT} | ({"choice": choice} if choice else {})
        records += [
            TrajectoryOpened(
                sequence_id, sequence_id, accepted.request_id, labels=labels, split="train", by=caller
            ),
            TurnRequested(
                trajectory_id=sequence_id,
                turn_id=turn_of(sequence_id),
                request_id=accepted.request_id,
                parent_turn_id=None,
                root_reason="first",
                base_turn_id=None,
                shared_messages=0,
                messages=[],
                request={},
                requested_model=sampler.path or sampler.base_model,
                sampling=sampling.as_json(),
                honoured={},
                context_key="",
                wire=wire,
            ),
        ]
    return records


def completed(
    sequence_id: str, prompt: TokenIds, generation: Generation, version: int, text: str
) -> list[Record]:
    """The records of a sequence that was sampled by a version of the policy.

    Args:
        text: of its tokens; "" where there is no tokenizer.
    """
    spans = (VersionSpan(POLICY, version, 0, len(generation.completion_ids)),)
    turn = TurnCompleted(
        trajectory_id=sequence_id,
        turn_id=turn_of(sequence_id),
        policy=POLICY,
        policy_version=version,
        prompt_ids=prompt,
        completion_ids=generation.completion_ids,
        logprobs=generation.logprobs,
        version_spans=spans,
        prompt_length=len(prompt),
        prompt_sha256=hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest(),
        finish_reason=generation.finish_reason,
        reply={"role": "assistant", "content": text},
        logprob_semantics=generation.logprob_semantics,
        flags=[],
        timings=generation.timings,
    )
    status = "truncated" if generation.finish_reason == FULL else "completed"
    return [turn, TrajectoryFinished(sequence_id, status)]


def failed(accepted: OperationAccepted, error: str) -> list[Record]:
    """The records of sequences that were not sampled."""
    return [
        record
        for sequence_id in accepted.resolved["sequence_ids"]
        for record in (
            TurnFailed(sequence_id, turn_of(sequence_id), error),
            TrajectoryFinished(sequence_id, "failed"),
        )
    ]


def delivered(accepted: OperationAccepted) -> list[Record]:
    """The records of sequences that a client was sent."""
    return [TurnDelivered(s, turn_of(s), "sent") for s in accepted.resolved["sequence_ids"]]
