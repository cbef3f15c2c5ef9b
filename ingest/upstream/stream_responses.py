"""Events of a Responses stream put together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollbook.store.events import Json

_GROWING = {
    "response.output_text.delta": ("content", "output_text", "text"),
    "response.refusal.delta": ("content", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text", "text"),
}
"""Event -> the list of an item that grows, the type of its part, and the part's text."""
_CALLS = {
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}


def gather_response(events: Sequence[Json]) -> Json | None:
    """The last event holds everything; a stream that was cut off, what its items came to."""
    latest: Json | None = next(
        (e["response"] for e in reversed(events) if isinstance(e.get("response"), dict)), None
    )
    if latest is None or latest.get("output"):
        return latest
    items: dict[int, Json] = {}
    for event in events:
        kind = event.get("type", "")
        if kind in ("response.output_item.added", "response.output_item.done"):
            items[event["output_index"]] = dict(event["item"])
        elif event.get("output_index") in items:
            _grow(items[event["output_index"]], kind, event)
    return latest | {"output": [items[i] for i in sorted(items)]}


def _grow(item: Json, kind: str, event: Json) -> None:
    if kind in _CALLS:
        name = _CALLS[kind]
        item[name] = (item.get(name) or "") + event["delta"]
    elif kind in _GROWING:
        name, part_type, text = _GROWING[kind]
        place = event.get("summary_index" if name == "summary" else "content_index") or 0
        parts = [dict(part) for part in item.get(name) or ()]
        if place >= len(parts):
            parts.append({"type": part_type, text: ""})
        part = parts[min(place, len(parts) - 1)]
        part[text] = (part.get(text) or "") + event["delta"]
        item[name] = parts
