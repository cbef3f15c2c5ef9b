"""A recorded trajectory as the source of a replay: which of its turns are sampled again, in which
order, and the plan that sends exactly the ids of each recorded prompt. The source is only read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rollbook.ingest.endpoints.api import EarlierTurn, History
from rollbook.ingest.endpoints.chat import OWN_FIELDS
from rollbook.ingest.endpoints.chat import PATH as CHAT
from rollbook.ingest.endpoints.completions import PATH as COMPLETIONS
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.fields import SamplingFields
from rollbook.ingest.tokens.message_form import chain, chain_all
from rollbook.ingest.tokens.tree import Plan, TreeTurn, TurnTree, ids_bytes
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, TrajectoryErased
from rollbook.store.fold.trajectory import Trajectory, Turn, fold


def read_source(log: Store, trajectory_id: str) -> Trajectory:
    """The trajectory as the log has it.

    Raises:
        ReplayError: the log has it no more, or its text was erased.
        CorruptionError: a file that may hold it is damaged.
    """
    events = log.events_about([trajectory_id])
    trajectory = fold(events).get(trajectory_id)
    if trajectory is None:
        raise ReplayError(f"trajectory {trajectory_id}: the log has it no more, retention dropped it")
    erasures = [event.record for event in events if isinstance(event.record, TrajectoryErased)]
    if erasures or any(turn.tokens_erased for turn in trajectory.turns.values()):
        why = erasures[-1].reason if erasures else "not recorded yet: the erasure was cut short, run it again"
        raise ReplayError(
            f"trajectory {trajectory.opened.name!r} was erased ({why}): its requests are gone, and "
            "nothing is left to sample again"
        )
    return trajectory


def endpoint_of(turn: Turn) -> str:
    """The path that the turn's request came to."""
    return str(turn.requested.wire.get("endpoint", "/v1/chat/completions"))


def number_of(turn: Turn) -> int:
    """The turn's number, from 1, as `rollbook show` counts."""
    return turn.position + 1


def turns_between(source: Trajectory, first: int | None, last: int | None) -> list[Turn]:
    """The answered turns from one number to another, in the order in which they were requested.

    Args:
        first, last: None: those of the first and the last turn that was answered.

    Raises:
        ReplayError: there is none to sample again, or one of them has no token ids.
    """
    answered = [turn for turn in source.turns.values() if turn.completed is not None]
    for name, number in (("--from-turn", first), ("--until-turn", last)):
        if number is not None and number not in map(number_of, answered):
            known = _listed(number_of(turn) for turn in answered)
            text = f"{name} {number}: trajectory {source.opened.name!r} has no such answered turn; there are "
            raise ReplayError(text + known)
    chosen = [turn for turn in answered if (first or 1) <= number_of(turn) <= (last or len(source.turns))]
    if not chosen:
        text = f"trajectory {source.opened.name!r} has no answered turn to sample again"
        raise ReplayError(text if not answered else f"{text}: --until-turn lies before --from-turn")
    for turn in chosen:
        if (
            turn.completed is None
            or not len(turn.completed.completion_ids)
            or not turn.completed.prompt_length
        ):
            raise ReplayError(
                f"turn {number_of(turn)} of trajectory {source.opened.name!r} was recorded without token "
                "ids, so there is nothing to compare: leave it out with --from-turn and --until-turn"
            )
    return chosen


def conversation_from(source: Trajectory, first: int | None, last: int | None) -> list[Turn]:
    """The turns of one conversation from a fork on: the fork, and each that goes on from the one before.

    Where several conversations go on from the fork, it is the one that was asked last.

    Args:
        first: number of the fork; None: the first turn that was answered.
        last: number of the last turn; None: where the conversation ends.

    Raises:
        ReplayError: there is none, it has no token ids, or it is no conversation.
    """
    turns = turns_between(source, first, last)
    fork = turns[0]
    if endpoint_of(fork) == COMPLETIONS:
        raise ReplayError(
            f"turn {number_of(fork)} of trajectory {source.opened.name!r} is a raw prompt, which has no "
            "messages to go on from: repeat it, without --continue"
        )
    before = _earlier_turns(source, turns)
    path = [fork]
    for leaf in reversed(turns):
        branch = [leaf]
        while branch[-1] is not fork and (earlier := before[branch[-1].turn_id]) is not None:
            branch.append(earlier)
        if branch[-1] is fork:
            path = branch[::-1]
            break
    return path


def added_messages(source: Trajectory, turn: Turn, then: Turn) -> list[dict[str, object]]:
    """What a later turn's request says beyond an earlier turn's messages and reply."""
    return source.messages(then)[len(source.messages(turn)) + 1 :]


def _earlier_turns(source: Trajectory, turns: list[Turn]) -> dict[str, Turn | None]:
    """Turn id -> its parent, if that is one of these; else the turn whose messages and reply its request
    begins with: the longest such, and of those the latest."""
    earlier: dict[str, Turn | None] = {}
    tips: dict[bytes, Turn] = {}
    for turn in turns:
        hashes = chain_all(source.messages(turn))
        parent = source.parent(turn)
        echoed = next((tips[tip] for tip in reversed(hashes) if tip in tips), None)
        earlier[turn.turn_id] = parent if parent in turns else echoed
        assert turn.completed is not None
        tips[chain(hashes[-1], turn.completed.reply)] = turn
    return earlier


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


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
    """The call that a turn was recorded for, for one completion, sampled as it was.

    Raises:
        ReplayError: its endpoint is none that this release serves.
        RequestError: it can no longer be read.
    """
    api = APIS.get(endpoint_of(turn))
    if api is None:
        text = f"turn {number_of(turn)} was asked at {endpoint_of(turn)}, which is not served here"
        raise ReplayError(text)
    requested = turn.requested
    raw = api.conversation == "prompt"
    messages = source.messages(turn)
    conversation: Any = source.prompt_ids(turn).tolist() if raw else source.items(turn)
    body = {api.conversation: messages if conversation is None else conversation} | requested.request
    call = api.read(body, _history(source))
    fields = call.fields.model_copy(update=_sampling(turn, draws))
    return replace(call, messages=[] if raw else messages, rest=requested.request, fields=fields)


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
    reason = None
    if parent is None:
        reason = turn.requested.root_reason or "replayed_otherwise" if tree.turns else "first_turn"
    # What the template does not show was found when the request was recorded.
    left_out = tuple(name for name in turn.requested.honoured if name not in SamplingFields.model_fields)
    stored = (ids, delta, base, shared, messages, hashes, hasher)
    return Plan(parent, parent, reason, *stored, left_out=left_out)


def _history(source: Trajectory) -> History:
    """The trajectory's turns, for a request that names earlier ones instead of repeating them."""

    def earlier(turn_id: str) -> EarlierTurn | None:
        turn = source.turns.get(turn_id)
        if turn is None or turn.completed is None:
            return None
        return EarlierTurn(source.messages(turn), turn.requested.request, turn.completed.reply)

    return earlier


def _sampling(turn: Turn, draws: Draws) -> Json:
    """The sampling fields to send, in place of what the request left open when it was recorded."""
    read_source = turn.requested.sampling
    own = read_source.get("seed", number_of(turn))
    update: Json = {
        "n": 1,
        "seed": own if draws.seed is None else draws.seed + number_of(turn),
        "max_tokens": read_source.get("max_new_tokens"),
        "max_completion_tokens": None,
    }
    return update | ({"temperature": 0.0} if draws.greedy else {})
