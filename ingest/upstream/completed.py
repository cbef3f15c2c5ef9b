"""The record of an upstream's reply: exact where it holds all token ids, else text only. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollbook.ingest.endpoints.upstream_reply import UpstreamChoice, UpstreamReply
from rollbook.ingest.engines.weights.name import version_in
from rollbook.store.events import Json, TurnCompleted, TurnRequested, VersionSpan, token_ids
from rollbook.store.fold.trajectory import prompt_sha256

TEXT_ONLY = "text_only"
REDACTED = "redacted"
INCOMPLETE = "incomplete_request"
"""Flag: the request names content that never passed here, so its recorded messages lack it."""


def completed_turn(
    requested: TurnRequested,
    choice: UpstreamChoice,
    reply: UpstreamReply,
    *,
    prompt_ids: list[int] | None,
    policy: str,
    timings: Json,
    ended: bool,
    redacted: bool,
) -> TurnCompleted:
    """The record of a choice. Its ids are used only if the prompt's ids are known too.

    Args:
        prompt_ids: those of the prompt that it answers, where that is certain.
        ended: the reply came to its end by itself.
        redacted: something was taken out of the text, so its tokens are not to be kept.
    """
    exact = bool(choice.ids and prompt_ids)
    ids = token_ids((choice.ids or []) if exact else [])
    asked_ids = token_ids((prompt_ids or []) if exact else [])
    logprobs = choice.logprobs if exact else None
    version = _version(reply.rest) if exact else None
    spans = () if version is None else (VersionSpan(policy, version, 0, len(ids)),)
    semantics = (
        {"kind": "upstream", "of": "as the upstream says"} if logprobs is not None else {"kind": "none"}
    )
    flagged = {TEXT_ONLY: not exact, REDACTED: redacted, INCOMPLETE: "unresolved" in requested.wire}
    return TurnCompleted(
        trajectory_id=requested.trajectory_id,
        turn_id=requested.turn_id,
        policy=policy if spans else None,
        policy_version=version,
        prompt_ids=asked_ids,
        completion_ids=ids,
        logprobs=None if logprobs is None else _float32(logprobs),
        version_spans=spans,
        prompt_length=len(asked_ids),
        prompt_sha256=prompt_sha256(asked_ids),
        finish_reason=choice.finish_reason or ("unknown" if ended else "abort"),
        reply=choice.message,
        logprob_semantics=semantics,
        flags=[flag for flag, raised in flagged.items() if raised],
        timings=timings,
        upstream=reply.rest | _upstream_fields(choice, reply, exact=exact),
    )


def _upstream_fields(choice: UpstreamChoice, reply: UpstreamReply, *, exact: bool) -> Json:
    fields: Json = {"choice": choice.extra} if choice.extra else {}
    if reply.error:
        fields["error"] = reply.error
    if not exact:
        prompt_ids = reply.prompt_ids if choice.prompt_ids is None else choice.prompt_ids
        kept = {"prompt_token_ids": prompt_ids, "token_ids": choice.ids, "logprobs": choice.logprobs}
        fields |= {k: v for k, v in kept.items() if v is not None}
    return fields


def _float32(values: list[float]) -> Any:
    return np.asarray(values, dtype=np.float32)


def _version(rest: Json) -> int | None:
    """The policy version that SGLang's replies name in their metadata."""
    metadata = rest.get("metadata")
    return version_in(metadata.get("weight_version")) if isinstance(metadata, dict) else None
