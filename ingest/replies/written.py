"""A reply made of text as the ids that its model would have sampled. Pure, given a tokenizer.

Nobody sampled such a reply, so there is no proof of what its ids would have been. Several texts are tried:
what the chat template puts behind its prompt, the same with an empty thought where the prompt opens one, and
what the model family's writer writes. Each is cut behind the first token at which an engine stops. The first
whose ids the family's own parser reads back as the same reasoning, text and calls is the reply. If there is
none, no model of this template says it, and it is refused by the parts that cannot be said: a call that a
template leaves out is never trained as an empty reply.
"""

from __future__ import annotations

import functools
import json
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rollbook.ingest.replies.arguments import is_object
from rollbook.ingest.replies.choose import opens_reasoning
from rollbook.ingest.replies.family import SPACE, UNCLOSED_REASONING, Call, Family, Parsed, ReplyContext
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import REASONING, in_form, shown
from rollbook.store.errors import ReplyError, RequestError
from rollbook.store.events import Json, TokenIds

LEFT_OUT = {"reasoning": "reasoning_left_out", "calls": "calls_left_out"}
"""Parts that can be left out of a reply -> the flag of a turn that lacks them."""
_FIELDS = {"reasoning": REASONING, "calls": ("tool_calls", "function_call")}
_THOUGHT, _ANSWER = "a-thought-that-nobody-has", "an-answer-that-nobody-gives"
_CLOSINGS = ("</think>", "[/THINK]")


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A reply as its model would have sampled it.

    Attributes:
        prompt: what it was written behind.
        text: from the end of the prompt, its end-of-turn token included.
        reply: the message that the ids say.
        left_out: what of the given message they do not say.
    """

    prompt: str
    text: str
    ids: TokenIds
    reply: Json
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ReplyWriter:
    """Writes replies for one model.

    Attributes:
        leave_out: those of `LEFT_OUT` that a reply goes without where they cannot be said.
    """

    tokenizer: ChatTokenizer
    family: Family
    leave_out: Collection[str] = ()

    def write(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] | None,
        reply: Json,
        template_kwargs: Json | None = None,
    ) -> Written:
        """The reply behind these messages.

        Raises:
            RequestError: 400, the template refuses the messages, or the reply has no form.
            ReplyError: no model of the template says this; the message names the parts and the template.
        """
        kwargs = template_kwargs or {}
        prompt = self.tokenizer.render(messages, tools, generate=True, **kwargs)
        whole = _parts(reply, self.family, prompt)
        refusal: ReplyError | None = None
        for left in _leaving(whole):
            kept = _without(reply, left, whole)
            try:
                text, ids = self._written(prompt, messages, tools, kept, kwargs)
            except ReplyError as error:
                refusal = refusal or error
                continue
            if refusal is None:
                return Written(prompt, text, ids, kept)
            if not set(left) <= set(self.leave_out):
                raise self._refused(refusal, left)
            if says_nothing(kept):
                raise ReplyError(f"without its {_and(left)} the reply says nothing", left)
            return Written(prompt, text, ids, kept, left)
        assert refusal is not None
        raise self._refused(refusal, ("text",))

    def _refused(self, refusal: ReplyError, parts: tuple[str, ...]) -> ReplyError:
        """The refusal, with the parts without which the reply could be said."""
        whose = f"the chat template of {self.tokenizer.name} (replies of {self.family.name})"
        return ReplyError(f"the reply's {_and(parts)} cannot be said with {whose}: {refusal}", parts)

    @property
    def end_of_text(self) -> int:
        """The token that ends a reply of text: that which family or template put there."""
        stops = stops_of(self.tokenizer)
        end = self._end(Parsed(None, ""))
        return self.tokenizer.stop_ids[stops.index(end) if end in stops else 0]

    def _written(
        self, prompt: str, messages: Sequence[Json], tools: Sequence[Json] | None, reply: Json, kwargs: Json
    ) -> tuple[str, TokenIds]:
        wanted = _parts(reply, self.family, prompt)
        ends = self._ends(wanted)
        trial = _Trial(self.tokenizer, self.family, wanted, _offered(tools, wanted.calls), prompt, ends)
        for text in self._texts(prompt, messages, tools, reply, wanted, kwargs, trial.refusals):
            written = trial.taken(text)
            if written is not None:
                return written
        raise trial.refusal()

    def _texts(
        self,
        prompt: str,
        messages: Sequence[Json],
        tools: Sequence[Json] | None,
        reply: Json,
        wanted: Parsed,
        kwargs: Json,
        refusals: list[str],
    ) -> Iterator[str]:
        """What may be sampled behind the prompt, the likeliest first."""

        def rendered(message: Json) -> str | None:
            try:
                whole = self.tokenizer.render([*messages, message], tools, generate=False, **kwargs)
            except RequestError as error:
                refusals.append(str(error))
                return None
            return whole[len(prompt) :] if whole.startswith(prompt) else None

        ends, own = self._ends(wanted), self._end(wanted)
        parted = reply | {"content": wanted.content, REASONING[0]: wanted.reasoning}
        for message in (reply, parted) if _thought_in_content(reply, wanted) else (reply,):
            text = rendered(message)
            if text is not None:
                yield text + own if self.family.end(wanted) and _cut(text, ends) is None else text
        if opens_reasoning(prompt) and not wanted.reasoning:
            text = rendered(reply | {REASONING[0]: _THOUGHT})
            if text is not None and text.count(_THOUGHT) == 1:
                yield text.replace(_THOUGHT, "")
        text = self.family.write(wanted, ReplyContext(prompt, self.tokenizer.template_source))
        if text is not None:
            yield text + own

    def _ends(self, parts: Parsed) -> tuple[str, ...]:
        """The tokens at which such a reply ends: the engine's, and that which the parser takes for an end."""
        own = self.family.end(parts)
        ends = stops_of(self.tokenizer)
        known = own in self.family.markers and self.tokenizer.tokenizer.token_to_id(str(own)) is not None
        return (*ends, str(own)) if known and own not in ends else ends

    def _end(self, parts: Parsed) -> str:
        """The token that ends a reply of these parts, where the template does not put it; empty: unknown."""
        own = self.family.end(parts)
        if own in self._ends(parts):
            return str(own)
        of_text = _end_of_text(self.tokenizer)
        return stops_of(self.tokenizer)[0] if own and not of_text else of_text


@dataclass(slots=True, eq=False)
class _Trial:
    """Texts that may be a reply, read back one after another.

    Attributes:
        ends: the tokens at which an engine stops.
        refusals: why there are no more texts.
        nearest: of those that are read otherwise, in how many parts the best one differs, and how it is read.
    """

    tokenizer: ChatTokenizer
    family: Family
    wanted: Parsed
    tools: Sequence[Json] | None
    prompt: str
    ends: tuple[str, ...]
    refusals: list[str] = field(default_factory=list)
    nearest: tuple[int, str] | None = None

    def taken(self, text: str) -> tuple[str, TokenIds] | None:
        """The text up to where an engine stops, and its ids, if they say what is wanted."""
        cut = _cut(text, self.ends)
        if cut is None:
            self.refusals.append("it does not end such a reply with an end-of-turn token")
            return None
        ids = self.tokenizer.encode(cut)
        read = self._read(ids)
        differing = _differing(self.wanted, read) if read else len(LEFT_OUT) + 1
        if not differing:
            return cut, ids
        if self.nearest is None or differing < self.nearest[0]:
            self.nearest = differing, f"{shown(cut)} is read as {_describe(read)}"
        return None

    def refusal(self) -> ReplyError:
        """Why none was taken."""
        if self.nearest is not None:
            return ReplyError(self.nearest[1])
        reason = (
            f"it says: {self.refusals[0]}" if self.refusals else "it puts no such reply behind its prompt"
        )
        return ReplyError(reason)

    def _read(self, ids: TokenIds) -> Parsed | None:
        """What the ids say; None: they do not end where the text does."""
        stops = {self.tokenizer.tokenizer.token_to_id(end) for end in self.ends}
        inner, last = ids[:-1].tolist(), ids[-1:].tolist()
        if not stops.issuperset(last) or not stops.isdisjoint(inner):
            return None
        text = self.tokenizer.reply_text(inner, self.family.markers)
        thinking = opens_reasoning(self.prompt)
        return self.family.parse(text, self.tools, in_reasoning=thinking, final=True)


def stops_of(tokenizer: ChatTokenizer) -> tuple[str, ...]:
    """The end-of-turn tokens as text."""
    return tuple(tokenizer.decode([i], special=True) for i in tokenizer.stop_ids)


@functools.lru_cache(maxsize=16)
def _end_of_text(tokenizer: ChatTokenizer) -> str:
    """The end-of-turn token that the template puts behind a reply of text; empty: none."""
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _ANSWER}]
    try:
        _, shown_once, text = tokenizer.render(messages, None, generate=False).partition(_ANSWER)
    except RequestError:
        return ""
    cut = _cut(text, stops_of(tokenizer)) if shown_once else None
    return next((end for end in stops_of(tokenizer) if cut and cut.endswith(end)), "")


def _cut(text: str, ends: Sequence[str]) -> str | None:
    """The text up to and with the first token at which an engine stops; None: it holds none."""
    stops = [(at, -len(end), end) for end in ends if end and (at := text.find(end)) >= 0]
    if not stops:
        return None
    at, _, end = min(stops)
    return text[: at + len(end)]


def _parts(reply: Json, family: Family, prompt: str) -> Parsed:
    """What a message says; reasoning that stands in its content, as it was sampled, is reasoning.

    Raises:
        RequestError: 400, it has no form.
        ReplyError: it holds what no model samples as text.
    """
    message = in_form(reply, "the reply")
    content, thought = message["content"], message.get(REASONING[0])
    if not isinstance(content, str):
        raise ReplyError("the reply's text holds an image: no model samples one as text", ("text",))
    calls = tuple(
        Call(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    for call in calls:
        if not is_object(call.arguments):
            text = f"the reply's calls: the arguments of {call.name} are {shown(call.arguments)}"
            raise ReplyError(f"{text}: write a JSON object", ("calls",))
    if thought is None:
        # What was copied out of a prompt that opens the reasoning has its end alone.
        opened = opens_reasoning(prompt) and any(mark in content for mark in _CLOSINGS)
        parsed = family.parse(content, None, in_reasoning=opened, final=True)
        if parsed.reasoning is not None and UNCLOSED_REASONING not in parsed.flags:
            thought, content = parsed.reasoning, parsed.content
    return Parsed(thought, content, calls)


def _thought_in_content(reply: Json, parts: Parsed) -> bool:
    """Whether a message's content holds its reasoning."""
    return bool(parts.reasoning) and not any(reply.get(name) for name in REASONING)


def _leaving(parts: Parsed) -> Iterator[tuple[str, ...]]:
    """Nothing, then each part of the reply that can be left out, then all of them."""
    there = {"reasoning": parts.reasoning, "calls": parts.calls}
    present = [part for part, value in there.items() if value]
    for count in range(len(present) + 1):
        yield from combinations(present, count)


def _without(reply: Json, left: Sequence[str], parts: Parsed) -> Json:
    """The message without the parts that are left out, wherever they stand in it."""
    kept = {k: v for k, v in reply.items() if not any(k in _FIELDS[part] for part in left)}
    return (
        kept | {"content": parts.content}
        if "reasoning" in left and _thought_in_content(reply, parts)
        else kept
    )


def says_nothing(reply: Json) -> bool:
    """A reply without text, reasoning and calls."""
    message = in_form(reply)
    return not (_text(str(message["content"])) or message.get(REASONING[0]) or message.get("tool_calls"))


def _and(parts: Sequence[str]) -> str:
    return " and ".join(parts)


def _offered(tools: Sequence[Json] | None, calls: Sequence[Call]) -> Sequence[Json] | None:
    """The tools of the request, and those that are called without being among them."""
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    named = {function.get("name") for function in functions if isinstance(function, dict)}
    missing = {call.name: None for call in calls if call.name not in named}
    return [*(tools or ()), *({"type": "function", "function": {"name": name}} for name in missing)] or None


def _differing(wanted: Parsed, read: Parsed) -> int:
    """How many parts are read otherwise than they were meant, white space around them aside."""
    same = (
        _text(wanted.reasoning) == _text(read.reasoning),
        _text(wanted.content) == _text(read.content),
        [_meaning(call) for call in wanted.calls] == [_meaning(call) for call in read.calls],
    )
    return same.count(False)


def _text(text: str | None) -> str:
    """A text without the white space that templates trim; in the form that tokenizers bring text to."""
    return unicodedata.normalize("NFC", (text or "").strip(SPACE))


def _meaning(call: Call) -> tuple[str, str]:
    """A call, its arguments so that 10, 10.0, "10" and true are four things."""
    arguments = json.dumps(json.loads(call.arguments), sort_keys=True, ensure_ascii=False)
    return call.name, unicodedata.normalize("NFC", arguments)


def _describe(read: Parsed | None) -> str:
    if read is None:
        return "more than one turn"
    parts = {
        "reasoning": read.reasoning or "",
        "text": read.content,
        "calls": ", ".join(f"{call.name}({call.arguments})" for call in read.calls),
    }
    return ", ".join(f"{part} {shown(value)}" for part, value in parts.items() if value) or "nothing"
