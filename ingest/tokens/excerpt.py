"""The part of a long conversation that decides how its next messages are rendered. Pure.

Chat templates look at the system messages, at the last thing the user said, and at the messages around the
end; what a bridge appends rarely depends on anything between. Whether that holds for a template is tried,
not assumed: see `Bridges`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollbook.store.events import Json

TAIL = 6
"""Fewest messages kept at the end."""


def excerpt(messages: Sequence[Json], new: Sequence[Json]) -> list[Json]:
    """Leading system messages, the last user message and the end, from an assistant's message on.

    If the user speaks again among the new messages the end is all since the last time: many templates rewrite
    that then. Short conversations are given back whole.
    """
    lead = 0
    while lead < len(messages) and messages[lead].get("role") in ("system", "developer"):
        lead += 1
    said = [i for i in range(lead, len(messages)) if messages[i].get("role") == "user"]
    if not said:
        return list(messages)
    # Two things the user said: what templates do with the turns before the last one shows.
    first = said[-2] if len(said) > 1 else said[-1]
    speaks = any(m.get("role") not in ("tool", "function") for m in new)
    cut = 0 if speaks else len(messages) - TAIL
    while cut > said[-1] and messages[cut].get("role") != "assistant":
        cut -= 1
    if cut <= said[-1] + 1:
        return [*messages[:lead], *messages[first:]]
    return [*messages[:lead], *messages[first : said[-1] + 1], *messages[cut:]]


Trial = tuple[list[Json], Json, list[Json], list[Json] | None]
"""(request, reply, new messages, tools)"""

_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


def _call(number: int) -> Json:
    function = {"name": "look", "arguments": f'{{"what": "thing {number}"}}'}
    # Nine letters and digits: what the strictest of templates asks of an id.
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _used_tool(number: int, calls: int = 1) -> list[Json]:
    made = [_call(number * 10 + i) for i in range(calls)]
    thought = {"reasoning_content": f"thought {number}"} if number % 4 == 1 else {}
    asked = {"role": "assistant", "content": f"Looking {number}.", "tool_calls": made} | thought
    return [asked, *({"role": "tool", "tool_call_id": c["id"], "content": f"found {c['id']}"} for c in made)]


def _said(number: int) -> list[Json]:
    thought = {"reasoning_content": f"thought {number}"} if number % 2 else {}
    return [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": f"answer {number}"} | thought,
    ]


def trial_conversations() -> Iterator[Trial]:
    """Conversations of every shape that agents have: short and long, with tools and without."""
    system: Json = {"role": "system", "content": "Be brief."}
    user: Json = {"role": "user", "content": "one"}
    more: Json = {"role": "user", "content": "two"}
    answer: Json = {"role": "assistant", "content": "done"}
    for lead in ([], [system]):
        yield [*lead, user], answer, [more], None
        chat = [message for n in range(8) for message in _said(n)]
        yield [*lead, *chat, user], answer, [more], None
        # Tools were used, but only for what was asked long ago.
        used = [m for n in range(4) for m in [*_said(n)[:1], *_used_tool(50 + n, 1 + n % 2), *_said(n)[1:]]]
        chat = [*used, *chat[8:]]
        for steps in (0, 9):
            used = [message for n in range(steps) for message in _used_tool(n, 1 + n % 2)]
            asked, *found = _used_tool(90, 2)
            yield [*lead, user, *used], asked, found, _TOOLS
            yield [*lead, user, *used], answer, [more], _TOOLS
            yield [*lead, *chat, user, *used], asked, found, _TOOLS
            yield [*lead, *chat, user, *used], asked, [*found, more], _TOOLS
