"""`docs/configuration.md`, and a configuration as TOML, rendered from the typed settings. Pure.

`python -m rollbook.train.config.docs > docs/configuration.md`
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from rollbook.store.events import Json
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.registry import PolicyGradient
from rollbook.train.config.config import TABLES, TrainConfig

INTRODUCTION = """# Configuration of a training

<!-- Generated: python -m rollbook.train.config.docs > docs/configuration.md -->

`rollbook train CONFIG` reads a TOML file with the keys below; those of the first table stand at its top.
Three are required: `model`, `steps` and the `name` of the `[algorithm]`. `--set table.key=value` overrules
the file. An unknown key, or a value of another type, is an error that names all such keys. `--show-config`
prints what holds, defaults included, as a CONFIG of its own:

```bash
rollbook train configs/sft.toml --store demo-store --set optimizer.lr=3e-4 --show-config
```

A restart goes on with a training as long as nothing changes that decides its course: `steps`,
`checkpoint_every`, `threads`, `device`, `engine_gap_alarm`, `idle_timeout_s`, `model`, `[admission]`,
`[checkpoint]`, `[sync]`, `[evaluation]` and `[[stop]]` may change, and a key that is left out is the same as
one that says its default. Any other change begins a new training in the same run, from the run's newest
weights and with a new optimizer.
"""
LISTS = frozenset({"stop"})
"""Tables of which there may be several."""
HEAD = "| key | type | default | meaning |\n|---|---|---|---|"


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    composed = set(rows(PolicyGradient))
    for table, kinds in TABLES.items():
        for kind, model in kinds.items():
            title = header(table) if table else "Top of the file"
            title = f'{title}, name = "{kind}"' if kind else title
            about = "" if model is TrainConfig else f"{_cell(model.__doc__ or '')}\n\n"
            lines = "\n".join(rows(model))
            if issubclass(model, GroupPolicyGradient) and model is not PolicyGradient:
                about += 'Its keys are those of `name = "policy_gradient"`. Other defaults:\n\n'
                lines = "\n".join(row for row in rows(model) if row not in composed)
            yield f"## {title}\n\n{about}{HEAD}\n{lines}\n"


def rows(model: type[BaseModel], tables: Collection[str] = TABLES) -> Iterator[str]:
    """A row for each key that is no table."""
    schema = model.model_json_schema()
    for key, described in schema["properties"].items():
        if key in tables:
            continue  # a table of its own
        needed = key in schema.get("required", ())
        default = "required" if needed else _value(described.get("default"))
        yield f"| `{key}` | {_type(described)} | {default} | {_cell(described['description'])} |"


def page(introduction: str, tables: Mapping[str, type[BaseModel]], apart: Collection[str] = ()) -> str:
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


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def as_toml(config: TrainConfig) -> str:
    """A configuration as a CONFIG file; keys without a value are comments."""
    values = config.as_json()
    plain = {key: value for key, value in values.items() if key not in TABLES}
    tables = [
        f"\n{header(key)}\n{toml_lines(one)}"
        for key in TABLES
        if values.get(key) is not None
        for one in (values[key] if key in LISTS else [values[key]])
    ]
    return "\n".join([toml_lines(plain), *tables])


def header(table: str) -> str:
    """The line that begins a table of a CONFIG."""
    return f"[[{table}]]" if table in LISTS else f"[{table}]"


def toml_lines(values: Json) -> str:
    """A line for each value, a comment where there is none."""
    # A JSON text is a TOML text for every value that a configuration has.
    return "\n".join(f"# {k}: not set" if v is None else f"{k} = {json.dumps(v)}" for k, v in values.items())


if __name__ == "__main__":
    print(render(), end="")
