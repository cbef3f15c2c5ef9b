"""What a chat template makes of messages: which forms it takes, and which fields it reads. Pure.

Templates differ in what they read and in how they want it, and none of them says so. A probe renders the same
conversation with and without a thing, or with two values of it, and looks at what changes. Which fields could
matter at all is read from the template's syntax tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from rollbook.ingest.tokens.message_form import REASONING
from rollbook.ingest.tokens.sandbox import Unbounded, budget
from rollbook.store.events import Json

Rendered = Callable[[Sequence[Json], Sequence[Json] | None], str | None]
"""(messages, tools) -> the text; None: the template refuses them."""

ANY = "*"
"""Stands for every field: the template writes messages, or calls, out as they are."""
CALL = "call"
"""The place of a call's fields among those of the roles."""

_FORMED = frozenset(("role", "content", "tool_calls", *REASONING))
_FORMED_IN_CALLS = frozenset(("type", "function"))
_ALWAYS = frozenset(("name", "tool_call_id", "id"))
_PROBE, _OTHER, _CALL_ID = "probe", "other", "call00001"
_UNKNOWN = "a_field_that_no_template_knows"
_IMAGE = "probe:image"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How a template wants messages, and what of them it reads.

    Attributes:
        dict_arguments: call arguments as an object; else as JSON text.
        text_as_parts: it leaves out text that does not come as a list of parts.
        image_type: the type of part that it shows images of; None: it shows none.
        developer: it knows this role, and makes something else of it than of `system`.
        reasoning: the field that it reads reasoning from; None: from none.
        null_beside_calls: it shows calls only where the content is null, and not where it is empty.
        thinks_beside_calls: a message may hold reasoning, content and calls at once.
        counted: role, or `CALL` -> fields whose value changes the text. With `ANY` all of them do.
        variables: names that it reads of what is given beside messages and tools.
    """

    dict_arguments: bool = True
    text_as_parts: bool = False
    image_type: str | None = None
    developer: bool = False
    reasoning: str | None = None
    null_beside_calls: bool = False
    thinks_beside_calls: bool = True
    counted: Mapping[str, frozenset[str]] | None = None
    variables: frozenset[str] = frozenset()

    def reads(self, place: str, field: str) -> bool:
        """Whether a field of a role's messages, or of calls, changes the text."""
        fields = (self.counted or {}).get(place, frozenset())
        return field in fields or ANY in fields

    def same(self, message: Json, other: Json) -> bool:
        """Whether two messages that say the same in their normal form are the same to this template too.

        Args:
            message: in one form, as the other.
        """
        role = str(message.get("role"))
        if self.developer and role != other.get("role") and "developer" in (role, other.get("role")):
            return False
        if not self._same(place_of(role), message, other, _FORMED):
            return False
        calls = zip(message.get("tool_calls") or (), other.get("tool_calls") or (), strict=False)
        return all(self._same(CALL, call, other_call, _FORMED_IN_CALLS) for call, other_call in calls)

    def _same(self, place: str, message: Json, other: Json, formed: frozenset[str]) -> bool:
        fields = (self.counted or {}).get(place, frozenset())
        if ANY in fields:
            return {k: v for k, v in message.items() if k not in formed} == {
                k: v for k, v in other.items() if k not in formed
            }
        return all(message.get(field) == other.get(field) for field in fields)


def place_of(role: str) -> str:
    """The role under which a message's fields are counted."""
    return {"developer": "system", "function": "tool"}.get(role, role)


def probed(template: jinja2.Template, source: str, special: Json) -> TemplateTraits:
    """The traits of a template.

    Args:
        special: what it is given beside messages and tools, such as bos_token.

    Raises:
        Unbounded: it takes, or makes, more than any conversation needs.
    """

    def render(messages: Sequence[Json], tools: Sequence[Json] | None) -> str | None:
        try:
            with budget():
                return template.render(messages=messages, tools=tools, add_generation_prompt=False, **special)
        except Unbounded:
            raise
        except Exception:  # whatever a template raises, it refuses
            return None

    parts = _takes_text_as_parts(render)
    as_objects = _takes_objects(render)

    null = _wants_null(render, as_objects=as_objects)

    def shaped(messages: Sequence[Json], tools: Sequence[Json] | None) -> str | None:
        formed = [_shaped(m, parts=parts, as_objects=as_objects, null=null) for m in messages]
        return render(formed, tools)

    tree = template.environment.parse(source)
    reasoning = _reasoning_field(shaped)
    return TemplateTraits(
        dict_arguments=as_objects,
        text_as_parts=parts,
        image_type=_image_type(render, parts=parts),
        developer="developer" in source and _knows_developer(shaped),
        reasoning=reasoning,
        null_beside_calls=null,
        thinks_beside_calls=reasoning is None or _thinks_beside_calls(shaped, reasoning),
        counted=_counted(shaped, _names(tree)),
        variables=frozenset(jinja2.meta.find_undeclared_variables(tree)),
    )


def _knows_developer(render: Rendered) -> bool:
    texts = [
        render([_message(role, _PROBE), _message("user", "u")], None) or ""
        for role in ("developer", "system")
    ]
    return _PROBE in texts[0] and texts[0] != texts[1]


def _message(role: str, content: str, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def _call() -> Json:
    function = {"name": "look", "arguments": {"what": "it"}}
    return {"id": _CALL_ID, "type": "function", "function": function}


_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


def _shaped(message: Json, *, parts: bool, as_objects: bool, null: bool = False) -> Json:
    shaped = dict(message)
    if null and "tool_calls" in message and not message["content"]:
        shaped["content"] = None
    elif parts:
        shaped["content"] = [{"type": "text", "text": message["content"]}]
    if not as_objects and "tool_calls" in message:
        shaped["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": '{"what": "it"}'}}
            for call in message["tool_calls"]
        ]
    return shaped


def _takes_objects(render: Rendered) -> bool:
    """Most templates want call arguments as an object; some concatenate them, or write them as they are."""

    def shown(content: Any, arguments: Any) -> str | None:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        called = {"role": "assistant", "content": content, "tool_calls": [call]}
        return render([_message("user", "u"), called], None)

    for content in ("", None):
        text = shown(content, {"a": 1})
        if text is None and shown(content, '{"a": 1}') is not None:
            return False
        if "{'a'" in (text or ""):
            return False  # Python's own notation is no JSON
    return True


def _wants_null(render: Rendered, *, as_objects: bool) -> bool:
    """Whether a call is shown beside null, and not beside the empty text (DeepSeek-R1's distillates)."""

    def shows(content: Any) -> bool:
        called = _shaped(_message("assistant", "", tool_calls=[_call()]), parts=False, as_objects=as_objects)
        return "look" in (render([_message("user", "u"), called | {"content": content}], None) or "")

    return shows(None) and not shows("")


def _takes_text_as_parts(render: Rendered) -> bool:
    """Whether text reaches the prompt as a list of parts only (Idefics, SmolVLM, LLaVA)."""

    def shows(content: Any) -> bool:
        return _PROBE in (render([{"role": "user", "content": content}], None) or "")

    return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def _image_type(render: Rendered, *, parts: bool) -> str | None:
    """Which type of part makes the template write that here is an image, and not the part as it is."""
    text: Json = {"type": "text", "text": _PROBE}
    bare = render([{"role": "user", "content": [text] if parts else _PROBE}], None)
    for kind in ("image_url", "image"):
        image = image_part(kind, _IMAGE)
        shown = render([{"role": "user", "content": [text, image]}], None)
        if shown is None or shown == bare or shown.count(_PROBE) != 1:
            continue
        if not any(mark in shown for mark in (_IMAGE, "'type'", '"type"')):
            return kind
    return None


def image_part(kind: str, url: str) -> Json:
    """An image as a part of the type that a template reads."""
    return {"type": kind, kind: url if kind == "image" else {"url": url}}


def _conversations(role: str, fields: Json, calls: Json) -> Iterator[tuple[list[Json], list[Json] | None]]:
    """Conversations in which the messages of a role have these fields, and all calls those.

    With tools and without; each role is in several places: templates look at the first message, the last, and
    what is around them.
    """

    def message(who: str, content: str, **more: Any) -> Json:
        return _message(who, content, **more) | (fields if who == role else {})

    call_message = message("assistant", "look up", tool_calls=[_call() | calls])
    result = message("tool", "found") | ({} if role == "tool" else {"tool_call_id": _CALL_ID})
    plain = [message("user", "one"), message("assistant", "answer"), message("user", "two")]
    system = message("system", "be brief")
    yield [system, *plain, message("assistant", "done")], None
    yield [*plain, system, message("assistant", "done")], None
    yield [*plain, call_message, result, call_message | {"content": ""}, result], _TOOLS
    yield (
        [system, message("user", "one"), call_message, result, message("assistant", "so"), *plain[:1]],
        _TOOLS,
    )


def _outcomes(render: Rendered, role: str, fields: Json, calls: Json) -> list[str | None]:
    return [render(*conversation) for conversation in _conversations(role, fields, calls)]


def _reasoning_field(render: Rendered) -> str | None:
    """The field whose text the template shows in most places, of several the one that clients use most."""
    shown = {
        name: sum((text or "").count(_PROBE) for text in _outcomes(render, "assistant", {name: _PROBE}, {}))
        for name in REASONING
    }
    best = max(shown, key=lambda name: shown[name])
    # A template may refuse reasoning beside content and calls, and take it where there is no content.
    alone = {name: _PROBE in (_beside(render, name, "") or "") for name in REASONING}
    return best if shown[best] else next((name for name in REASONING if alone[name]), None)


def _beside(render: Rendered, name: str, content: str) -> str | None:
    called = _message("assistant", content, tool_calls=[_call()], **{name: _PROBE})
    return render([_message("user", "u"), called], _TOOLS)


def _thinks_beside_calls(render: Rendered, name: str) -> bool:
    return _beside(render, name, "content") is not None or _beside(render, name, "") is None


def _names(tree: nodes.Template) -> frozenset[str]:
    """Every name that the template could read as a field: attributes, subscripts, and what it looks for."""
    named = {node.attr for node in tree.find_all(nodes.Getattr)}
    named |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    methods = {name for kind in (str, dict, list) for name in dir(kind)}
    return frozenset(name for name in named if name.isidentifier()) - methods | _ALWAYS


def _counted(render: Rendered, names: frozenset[str]) -> dict[str, frozenset[str]]:
    """Which of the names change the text, for each role and for calls."""
    reacting = {
        role: _reacting(partial(_outcomes, render, role, calls={}), names - _FORMED)
        for role in ("system", "user", "assistant", "tool")
    }
    reacting[CALL] = _reacting(lambda fields: _outcomes(render, "", {}, fields), names - _FORMED_IN_CALLS)
    return {place: fields for place, fields in reacting.items() if fields}


def _reacting(outcomes: Callable[[Json], list[str | None]], names: frozenset[str]) -> frozenset[str]:
    """Those of the names that change the text: there or not, and with one value or another."""
    bare = outcomes({})

    def react(some: Sequence[str]) -> bool:
        return any(outcomes(dict.fromkeys(some, value)) != bare for value in (_PROBE, _OTHER, _CALL_ID))

    def among(some: list[str]) -> list[str]:
        if not react(some):
            return []
        half = len(some) // 2
        return some if len(some) == 1 else among(some[:half]) + among(some[half:])

    if react((_UNKNOWN,)):
        return frozenset((ANY,))
    return frozenset(among(sorted(names)))
