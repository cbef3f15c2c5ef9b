"""One form of a chat message, whatever shape it came in: what templates see, and what is compared.

Left to themselves templates make of an odd shape what they like: nothing, Python's own notation, an error.
So what can be meant is brought to one form here, the same for all of them, and what cannot is refused by its
place:

- a field that is null is absent; content that is null or absent is the empty text;
- parts `text`, `input_text`, `output_text`, `refusal`, bare strings and `{"text": ...}` are text, and text
  alone is one string; `image_url` and `input_image` are images by address; every other part is refused;
- an assistant's `refusal` is content, its `function_call` a call; arguments are JSON text;
- reasoning has one name, `reasoning_content`, whichever of three it came under.

The log holds messages as they were sent; this form is made of them anew wherever it is needed.

A second, normal form is for matching a request to its parent turn only, never for rendering. Clients re-
serialise what they echo: key order, `10.0` for `10`, null for an empty string, parts for a string, extra
keys. Two messages with one normal form say the same thing. White space in content counts. Reasoning is not
part of it: many clients drop it, so it is compared apart, by `reasoning_fits`. Nor are names and ids: whether
they count depends on what the template reads, which `TemplateTraits.same` compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from rollbook.store.errors import RequestError
from rollbook.store.events import Json

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients, engines and templates know what a model thought before it answered."""

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part that is text -> the field that holds it."""

_IMAGES = ("image_url", "input_image")
_METADATA = frozenset(("type", "id", "index", "status", "annotations", "logprobs", "cache_control"))
"""Of what a message is made of, fields that say nothing to a model."""
_PLAIN = frozenset(("role", "content"))
_TEXT_FIELDS = frozenset(("content", "name", "tool_call_id"))
EMPTY: tuple[Any, ...] = (None, "", [], {}, False)
"""Values that say nothing."""
_FOLDED = frozenset(("content", "refusal", "function_call", "tool_calls", *REASONING))
_OF_THE_ASSISTANT = ("tool_calls", "function_call")


def in_form(message: Json, where: str = "message") -> Json:
    """The message in one form; the same object where it has that form already.

    Args:
        where: its place, for what cannot be read.

    Raises:
        RequestError: 400, naming the place and what stands there.
    """
    content = message.get("content")
    if type(content) is str and (message.keys() <= _PLAIN or _is_formed(message)):
        return message
    form: Json = {k: v for k, v in message.items() if v is not None and k not in _FOLDED}
    for name in ("name", "tool_call_id"):
        if not isinstance(form.get(name, ""), str):
            raise refused(f"{where}.{name}", form[name], "send a text")
    form["content"] = content_in_form(f"{where}.content", content)
    if message.get("role") != "assistant":
        for name in _OF_THE_ASSISTANT:
            if message.get(name):
                text = f"{where}.{name}: calls belong to messages of role assistant"
                raise RequestError(400, "bad_tool_calls", text)
        return form | {k: message[k] for k in REASONING if message.get(k)}
    if message.get("refusal"):
        form["content"] = _with_text(form["content"], _text(f"{where}.refusal", message["refusal"]))
    thought = _thought(where, message)
    if thought:
        form[REASONING[0]] = thought
    calls = _calls(where, message)
    return form | {"tool_calls": calls} if calls else form


def _is_formed(message: Json) -> bool:
    """Whether a message whose content is a text has the form already, as most have."""
    for name, value in message.items():
        if name in _TEXT_FIELDS:
            if type(value) is not str:
                return False
        elif name == "tool_calls":
            if message.get("role") != "assistant" or type(value) is not list or not value:
                return False
            if not all(map(_is_formed_call, value)):
                return False
        elif value is None or name in _FOLDED:
            return False
    return True


def _is_formed_call(call: Any) -> bool:
    if type(call) is not dict or None in call.values():
        return False
    function = call.get("function")
    if call.get("type") != "function" or type(function) is not dict:
        return False
    arguments = function.get("arguments")
    named = type(function.get("name")) is str and type(call.get("id", "")) is str
    return named and type(arguments) is str and arguments != ""


def content_in_form(where: str, content: Any) -> str | list[Json]:
    """Content as one text, or as parts where there are images among them.

    Raises:
        RequestError: 400.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused(where, content, "send a text or a list of parts")
    parts = [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(where: str, part: Any) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise refused(where, part, "send an object with a type")
    kind = part.get("type", "text" if "text" in part else None)
    if isinstance(kind, str) and kind in TEXTS:
        return {"type": "text", "text": _text(f"{where}.{TEXTS[kind]}", part.get(TEXTS[kind]))}
    if isinstance(kind, str) and kind in _IMAGES:
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str) or not url:
            raise refused(f"{where}.image_url", image, "send {'url': ...}, a link or a data URL")
        return {"type": "image_url", "image_url": {"url": url}}
    text = f"{where}.type is {shown(kind)}, which is not served: send text, or images by image_url"
    raise RequestError(400, "content_not_served", text)


def _text(where: str, text: Any) -> str:
    if not isinstance(text, str):
        raise refused(where, text, "send a text")
    return text


def text_of(where: str, block: Json, name: str = "text") -> str:
    """The text that a block holds.

    Raises:
        RequestError: 400, it holds none.
    """
    return _text(f"{where}.{name}", block.get(name))


def unread(thing: Json, read: Collection[str]) -> set[str]:
    """Names of the fields that say something, beyond those that are read."""
    return {k for k, v in thing.items() if k not in _METADATA and k not in read and v not in EMPTY}


def unread_in_parts(content: Any) -> set[str]:
    """As `unread`, for the parts of a content, under `content`; no form has room for an image's detail."""
    names: set[str] = set()
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        kind = part.get("type", "text")
        names |= unread(part, ("image_url", "detail") if kind in _IMAGES else (TEXTS.get(str(kind), "text"),))
        image = part.get("image_url")
        detail = image.get("detail") if isinstance(image, dict) else part.get("detail")
        if detail not in (None, "auto"):
            names.add("image_url.detail")
    return {f"content.{name}" for name in names}


def _with_text(content: str | list[Json], text: str) -> str | list[Json]:
    return content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]


def _thought(where: str, message: Json) -> str:
    """What the model thought, under whichever name the client sends it."""
    thoughts = {name: message[name] for name in REASONING if message.get(name)}
    for name, thought in thoughts.items():
        if not isinstance(thought, str):
            raise refused(f"{where}.{name}", thought, "send a text")
    if len({thought.strip() for thought in thoughts.values()}) > 1:
        text = f"{where}: {' and '.join(thoughts)} say two different things: send one of them"
        raise RequestError(400, "bad_request", text)
    return next(iter(thoughts.values()), "")


def _calls(where: str, message: Json) -> list[Json]:
    calls, single = message.get("tool_calls"), message.get("function_call")
    if single and calls:
        text = f"{where}: tool_calls and function_call, its older form: send one of them"
        raise RequestError(400, "bad_tool_calls", text)
    if single:
        function = {"type": "function", "function": single}
        return [_call(f"{where}.function_call", function, f"{where}.function_call")]
    if calls is not None and not isinstance(calls, list):
        raise refused(f"{where}.tool_calls", calls, "send a list of calls", "bad_tool_calls")
    at = f"{where}.tool_calls"
    return [_call(f"{at}[{i}]", call, f"{at}[{i}].function") for i, call in enumerate(calls or ())]


def _call(where: str, call: Any, function_where: str) -> Json:
    if not isinstance(call, dict):
        raise refused(where, call, "send an object with a function", "bad_tool_calls")
    if call.get("type") not in (None, "", "function"):
        raise refused(f"{where}.type", call["type"], 'send calls of type "function"', "bad_tool_calls")
    if not isinstance(call.get("id"), str | None):
        raise refused(f"{where}.id", call["id"], "send a text", "bad_tool_calls")
    function = call.get("function")
    if not isinstance(function, dict):
        raise refused(function_where, function, "send an object with name and arguments", "bad_tool_calls")
    if not isinstance(function.get("name"), str):
        raise refused(f"{function_where}.name", function.get("name"), "send a text", "bad_tool_calls")
    arguments = arguments_in_form(f"{function_where}.arguments", function.get("arguments"))
    kept = {k: v for k, v in call.items() if v is not None}
    return kept | {"type": "function", "function": function | {"arguments": arguments}}


def arguments_in_form(where: str, arguments: Any) -> str:
    """A call's arguments as JSON text; what a model wrote that is no JSON stays as it is.

    Raises:
        RequestError: 400.
    """
    if isinstance(arguments, str):
        return arguments or "{}"
    if arguments is None:
        return "{}"
    if not isinstance(arguments, dict):
        raise refused(where, arguments, "send an object, as JSON text", "bad_tool_calls")
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError as error:
        raise RequestError(400, "bad_tool_calls", f"{where} cannot be written as JSON: {error}") from error


def refused(where: str, value: Any, remedy: str, code: str = "bad_request") -> RequestError:
    """The error of a value that cannot be read, named by its place."""
    return RequestError(400, code, f"{where} is {shown(value)}: {remedy}")


def shown(value: Any) -> str:
    """A JSON value in a few words."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = orjson.dumps(value).decode() if isinstance(value, str | float | bool | None) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_ROLES = {"developer": "system", "function": "tool"}


def normal(message: Json) -> list[Any]:
    """[role, content, [[call name, canonical arguments], ...]] of a message."""
    role = message.get("role")
    try:
        form = in_form(message)
    except RequestError:
        # Of an upstream that takes it, or of a log of the time when it was taken here.
        return [_ROLES.get(str(role), role), message.get("content"), message.get("tool_calls")]
    calls = [
        [call["function"]["name"], canonical_arguments(call["function"]["arguments"])]
        for call in form.get("tool_calls") or ()
    ]
    return [_ROLES.get(str(role), role), _content(form["content"]), calls]


def _content(content: str | list[Json]) -> Any:
    """A text; or the texts and, each in a list of its own, the addresses of the images between them."""
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for part in content:
        if part["type"] != "text":
            parts.append([part["image_url"]["url"]])
        elif parts and isinstance(parts[-1], str):
            parts[-1] += part["text"]
        else:
            parts.append(part["text"])
    return parts


def reasoning_of(message: Json) -> str:
    """The reasoning a message shows, under any name that clients use; empty where it shows none."""
    for name in REASONING:
        if reasoning := message.get(name):
            return reasoning.strip() if isinstance(reasoning, str) else ""
    return ""


def reasoning_fits(known: Sequence[Json], shown: Sequence[Json]) -> bool:
    """Whether messages shown again have the reasoning they are known by, each unchanged or left out."""
    for message, other in zip(known, shown, strict=False):
        reasoning = reasoning_of(other)
        if reasoning and reasoning != reasoning_of(message):
            return False
    return True


def reasoning_removed(known: Sequence[Json], shown: Sequence[Json]) -> bool:
    """Whether a message shown again lacks the reasoning it is known by."""
    pairs = zip(known, shown, strict=False)
    return any(
        message is not other and reasoning_of(message) and not reasoning_of(other) for message, other in pairs
    )


def canonical_arguments(arguments: Any) -> str:
    """Call arguments as canonical JSON; text that is no JSON, or nested too deep, stays as it is."""
    if not isinstance(arguments, str):
        return _canonical(arguments)
    try:
        return _canonical(orjson.loads(arguments))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return arguments


def _canonical(value: Any) -> str:
    return orjson.dumps(_integral(value), option=orjson.OPT_SORT_KEYS).decode()


def _integral(value: Any) -> Any:
    """Integral floats as integers, throughout: JavaScript clients write 10 for 10.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_integral(v) for v in value]
    if isinstance(value, dict):
        return {k: _integral(v) for k, v in value.items()}
    return value


def chain(previous: bytes, message: Json) -> bytes:
    """Hash of a message list, from the hash of the list without its last message."""
    return hashlib.sha256(previous + orjson.dumps(normal(message))).digest()


def chain_all(messages: Sequence[Json], known: Sequence[bytes] = (b"",)) -> list[bytes]:
    """Hashes of every prefix: element k covers the first k messages (element 0 is empty).

    Args:
        known: the first of them, where they were computed before.
    """
    hashes = list(known)
    for message in messages[len(hashes) - 1 :]:
        hashes.append(chain(hashes[-1], message))
    return hashes


def conversation_digest(messages: Sequence[Json]) -> bytes:
    """Hash of a whole message list."""
    return chain_all(messages)[-1]
