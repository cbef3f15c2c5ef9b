"""A recorded request, asked again: the call that it was, and the plan that sends exactly its prompt's ids.
Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from rollbook.ingest.endpoints.chat.read import OWN_FIELDS
from rollbook.ingest.endpoints.chat.read import PATH as CHAT
from rollbook.ingest.endpoints.history import EarlierTurn, History
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.requests.fields import SamplingFields
from rollbook.ingest.tokens.tree import Plan, TreeTurn, TurnTree, ids_bytes
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.replay.rollout_source import endpoint_of, number_of
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json
from rollbook.store.fold.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Draws:
    """How replies are sampled.

    Attributes:
        seed: each turn's is this and the turn's number; None: the seeds that were recorded.
        greedy: the most probable token each time, whatever was recorded.
    """

    seed: int | None = None
    greedy: bool = False


def call_again(source: Trajectory, turn: Turn, draws: Draws) -> ModelCall:
    """The call that a turn was recorded for, asking for one completion, sampled as it was.

    Raises:
        ReplayError: its endpoint is none that this release serves.
        RequestError: it can no longer be read.
    """
    api = APIS.get(endpoint_of(turn))
    if api is None:
        text = f"turn {number_of(turn)} was asked at {endpoint_of(turn)}, which is not served here"
        raise ReplayError(text)
    asked = turn.requested
    raw = api.conversation == "prompt"
    messages = source.messages(turn)
    said: Any = source.prompt_ids(turn).tolist() if raw else source.items(turn)
    body = {api.conversation: messages if said is None else said} | asked.request
    call = api.read(body, _history(source))
    fields = call.fields.model_copy(update=_sampling(turn, draws))
    return replace(call, messages=[] if raw else messages, rest=asked.request, fields=fields)


def as_chat(call: ModelCall, messages: list[Json]) -> ModelCall:
    """The call with other messages, as a chat completion: no other API's form is made of new messages."""
    if call.endpoint == CHAT:
        return replace(call, messages=messages)
    rest = call.fields.model_dump(exclude_none=True) | ({"tools": call.tools} if call.tools else {})
    return replace(
        call,
        endpoint=CHAT,
        messages=messages,
        rest=rest,
        items=None,
        own_fields=OWN_FIELDS,
        missing_fields=frozenset(),
    )


def plan_again(source: Trajectory, turn: Turn, tree: TurnTree, parent: TreeTurn | None) -> Plan:
    """The plan that sends a recorded prompt, id for id.

    Args:
        tree: the turns of the replay so far.
        parent: the turn among them that has the prompt and the completion of the recorded turn's parent, so
            that only what is new of the prompt is stored.

    Raises:
        CorruptionError: the prompt does not fold to the ids that were sent.
    """
    ids = source.prompt_ids(turn)
    messages, hashes = tree.known_part(source.messages(turn))
    delta = ids if parent is None else ids[parent.length :]
    hasher = hashlib.sha256() if parent is None else parent.hasher.copy()
    hasher.update(ids_bytes(delta))
    base, shared = tree.base(messages, parent)
    reason = None if parent is not None else _root_reason(turn, tree)
    # What the template does not show was found when the request was recorded.
    left_out = tuple(name for name in turn.requested.honoured if name not in SamplingFields.model_fields)
    stored = (ids, delta, base, shared, messages, hashes, hasher)
    return Plan(parent, parent, reason, *stored, left_out=left_out)


def _root_reason(turn: Turn, tree: TurnTree) -> str:
    if not tree.turns:
        return "first_turn"
    return turn.requested.root_reason or "replayed_otherwise"


def _history(source: Trajectory) -> History:
    """The trajectory's turns, for a request that names earlier ones instead of repeating them."""

    def earlier(turn_id: str) -> EarlierTurn | None:
        turn = source.turns.get(turn_id)
        if turn is None or turn.completed is None:
            return None
        return EarlierTurn(source.messages(turn), turn.requested.request, turn.completed.reply)

    return earlier


def _sampling(turn: Turn, draws: Draws) -> Json:
    """What is sampled by, in the place of what the request left open when it was recorded."""
    recorded = turn.requested.sampling
    own = recorded.get("seed", number_of(turn))
    update: Json = {
        "n": 1,
        "seed": own if draws.seed is None else draws.seed + number_of(turn),
        "max_tokens": recorded.get("max_new_tokens"),
        "max_completion_tokens": None,
    }
    return update | ({"temperature": 0.0} if draws.greedy else {})
