"""From sampled ids to the assistant message that goes out, whole or as it grows. Pure.

Tool calls and reasoning are read by the model family's parser, and calls only when the request offered
tools. What is sent while a reply grows is always a prefix of what the whole reply says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from rollbook.ingest.replies.family import Family, Parsed
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.events import Json, TokenIds

STOP_STRING = "stop_string"
"""Flag: a stop string ended the reply; the ids keep the token that completed it, and what an engine added."""
NOTHING = Parsed(None, "", (), ())


@dataclass(frozen=True, slots=True)
class Reply:
    """The message as sent, the OpenAI finish reason, and flags for the log."""

    message: Json
    finish_reason: str
    flags: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class ReplyReader:
    """How the completions of one request are read.

    Attributes:
        tools: the functions whose calls are looked for, in chat form; None: calls are not read.
        in_reasoning: the prompt ended inside an open reasoning block.
        stops: strings that end the reply, and are no part of it.
        raw: the text is the reply, as it is: no reasoning, no calls.
    """

    tokenizer: ChatTokenizer
    family: Family
    tools: Sequence[Json] | None = None
    in_reasoning: bool = False
    stops: tuple[str, ...] = ()
    raw: bool = False

    def reply(self, ids: TokenIds, finish: str, turn_id: str) -> Reply:
        """Parse a whole completion into the reply.

        Args:
            ids: the completion, its end-of-turn token included if there is one.
            finish: the engine's reason: stop, length or abort.
            turn_id: call ids are minted from it, so that echoes name the turn.
        """
        body = ids[:-1] if len(ids) and int(ids[-1]) in self.tokenizer.stop_ids else ids
        text = self.tokenizer.reply_text(body, self.family.markers)
        cut = first_stop(text, self.stops)
        flags = [] if cut is None else [STOP_STRING]
        if cut is not None:
            text, finish = text[:cut], "stop"
        if self.raw:
            return Reply({"role": "assistant", "content": text}, finish, flags)
        parsed = self.family.parse(text, self.tools, in_reasoning=self.in_reasoning, final=True)
        calls = [
            {
                "id": f"call-{turn_id}-{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(parsed.calls)
        ]
        message: Json = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if calls:
            message |= {"content": parsed.content or None, "tool_calls": calls}
        reason = "tool_calls" if calls and finish == "stop" else finish
        return Reply(message, reason, [*flags, *parsed.flags])


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins, or None."""
    return min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=None)


class GrowingReply:
    """A completion as it is sampled: its text so far, and the part of the reply that is final.

    `tokenizers`' own stream decoder holds back ids whose bytes are no whole characters yet.
    """

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._stream = DecodeStream(skip_special_tokens=False)
        self._text = ""
        self.stopped = False

    def feed(self, ids: Sequence[int]) -> None:
        """Take more ids of the completion."""
        tokenizer = self._reader.tokenizer
        stops = tokenizer.stop_ids
        readable = [i for i in ids if i not in stops]
        added = []
        for token_id in tokenizer.readable(readable, self._reader.family.markers):
            piece = self._stream.step(tokenizer.tokenizer, token_id)
            if piece:
                added.append(piece)
        if not added:
            return
        longest = max(map(len, self._reader.stops), default=0)
        searched = max(len(self._text) - longest, 0)
        self._text += "".join(added)
        if longest and not self.stopped:
            self.stopped = first_stop(self._text[searched:], self._reader.stops) is not None

    def certain(self) -> Parsed:
        """Reasoning and content that the whole reply begins with, whatever tokens follow."""
        reader, text = self._reader, self._text
        # `feed` searches only new text; the whole text is searched once, after a stop string was seen.
        cut = first_stop(text, reader.stops) if self.stopped else None
        text = _without_open_stop(text, reader.stops) if cut is None else text[:cut]
        if reader.raw:
            return Parsed(None, text, (), ())
        return reader.family.parse(text, reader.tools, in_reasoning=reader.in_reasoning, final=False)


def _without_open_stop(text: str, stops: Sequence[str]) -> str:
    """The text without a suffix that may be the beginning of a stop string."""
    held = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:size]):
                held = size
                break
    return text[: len(text) - held]
