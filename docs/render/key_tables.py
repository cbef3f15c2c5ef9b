"""Tables of keys as Markdown, of typed settings. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rollbook.store.config import Table, described
from rollbook.store.events import Json
from rollbook.train.config.config import TABLES

HEAD = "| key | type | default | meaning |\n|---|---|---|---|"


def rows(model: type[Table], tables: Collection[str] = TABLES) -> Iterator[str]:
    """A row for each key that is no table."""
    schema, texts = model.model_json_schema(), described(model)
    for key, form in schema["properties"].items():
        if key in tables:
            continue  # a table of its own
        needed = key in schema.get("required", ())
        default = "required" if needed else _value(form.get("default"))
        yield f"| `{key}` | {_type(form)} | {default} | {cell(texts[key])} |"


def page(introduction: str, tables: Mapping[str, type[Table]], apart: Collection[str] = ()) -> str:
    """A page of keys as Markdown: the tables one after the other.

    Args:
        apart: keys that are tables of their own.
    """
    sections = [
        "\n".join([f"## {title}\n\n{HEAD}", *rows(model, apart), ""]) for title, model in tables.items()
    ]
    return "\n".join([introduction, *sections])


def _value(value: Any) -> str:
    return "none" if value is None else f"`{json.dumps(value)}`"


def _type(schema: Json) -> str:
    """What a value may be, as one would write it in TOML."""
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {_type(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    named = {"integer": "integer", "number": "number", "boolean": "`true`, `false`", "object": "table"}
    return named.get(schema.get("type", ""), "text") + _bounds(schema)


def _bounds(schema: Json) -> str:
    low = {"minimum": "at least {}", "exclusiveMinimum": "above {}"}
    said = [text.format(f"{schema[name]:g}") for name, text in low.items() if name in schema]
    if "maximum" in schema:
        said.append(f"at most {schema['maximum']:g}")
    if "exclusiveMaximum" in schema and schema["exclusiveMaximum"] < 2**63:
        said.append(f"below {schema['exclusiveMaximum']:g}")
    return f", {', '.join(said)}" if said else ""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
