"""What clients send as JSON, by the Tinker API. A key that is not here is refused, never ignored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from rollbook.edge.bounds import Temperature, check_depth, check_weight
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.train.config.lora import LoraConfig, Target

ALPHA = 32.0
"""Of every model: its factors' product is scaled by 32 / rank."""
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\z"
"""Of weights: it is a part of addresses."""
Index = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Name = Annotated[str, Field(max_length=1024)]
"""Of what is there, or of whatever else a client names."""
MOST_RATE = 1e6
"""Of an optimizer's settings: what it makes of them is within float32."""
MOST_METADATA = 16 << 10
"""Bytes of what a client notes of a session, a model or weights, as JSON."""
MOST_KEYS = 4096
"""Keys of all objects of a body: those that the API has, and what metadata may have."""


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    if (size := len(orjson.dumps(metadata))) > MOST_METADATA:
        raise ValueError(f"has {size} bytes: give at most {MOST_METADATA}")
    return metadata


Metadata = Annotated[dict[str, Any], AfterValidator(_small)]
Texts = Annotated[dict[str, str], AfterValidator(_small)]
Lifetime = Annotated[int, Field(ge=3600, le=315_360_000)] | None
"""Seconds, an hour to ten years; None: without end."""


class Sent(BaseModel):
    """The base of all bodies."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class CreateSession(Sent):
    """A session: what follows is a part of one."""

    tags: Annotated[list[Name], Field(max_length=64)] = []
    user_metadata: Metadata | None = None
    sdk_version: Name = ""
    project_id: Name | None = None
    display_name: Name | None = None
    type: Literal["create_session"] = "create_session"


class Lora(Sent):
    """Which matrices have factors, and of which rank."""

    rank: Annotated[int, Field(ge=1, le=256)]
    seed: Index | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def config(self) -> LoraConfig:
        """The factors.

        Raises:
            RequestError: 400, none would be trained.
        """
        attention: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj") if self.train_attn else ()
        others: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj") if self.train_mlp else ()
        output: tuple[Target, ...] = ("lm_head",) if self.train_unembed else ()
        if not (targets := (*attention, *others, *output)):
            text = "train_attn, train_mlp and train_unembed are false: set one of them"
            raise RequestError(400, "nothing_to_train", text)
        return LoraConfig(rank=self.rank, alpha=ALPHA, targets=targets)


class Optimizer(Sent):
    """The optimizer of a model, for its whole life."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Sent):
    """A model with fresh factors."""

    session_id: Name
    model_seq_id: Index
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    type: Literal["create_model"] = "create_model"


class LoadWeights(Sent):
    """A model from weights that were saved."""

    session_id: Name
    model_seq_id: Index
    path: Name
    optimizer: bool
    base_model: Name | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadState(Sent):
    """Weights that were saved, into a model that is there."""

    model_id: Name
    seq_id: Index
    path: Name
    optimizer: bool
    session_id: None = None
    model_seq_id: None = None
    base_model: None = None
    user_metadata: None = None
    optimizer_config: None = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"


class Adam(Sent):
    """AdamW's settings for one step."""

    learning_rate: Annotated[float, Field(ge=0, le=MOST_RATE)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, le=MOST_RATE)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=MOST_RATE)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0

    def resolved(self) -> Json:
        """As the optimizer names them."""
        values = self.model_dump()
        return values | {"clip_grad": values.pop("grad_clip_norm")}


class OptimStep(Sent):
    """An optimizer step."""

    model_id: Name
    seq_id: Index
    adam_params: Adam
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Sent):
    """Weights and optimizer, under a name."""

    model_id: Name
    path: Annotated[str, Field(pattern=NAME)]
    seq_id: Index
    ttl_seconds: Lifetime = None
    overwrite: bool = False
    user_metadata: Texts | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(Sent):
    """Weights to sample from: under a name, or for a sampler that is opened with them."""

    model_id: Name
    path: Annotated[str, Field(pattern=NAME)] | None = None
    seq_id: Index
    sampling_session_seq_id: Index | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Lifetime = None
    user_metadata: Texts | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @model_validator(mode="after")
    def _named(self) -> SaveForSampler:
        if self.path is None and self.ttl_seconds is not None:
            raise ValueError("ttl_seconds: weights without a path are their sampler's: give path")
        return self

    def digest(self) -> str:
        """The client draws another number of a sampler when it repeats the request."""
        return digest_of(self.model_dump(mode="json", exclude={"sampling_session_seq_id"}))


class SaveExternal(Sent):
    """Weights for other programs: an adapter of PEFT's form."""

    model_id: Name
    path: Annotated[str, Field(pattern=NAME)]
    seq_id: Index
    ttl_seconds: Lifetime = None
    age_encryption_recipients: None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class KeepWeights(Sent):
    """How long weights are there, from now on."""

    ttl_seconds: Lifetime


class WeightsPath(Sent):
    """A question about weights."""

    tinker_path: Name


class CopyWeights(Sent):
    """Weights that are to have another path: in a new session of a project, or in a session that is there."""

    source_path: Name
    session_id: Name | None = None
    model_seq_id: Index | None = None
    destination_project_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    ttl_seconds: Lifetime = None
    weights_access_token: None = None

    @model_validator(mode="after")
    def _to_one_place(self) -> CopyWeights:
        numbered = self.session_id is not None and self.model_seq_id is not None
        part = self.session_id is not None or self.model_seq_id is not None
        if numbered != part or numbered == (self.destination_project_id is not None):
            raise ValueError("give session_id and model_seq_id, or destination_project_id")
        return self


class Page(Sent):
    """A part of a list."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    offset: Annotated[int, Field(ge=0)] = 0
    access_scope: Literal["owned", "accessible"] = "owned"


class PageOfModels(Page):
    """A part of the list of models: of a project's, where it is named."""

    project_id: str | None = None


class Owner(Sent):
    """Whose sessions are searched: a caller's own, whichever it says, unless it names others."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[str], Field(max_length=10)] | None = None


class Status(Sent):
    """A status that sessions may have."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class Cursor(Sent):
    """Where the page before ended."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchSessions(Sent):
    """Sessions that fulfil all of it."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: Owner = Owner()
    statuses: list[Status] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None


class CreateSampler(Sent):
    """A sampler of the base model, or of weights that were saved."""

    session_id: Name
    sampling_session_seq_id: Index
    base_model: Name | None = None
    model_path: Name | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class Text(Sent):
    """A part of a prompt."""

    tokens: Annotated[list[Index], Field(max_length=1 << 20), FailFast()]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Sent):
    """What is gone on from."""

    chunks: Annotated[list[Text], Field(max_length=4096), FailFast()]


StopText = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingParams(Sent):
    """How to sample."""

    max_tokens: Count | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[Index] | list[StopText], Field(max_length=64)] | None = None
    temperature: Annotated[Temperature, Field(le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(Sent):
    """Sequences to be sampled behind one prompt."""

    sampling_session_id: Name
    seq_id: Annotated[int, Field(ge=0, lt=1 << 63)]
    num_samples: Annotated[int, Field(ge=1, le=128)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    base_model: None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=128)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=128)] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Count | None = None
    record_stability_info: Literal[False] | None = None
    type: Literal["sample"] = "sample"


class OfModel(Sent):
    """A question about a model."""

    model_id: Name
    type: str | None = None


class OfRequest(Sent):
    """The result of an operation."""

    request_id: Name
    allow_metadata_only: bool = False


class OfSession(Sent):
    """A sign of life."""

    session_id: Name
    type: str | None = None


Body = TypeVar("Body", bound=Sent)


class Ending(Sent):
    """Why a session ends."""

    reason: dict[str, Any] | None = None
    detail: Any = None


def read_body(kind: type[Body], body: bytes) -> Body:
    """A body of a kind.

    Raises:
        RequestError: 400, it is not one; every key that is wrong is named.
    """
    return read_values(kind, _parsed(body))


def _parsed(body: bytes) -> Any:
    """The value of JSON text whose objects have each key once.

    Raises:
        RequestError: 400, it is none, or is nested too deep; 413, it is more than a body may be.
    """
    check_weight(body)
    try:
        value = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "bad_json", f"the body is not JSON: {error}") from None
    check_depth(value)
    written = _STRING.sub(b"", body).count(b":")
    if written > MOST_KEYS:
        raise RequestError(400, "too_many_keys", f"the body has {written} keys: send at most {MOST_KEYS}")
    if written != _keys(value):
        raise RequestError(400, "repeated_key", "an object of the body has a key twice: send each once")
    return value


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def _keys(value: Any) -> int:
    """How many keys the objects of a value have together."""
    if type(value) is dict:
        return len(value) + sum(map(_keys, value.values()))
    return sum(_keys(one) for one in value if type(one) in (dict, list)) if type(value) is list else 0


def read_values(kind: type[Body], sent: Any) -> Body:
    """A body, or what stands behind the `?` of an address, of a kind.

    Raises:
        RequestError: 400, it is not one; every key that is wrong is named.
    """
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        wrong = "; ".join(f"{_place(e['loc'])}: {e['msg']}" for e in error.errors()[:5])
        raise RequestError(
            400, "bad_request", f"{wrong}: see the compatibility table in docs/service.md"
        ) from None


def _place(parts: Sequence[int | str]) -> str:
    """Where in a body something is wrong. Keys are a client's: it may have made them long."""
    return ".".join(str(part)[:60] for part in parts[:6]) or "body"


class _Address(BaseModel):
    """To which model an operation is sent, and as which of its operations."""

    model_id: Name
    seq_id: Index


@dataclass(frozen=True, slots=True)
class Unusable:
    """An operation of a model that cannot be done: why not, and all that was sent."""

    model_id: Name
    seq_id: int
    why: str
    sent: Any


def read_operation(kind: type[Body], body: bytes) -> Body | Unusable:
    """An operation of a model. One whose number is known and which is wrong in something else is told apart:
    the operations behind it wait for its number.

    Raises:
        RequestError: 400, it has no number.
    """
    sent = _parsed(body)
    try:
        return read_values(kind, sent)
    except RequestError as error:
        try:
            address = _Address.model_validate(sent)
        except ValidationError:
            raise error from None
        return Unusable(address.model_id, address.seq_id, error.message, sent)


def names_model(body: bytes) -> bool:
    """Whether a body says to which model it is sent."""
    try:
        return orjson.loads(body).get("model_id") is not None
    except (orjson.JSONDecodeError, AttributeError):
        return False


def digest_of(body: Json) -> str:
    """The sha256 of what repetitions of a request have in common."""
    return sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
