"""SGLang's `/generate` as JSON: what it is asked, and what its answers say. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from rollbook.ingest.engines.engine import Generation, Prompt, Sampling
from rollbook.store.errors import EngineError
from rollbook.store.events import Json, VersionSpan, token_ids

SEMANTICS = {"kind": "sampled", "of": "softmax(logits / temperature)", "filters": []}
FIRST_VERSION = "default"
"""What SGLang calls the weights it was started with, unless it was told a name."""
_NOT_SGLANGS = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading raises where an answer is of another form."""
ALTERING = (
    "constraint",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
    "presence_penalty",
    "repetition_penalty",
)
"""Sampling parameters that change the logits before the softmax that logprobs are of."""


def request_body(prompt: Prompt, sampling: Sampling, stream: bool) -> Json:
    """A request for a completion of the prompt's ids."""
    body: Json = {
        "rid": prompt.request_id,
        "input_ids": prompt.ids,
        "sampling_params": sampling_params(sampling),
        "return_logprob": True,
        "stream": stream,
    }
    return body | ({"image_data": list(prompt.images)} if prompt.images else {})


def sampling_params(sampling: Sampling) -> Json:
    """SGLang's sampling parameters; what is as by default is left out.

    `no_stop_trim` and the two below keep the ids and what they spell untouched.
    """
    params: Json = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed & (2**31 - 1),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    asked = sampling.as_json()
    for name in ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if name in asked:
            params[name] = asked[name]
    for name in ("min_new_tokens", "stop", "logit_bias"):
        if asked.get(name):
            params[name] = asked[name]
    for kind, value in (sampling.constraint or {}).items():
        params[kind] = orjson.dumps(value).decode() if kind == "json_schema" else value
    return params


def news(chunk: Any, known: int) -> tuple[list[int], list[tuple[float, int]]]:
    """(ids that a chunk adds to those known, their logprobs with their ids).

    Raises:
        EngineError: the server reports an error, or what comes is no chunk.
    """
    try:
        if "error" in chunk:
            raise EngineError(f"the server ends the stream: {chunk['error']}")
        meta = chunk["meta_info"]
        new = int(meta["completion_tokens"]) - known
        if new <= 0:
            return [], []
        told = (meta.get("output_token_logprobs") or [])[-new:]
        return list(chunk["output_ids"][-new:]), [(_number(entry[0]), entry[1]) for entry in told]
    except _NOT_SGLANGS as error:
        raise EngineError(f"the server's chunk is not SGLang's: {error!r}") from error


def _number(logprob: float | None) -> float:
    """A logprob; JSON has no infinities, and what became null is unknown."""
    return float("nan") if logprob is None else logprob


def generation(answer: Json, sampling: Sampling, policy: str, timings: Json) -> Generation:
    """A server's answer in our terms. Pure.

    Raises:
        EngineError: it is not what was asked for.
    """
    try:
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        ids = [entry[1] for entry in entries]
        logprobs = np.asarray([_number(entry[0]) for entry in entries], dtype=np.float32)
        reason = meta["finish_reason"]["type"]
        if ids != list(answer["output_ids"]):
            raise EngineError("the server's output_ids and output_token_logprobs are not of the same tokens")
        spans = _spans(meta, policy, len(ids))
        completion = token_ids(ids)
    except _NOT_SGLANGS as error:
        raise EngineError(f"the server's answer is not SGLang's: {error!r}") from error
    if not ids:
        raise EngineError(f"the server answered without a token: {meta['finish_reason']}")
    semantics: Json = SEMANTICS | {"temperature": sampling.temperature}
    asked = sampling.as_json()
    altered = [name for name in ALTERING if name in asked]
    if altered:
        semantics["altered"] = altered
    for name in ("cached_tokens", "num_retractions"):
        if meta.get(name):
            timings = timings | {name: meta[name]}
    return Generation(completion, logprobs, spans, reason, semantics, timings)


def _spans(meta: Json, policy: str, length: int) -> tuple[VersionSpan, ...]:
    """Which version made which tokens; none where the server names no version that is a number."""
    told = meta.get("weight_versions")
    if not told:
        told = [{"version": meta.get("weight_version"), "start": 0, "end": length}]
    spans = []
    for span in told:
        version = policy_version_of(span["version"])
        if version is not None and span["end"] > span["start"]:
            spans.append(VersionSpan(policy, version, int(span["start"]), int(span["end"])))
    return tuple(spans)


def policy_version_of(name: Any) -> int | None:
    """The policy version that SGLang's name of its weights says, an int64; the first are version 0."""
    if name == FIRST_VERSION:
        return 0
    text = str(name)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
