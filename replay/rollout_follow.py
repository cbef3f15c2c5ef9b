"""What of a recorded conversation still applies behind a new reply. Pure.

The agent and its tools are not there. A user's message is said whatever the model replied. A tool's result is
the answer to one call: it is used for a call of the same name and arguments, and for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.ingest.tokens.normal_form import normal
from rollbook.store.events import Json

_RESULTS = ("tool", "function")
_SHOWN = 120
"""Characters of a call that a reason shows."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why nothing can follow a reply."""

    reason: str


def following(reply: Json, recorded: Json, added: Sequence[Json]) -> list[Json] | Stopped:
    """The messages that go on behind a new reply, or why none does.

    Args:
        reply: the new one, in chat form.
        recorded: the one in its place in the record.
        added: the messages that the recorded agent sent behind that.
    """
    if any(message.get("role") == "assistant" for message in added):
        return Stopped("the recorded agent went on from a reply of its own making")
    results = [message for message in added if message.get("role") in _RESULTS]
    calls = called(reply)
    if results and not calls:
        return Stopped(f"the new reply makes no call, where the recorded one made {_shown(recorded)}")
    answers = _answers(recorded, results)
    made: list[Json] = []
    for call, said in zip(reply.get("tool_calls") or (), calls, strict=True):
        place = next((i for i, (of, _) in enumerate(answers) if of == said), None)
        if place is None:
            return Stopped(f"the recorded agent never called {_spelled(said)}, so no result of it is known")
        made.append(answers.pop(place)[1] | {"tool_call_id": call.get("id")})
    return [*made, *(message for message in added if message.get("role") not in _RESULTS)]


def called(reply: Json) -> list[tuple[str, str]]:
    """(name, canonical arguments) of each call of a reply."""
    return [(str(name), str(arguments)) for name, arguments in normal(reply)[2] or ()]


def _answers(recorded: Json, results: Sequence[Json]) -> list[tuple[tuple[str, str], Json]]:
    """(call, result) of the recorded reply: by the call's id, or by place where a result names none."""
    calls = called(recorded)
    ids = [call.get("id") for call in recorded.get("tool_calls") or ()]
    found = []
    for place, result in enumerate(results):
        named = result.get("tool_call_id")
        at = ids.index(named) if named is not None and named in ids else place
        if at < len(calls):
            found.append((calls[at], result))
    return found


def _shown(reply: Json) -> str:
    return ", ".join(map(_spelled, called(reply))) or "none"


def _spelled(call: tuple[str, str]) -> str:
    text = f"{call[0]}({call[1]})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
