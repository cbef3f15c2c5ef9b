"""A scripted OpenAI-compatible upstream: the scripted engine's replies, for peers that do not
handle ids.

It finds the mark of the wanted reply in the last message's text and answers with ready-made
parts, so it costs no more than the scripted engine does.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import orjson

from rollbook.bench.scripted.asgi import Message, Receive, Send, read_body, reply, run_alone
from rollbook.bench.scripted.dialogues import Material, Reply
from rollbook.bench.tied import end_with_parent

_MARK = re.compile(r"#(\d\d)$")


class ScriptedOpenAI:
    """`POST .../chat/completions`, not streamed, as an ASGI application."""

    def __init__(self, material: Material) -> None:
        self._choices = [choice_of(answer) for answer in material.replies]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        raw = await read_body(receive)
        if not scope["path"].endswith("/chat/completions"):
            return await reply(send, 404, {"error": {"message": "Not Found"}})
        body = orjson.loads(raw)
        mark = _MARK.search(body["messages"][-1]["content"])
        if mark is None:
            return await reply(send, 400, {"error": {"message": "the last message has no mark"}})
        usage = {"prompt_tokens": 1000, "completion_tokens": 96, "total_tokens": 1096}
        content = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        await reply(send, 200, content | {"choices": [self._choices[int(mark[1])]], "usage": usage})


def choice_of(answer: Reply) -> dict[str, Any]:
    """A reply as the choice of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.name is not None:
        function = {"name": answer.name, "arguments": orjson.dumps(answer.arguments).decode()}
        call_id = "call-00000000-0000-7000-8000-000000000000-0"
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return {"index": 0, "message": message, "finish_reason": "tool_calls" if answer.name else "stop"}


def main() -> None:
    """Serve the material named on a free port, which is printed."""
    end_with_parent()
    run_alone(ScriptedOpenAI(Material.read(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
