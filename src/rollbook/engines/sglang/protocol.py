"""SGLang's `/generate` as JSON: request bodies, and what its answers mean. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rollbook.engines.engine import Prompt, Sampling, Scores, TopTokens
from rollbook.store.errors import EngineError
from rollbook.store.events import Json, Logprobs, TokenIds, VersionSpan, token_ids

SEMANTICS = {"kind": "sampled", "of": "softmax(logits / temperature)", "filters": []}
"""What its logprobs are of: not filtered by top-p, top-k or min-p; at temperature 0, of softmax(logits)."""
OLDEST_SERVER = "0.5.19"
"""The first SGLang whose answers say which weights made which tokens (`weight_versions`)."""
_AS_NAMED = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
)
"""Sampling parameters that have the same name, meaning and default here and there."""
_NOT_SGLANGS = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, binascii.Error)
"""What reading raises where an answer is of another form."""


VersionOf = Callable[[str], int | None]
"""The policy version that a name of weights is bound to, None where it is to none."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The shape of a mixture-of-experts model: SGLang returns expert ids without it."""

    layers: int
    topk: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The result of one request of a completion. `version_spans` are places in this part.

    Attributes:
        finish: SGLang's finish_reason.
        experts: int32 [positions, layers, topk]; None if the server returns none, or those of
            other weights.
        numbers: of cached tokens, and how often the request was retracted, if not zero.
        top: the likeliest tokens in each place, if they were asked for.
    """

    ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    finish: Json
    experts: npt.NDArray[np.int32] | None
    numbers: dict[str, int]
    top: TopTokens | None = None

    @property
    def aborted(self) -> bool:
        """Whether it was ended from outside, by no fault of its own."""
        return self.finish["type"] == "abort" and self.finish.get("status_code") is None


def check_version(info: Any, url: str) -> str | None:
    """A note where a server's version is unknown, such as behind a router; None where it is new enough.

    Args:
        info: what /server_info answers.

    Raises:
        EngineError: it is older than `OLDEST_SERVER`.
    """
    version = info.get("version") if isinstance(info, dict) else None
    release = release_of(version)
    if release is None:
        return f"{url} does not say which SGLang it is: nothing older than {OLDEST_SERVER} is supported"
    if release < (release_of(OLDEST_SERVER) or ()):
        raise EngineError(
            f"{url} is SGLang {version}, whose answers do not say which weights made which tokens: "
            f"use {OLDEST_SERVER} or newer"
        )
    return None


def check_preferred(info: Any, url: str) -> None:
    """Check that a server adds no sampling parameters of its own.

    Args:
        info: what /model_info answers.

    Raises:
        EngineError: it prefers sampling parameters that not every request sets, so no turn would record them.
    """
    value = info.get("preferred_sampling_params") if isinstance(info, dict) else None
    try:
        preferred = dict((orjson.loads(value or "{}") if isinstance(value, str) else value) or {})
    except (TypeError, ValueError) as error:
        raise EngineError(f"{url} has preferred_sampling_params that are no object: {value!r}") from error
    if unasked := sorted(preferred.keys() - sampling_params(Sampling(1, 1.0, 0)).keys()):
        raise EngineError(
            f"{url} samples with {', '.join(unasked)} of its own, which no turn would record: "
            "start it without them in --preferred-sampling-params"
        )


def release_of(version: Any) -> tuple[int, ...] | None:
    """The numbers that a version begins with; None of what is no version."""
    match = re.match(r"\d+(\.\d+)+", version) if isinstance(version, str) else None
    return tuple(map(int, match[0].split("."))) if match else None


def request_body(prompt: Prompt, sampling: Sampling, stream: bool, routing: Routing | None = None) -> Json:
    """A request for a completion of the prompt's ids."""
    body: Json = {
        "rid": prompt.request_id,
        "input_ids": prompt.ids,
        "sampling_params": sampling_params(sampling),
        "return_logprob": True,
        "stream": stream,
    }
    if routing is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": experts_start(prompt)}
    if sampling.top:
        body["top_logprobs_num"] = sampling.top
    if prompt.adapter:
        body["lora_path"] = prompt.adapter
    return body | ({"image_data": list(prompt.images)} if prompt.images else {})


def score_body(ids: TokenIds, adapter: str, top: int) -> Json:
    """A request for the logprobs of given tokens: they are of temperature 1, whatever is asked for."""
    body: Json = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top,
    }
    return body | ({"lora_path": adapter} if adapter else {})


def read_scores(answer: Any, ids: TokenIds, top: int) -> Scores:
    """Parse a server's answer to `score_body`.

    Raises:
        EngineError: it does not match the request.
    """
    try:
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"]
        if [entry[1] for entry in entries] != ids.tolist():
            raise EngineError("the server's input_token_logprobs are not of the tokens that were sent")
        logprobs = np.asarray([entry[0] for entry in entries], dtype=np.float32)  # null is not a number
        likeliest = _likeliest(meta["input_top_logprobs"], len(ids), top) if top else None
    except _NOT_SGLANGS as error:
        raise EngineError(f"the server's answer is not SGLang's: {error!r}") from error
    return Scores(logprobs, likeliest)


def _likeliest(places: Any, count: int, least: int = 0) -> TopTokens:
    """The likeliest tokens in each of `count` places, in `least` columns or more; NaN where it is silent."""
    places = [place or [] for place in places]
    if len(places) != count:
        raise EngineError(f"the server tells the likeliest tokens of {len(places)} places, not of {count}")
    most = max(least, *map(len, places), 0)
    top = TopTokens(np.zeros((count, most), np.int32), np.full((count, most), np.nan, np.float32))
    for at, place in enumerate(places):
        top.ids[at, : len(place)] = [entry[1] for entry in place]
        top.logprobs[at, : len(place)] = [_number(entry[0]) for entry in place]
    return top


def experts_start(prompt: Prompt) -> int:
    """The first position whose experts the parent's turn does not hold: that of its last token."""
    return max(prompt.known_tokens - 1, 0)


def is_greedy(sampling: Sampling) -> bool:
    """Whether the likeliest token is always taken."""
    return sampling.temperature == 0 or sampling.top_k == 1


def sampling_params(sampling: Sampling) -> Json:
    """SGLang's sampling parameters, defaults included, since a server may have other defaults.

    `no_stop_trim` and the two below keep the ids and what they spell untouched. Top-k 1 is sent
    as temperature 0, which samples the same: SGLang scales the logits of such a request by its
    temperature only while another request of its batch is not greedy, so the distribution of its
    logprobs would be unknown.
    """
    params: Json = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if is_greedy(sampling) else sampling.temperature,
        "sampling_seed": sampling.seed & (2**31 - 1),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    params |= {name: getattr(sampling, name) for name in _AS_NAMED}
    if sampling.stop_ids == ():
        params["ignore_eos"] = True
    elif sampling.stop_ids is not None:  # the model's own end it too: see `is_early`
        params["stop_token_ids"] = list(sampling.stop_ids)
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        params["logit_bias"] = sampling.logit_bias
    for kind, value in (sampling.constraint or {}).items():
        params[kind] = orjson.dumps(value).decode() if kind == "json_schema" else value
    return params


def is_early(piece: Part, sampling: Sampling) -> bool:
    """Whether a part ended at the model's own stop, where others were asked for in its place.

    SGLang with `ignore_eos` looks for no stop token at all, and without it always for the model's own.
    """
    matched, asked = piece.finish.get("matched"), sampling.stop_ids
    if not asked or piece.finish["type"] != "stop" or not isinstance(matched, int):
        return False
    return matched not in asked


def new_tokens(chunk: Any, known: int) -> tuple[list[int], list[tuple[float, int]]]:
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
        entries = (meta.get("output_token_logprobs") or [])[-new:]
        return list(chunk["output_ids"][-new:]), [(_number(entry[0]), entry[1]) for entry in entries]
    except _NOT_SGLANGS as error:
        raise EngineError(f"the server's chunk is not SGLang's: {error!r}") from error


def _number(logprob: float | None) -> float:
    """A logprob; JSON has no infinities, and what became null is unknown."""
    return float("nan") if logprob is None else logprob


def weight_names(answer: Any) -> list[str]:
    """The names of the weights behind an answer's tokens, the last ones last; empty if it is no answer."""
    try:
        return [str(span["version"]) for span in _reported_spans(answer["meta_info"], 0)]
    except _NOT_SGLANGS:
        return []


def part(answer: Json, prompt: Prompt, policy: str, routing: Routing | None, version_of: VersionOf) -> Part:
    """Parse a server's answer to a request.

    Args:
        version_of: the version that a name of weights is bound to, None if it is bound to none.

    Raises:
        EngineError: it does not match the request, or says that the request has failed.
    """
    try:
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        ids = [entry[1] for entry in entries]
        logprobs = np.asarray([entry[0] for entry in entries], dtype=np.float32)  # null is not a number
        if ids != list(answer["output_ids"]):
            raise EngineError("the server's output_ids and output_token_logprobs are not of the same tokens")
        result = Part(
            token_ids(ids),
            logprobs,
            _spans(meta, policy, len(ids), version_of),
            dict(meta["finish_reason"]),
            _experts(meta, len(prompt.ids) + len(ids) - 1 - experts_start(prompt), routing),
            {name: int(meta[name]) for name in ("cached_tokens", "num_retractions") if meta.get(name)},
            _likeliest(meta["output_top_logprobs"], len(ids)) if meta.get("output_top_logprobs") else None,
        )
        failed = result.finish["type"] == "abort" and not result.aborted
    except _NOT_SGLANGS as error:
        raise EngineError(f"the server's answer is not SGLang's: {error!r}") from error
    if failed:
        raise EngineError(f"the server gave the request up: {result.finish}")
    if not ids and not result.aborted:
        raise EngineError(f"the server answered without a token: {result.finish}")
    return result


def _experts(meta: Json, positions: int, routing: Routing | None) -> npt.NDArray[np.int32] | None:
    packed = meta.get("routed_experts")
    if packed is None or routing is None:
        return None
    if meta.get("num_retractions") and len(meta.get("weight_versions") or ()) > 1:
        return None  # all are those that the last weights chose, also of tokens that older ones made
    flat = np.frombuffer(base64.b64decode(packed, validate=True), np.dtype("<i4"))
    return flat.reshape(positions, routing.layers, routing.topk)


def _reported_spans(meta: Json, length: int) -> list[Json]:
    """The spans of weight names that the server reports for the tokens."""
    spans: list[Json] = meta.get("weight_versions") or []
    return spans or [{"version": meta.get("weight_version"), "start": 0, "end": length}]


def _spans(meta: Json, policy: str, length: int, version_of: VersionOf) -> tuple[VersionSpan, ...]:
    """The version of each span of tokens; spans whose weights are of no known version are left out."""
    spans = []
    for span in _reported_spans(meta, length):
        version = version_of(str(span["version"]))
        if version is not None and span["end"] > span["start"]:
            spans.append(VersionSpan(policy, version, int(span["start"]), int(span["end"])))
    return tuple(spans)


def moved(span: VersionSpan, by: int) -> VersionSpan:
    """The span, shifted by so many tokens."""
    return replace(span, start=span.start + by, end=span.end + by) if by else span
