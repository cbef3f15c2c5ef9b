"""A completion that came in parts, since the server, and not the client, ended a request before it was done.

A pause in mode `abort`, the usual one, ends all requests with what they have. That is kept: the prompt and
the ids that were sampled are sent again, as ids, and sampling goes on from there. Pure, but for `routing_of`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollbook.ingest.engines.engine import Generation, Prompt, Sampling
from rollbook.ingest.engines.sglang.protocol import SEMANTICS, Part, Routing, experts_start, is_greedy, moved
from rollbook.store.errors import EngineError, ModelError
from rollbook.store.events import Json, VersionSpan, token_ids
from rollbook.store.events.routed_experts import pack

ALTERING = (
    "constraint",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
    "presence_penalty",
    "repetition_penalty",
)
"""Sampling parameters that change the logits before the softmax that logprobs are of."""
BARREN_PARTS = 3
"""So many parts without a token, one behind the other, are given up."""


def may_go_on(parts: Sequence[Part], sampling: Sampling) -> bool:
    """Whether a completion whose last part was ended from outside can be gone on with.

    Not under a constraint: its grammar begins anew with each request, in the middle of a text that has begun.

    Raises:
        EngineError: the last parts were all without a token.
    """
    if not parts[-1].aborted or sampling.constraint or _made(parts) >= sampling.max_new_tokens:
        return False
    if len(parts) >= BARREN_PARTS and not any(len(one.ids) for one in parts[-BARREN_PARTS:]):
        raise EngineError(
            f"the server has aborted the request {BARREN_PARTS} times without a token: is it up?"
        )
    return True


def the_rest(prompt: Prompt, sampling: Sampling, parts: Sequence[Part]) -> tuple[Prompt, Sampling]:
    """What to ask for next.

    The server counts what was sampled as prompt now. So it looks for a stop string in new text only: one that
    begins before the cut and ends behind it does not stop it, though the reply ends there all the same, where
    it is read. Frequency and presence penalties begin to count anew, so they are weaker than was asked for.
    Logprobs are of penalized logits either way, and the turn says so: it is not trained.

    It has an id of its own: two seconds after a stream's end SGLang aborts whatever has the stream's id then.
    """
    made = _made(parts)
    prompt = replace(prompt, request_id=f"{len(parts)}-{prompt.request_id}")
    if not made:
        return prompt, sampling
    ids = token_ids(np.concatenate([prompt.ids, *(one.ids for one in parts)]))
    return replace(prompt, ids=ids, known_tokens=len(ids)), replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - made,
        min_new_tokens=max(sampling.min_new_tokens - made, 0),
    )


def joined(prompt: Prompt, sampling: Sampling, parts: Sequence[Part], timings: Json) -> Generation:
    """The completion in our terms.

    Raises:
        EngineError: it has no token, or expert ids that are none.
    """
    if not _made(parts):
        raise EngineError(f"the server answered without a token: {parts[-1].finish}")
    spans: list[VersionSpan] = []
    at = 0
    for one in parts:
        for span in one.version_spans:
            here = moved(span, at)
            if spans and (spans[-1].version, spans[-1].end) == (here.version, here.start):
                here = replace(spans.pop(), end=here.end)
            spans.append(here)
        at += len(one.ids)
    reason = parts[-1].finish["type"]
    if parts[-1].aborted and at >= sampling.max_new_tokens:
        reason = "length"
    return Generation(
        token_ids(np.concatenate([one.ids for one in parts])),
        np.concatenate([one.logprobs for one in parts]),
        tuple(spans),
        reason,
        _semantics(sampling),
        timings | _numbers(parts),
        _experts(prompt, parts),
    )


def _made(parts: Sequence[Part]) -> int:
    return sum(len(one.ids) for one in parts)


def _semantics(sampling: Sampling) -> Json:
    semantics: Json = SEMANTICS | {"temperature": 0.0 if is_greedy(sampling) else sampling.temperature}
    asked = sampling.as_json()
    altered = [name for name in ALTERING if name in asked]
    return semantics | ({"altered": altered} if altered else {})


def _numbers(parts: Sequence[Part]) -> Json:
    """What the first request found in the cache, how often any was retracted, how many went on with it."""
    found: Json = {}
    if cached := parts[0].numbers.get("cached_tokens"):
        found["cached_tokens"] = cached
    if retractions := sum(one.numbers.get("num_retractions", 0) for one in parts):
        found["num_retractions"] = retractions
    return found | ({"resumed": len(parts) - 1} if len(parts) > 1 else {})


def _experts(prompt: Prompt, parts: Sequence[Part]) -> Json:
    """All positions' experts, packed; none where a part has none."""
    experts = [one.experts for one in parts if len(one.ids)]
    found = [one for one in experts if one is not None]
    if not found or len(found) < len(experts):
        return {}
    try:
        return pack(np.concatenate(found), experts_start(prompt))
    except ValueError as error:
        raise EngineError(f"the server's routed_experts are not expert ids: {error}") from error


def routing_of(model: Path) -> Routing | None:
    """How many layers and experts per token a model directory has; None where it is no mixture of experts.

    Raises:
        ModelError: its configuration cannot be read.
    """
    file = model / "config.json"
    try:
        config = json.loads(file.read_bytes())
        config = config.get("text_config", config)
        topk = config.get("num_experts_per_tok")
        return None if topk is None else Routing(int(config["num_hidden_layers"]), int(topk))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} does not say what its model is made of: {error!r}") from error
