"""One conversation, whichever API it comes through and streamed or not: the same turns."""

from __future__ import annotations

from typing import Any

from tests.clients.conftest import Proxy, Run

from rollbook.ingest.tokens.message_form import normal, reasoning_of
from rollbook.store.fold.trajectory import Trajectory

PROGRAMS = [
    ("openai_chat.py",),
    ("openai_chat.py", "stream"),
    ("openai_responses.py",),
    ("openai_responses.py", "previous", "stream"),
    ("anthropic_messages.py",),
    ("anthropic_messages.py", "stream"),
]


def _turns(trajectory: Trajectory) -> list[dict[str, Any]]:
    """What does not depend on ids that were minted: tree, tokens, messages and replies."""
    places = {turn_id: i for i, turn_id in enumerate(trajectory.turns)}
    rows = []
    for turn in trajectory.turns.values():
        requested, done = turn.requested, turn.completed
        assert done is not None
        messages = trajectory.messages(turn)
        rows.append(
            {
                "parent": places.get(requested.parent_turn_id or ""),
                "root_reason": requested.root_reason,
                "context": requested.context_key,
                "messages": [normal(m) for m in messages],
                "thoughts": [reasoning_of(m) for m in messages],
                "prompt": trajectory.prompt_ids(turn).tolist(),
                "completion": done.completion_ids.tolist(),
                "reply": normal(done.reply),
                "thought": reasoning_of(done.reply),
                "finish": done.finish_reason,
                "flags": done.flags,
            }
        )
    return rows


def test_the_same_conversation_through_each_api(proxy: Proxy, run: Run) -> None:
    """OpenAI's chat completions and Responses, and Anthropic's messages."""
    by_program = {}
    for words in PROGRAMS:
        name = proxy.new_name()
        run(*words, at=proxy.base(name))
        by_program[words] = _turns(proxy.trajectory(name))
    first, *others = by_program.values()
    assert [turn["parent"] for turn in first] == [None, 0, 1]
    assert [turn["thought"] for turn in first] == ["2 and 3 come first. ✓", "Now the other two.", "Done."]
    for other in others:
        assert other == first
