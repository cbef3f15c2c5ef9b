"""Configurations: TOML that people write, read strictly into typed tables.

`Table` is the base of all of them; the docstring under a key describes that key (`described`). Validation
errors name each key in full, as the file spells it: pydantic's own locations also contain parts
that no user wrote (the branch of a union, a validator).

The CONFIG of a whole run is one file with a table for each command that takes part in the run.

`rollbook run CONFIG` starts all of them. `rollbook serve`, `train` and `rollout` read the same
file: each takes its own table and the values that the other tables imply for it, so that a part
can run by itself on another machine.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from rollbook.store.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file, or of a JSON file of the same form (`.json`).

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        text = path.read_text()
        if path.suffix == ".json":
            values: dict[str, Any] = json.loads(text)
            return values
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def override(values: dict[str, Any], text: str) -> None:
    """Set a value by `key=value`: a dotted key, and TOML or plain text.

    Raises:
        ConfigError: it is no such text, or leads through what is no table.
    """
    key, sep, value = text.partition("=")
    if not sep:
        raise ConfigError(f"--set {text!r}: write key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *tables, last = key.strip().split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {text!r}: {table} is not a table")
    values[last] = parsed


MISSING = "is missing"
_LACKING = ("missing", "union_tag_not_found")
_CHOICES = ("union_tag_invalid", "union_tag_not_found")
_TYPE, _THERE = "Input should be ", "there are"


@dataclass(frozen=True, slots=True)
class InvalidValue:
    """A value that was refused.

    Attributes:
        keys: keys and positions that lead to it.
        inside: whether it was read as one branch of a union, of which another may be meant.
        what: what is wrong with it; empty for an unknown key.
        got: the value, as a text in brackets, where it says more.
    """

    keys: tuple[str, ...]
    inside: bool
    what: str
    got: str = ""

    @property
    def key(self) -> str:
        """The whole key."""
        return ".".join(self.keys)

    @property
    def text(self) -> str:
        """What is wrong, with the value; empty for an unknown key."""
        return self.what + self.got


def invalid_values(error: ValidationError, values: Any) -> list[InvalidValue]:
    """Every invalid value, once each; of a union, the error of the branch that matched furthest is kept."""
    errors = [_invalid_value(item, values) for item in error.errors(include_url=False)]
    kept: list[InvalidValue] = []
    for item in errors:
        deeper = item.inside and any(_extends(other.keys, item.keys) for other in errors)
        same = next((i for i, other in enumerate(kept) if item.inside and other.keys == item.keys), None)
        if same is not None:
            kept[same] = replace(item, what=_either(kept[same].what, item.what))
        elif not deeper:
            kept.append(item)
    return kept


def first_invalid_value(error: ValidationError, values: Any) -> str:
    """The first thing that is wrong with values, in one line, without the value, which may be anything."""
    first = invalid_values(error, values)[0]
    return f"{first.key}: {first.what or 'unknown key'}" if first.keys else first.what


def suggestion(name: str, choices: Iterable[str], prefix: str = "choose of") -> str:
    """A suggestion for an unknown name: the nearest choice, or all of them after a prefix."""
    known = list(choices)
    near = _near(name, known)
    return f"did you mean {near}?" if near else f"{prefix} {', '.join(known)}"


def _near(name: str, choices: Sequence[str]) -> str | None:
    """The nearest choice: one with the same letters if there is one, otherwise the most similar."""
    near = difflib.get_close_matches(name, choices, 5)
    return next((match for match in near if sorted(match) == sorted(name)), near[0] if near else None)


def describe_invalid(model: type[BaseModel], invalid: InvalidValue) -> str:
    """What is wrong with a value; for an unknown key, also a suggestion."""
    known = [] if invalid.what else _keys_beside(model, invalid.keys)
    return invalid.text or f"unknown key{f': {suggestion(invalid.keys[-1], known, _THERE)}' if known else ''}"


def _keys_beside(model: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """The keys that the model allows next to an unknown one; empty if its table could be of several
    models."""
    fields = model.model_fields
    for key in keys[:-1]:
        if key.isdecimal():
            continue
        below = list(_models(fields[key].annotation)) if key in fields else []
        if len(below) != 1:
            return []
        fields = below[0].model_fields
    return list(fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _holds(values: Any, part: int | str) -> bool:
    if isinstance(values, list | tuple):
        return isinstance(part, int) and part < len(values)
    return isinstance(values, dict) and part in values


def _invalid_value(error: ErrorDetails, values: Any) -> InvalidValue:
    keys: list[str] = []
    inside = False
    for place, part in enumerate(error["loc"]):
        is_last = place == len(error["loc"]) - 1
        if _holds(values, part):
            values = values[part]
        elif not (is_last and error["type"] == "missing"):
            inside = True
            continue
        keys.append(str(part))
    if error["type"] in _CHOICES:
        keys.append(error["ctx"]["discriminator"].strip("'"))
    return InvalidValue(tuple(keys), inside, *_text(error))


def _text(error: ErrorDetails) -> tuple[str, str]:
    """(what is wrong, the value in brackets)."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "", ""
    if kind in _LACKING:
        return MISSING, ""
    if kind == "union_tag_invalid":
        choices = [choice.strip("' ") for choice in context["expected_tags"].split(",")]
        return f"there is no {context['tag']!r}: {suggestion(str(context['tag']), choices)}", ""
    if kind == "value_error" and isinstance(error["input"], dict):  # of a whole table
        return str(context["error"]), ""
    text = str(context["error"]) if kind == "value_error" else error["msg"]
    got = f" (got {error['input']!r}"
    if kind == "literal_error" and isinstance(error["input"], str):
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        near = _near(error["input"], choices)
        got += f": did you mean {near}?" if near else ""
    return text, f"{got})"


def _extends(keys: Sequence[str], other: Sequence[str]) -> bool:
    return len(keys) > len(other) and tuple(keys[: len(other)]) == tuple(other)


def _either(first: str, second: str) -> str:
    """One message for two branches of a union that refuse the same value."""
    words = second.removeprefix(_TYPE)
    return first if words in first else f"{first} or {words}"


Json = dict[str, Any]

TABLES = ("engines", "serve", "train", "rollout")
"""Tables of which each makes a CONFIG one of a whole run."""
KEYS = ("run", "store", "model", "proxy", "logs", "evaluation", *TABLES)
ADDRESS, PORT = "127.0.0.1", 8000
ENGINE = f"{ADDRESS}:30000"
WAIT_S = 1800.0
"""How long a training waits for agents to be evaluated, where nothing else is said."""


def is_whole(values: Json) -> bool:
    """Whether a CONFIG is one of a whole run."""
    return any(isinstance(values.get(table), dict) for table in TABLES)


def part_of(values: Json, part: str, name: str) -> Json:
    """The CONFIG of `serve`, `train` or `rollout`: all of it, if it is a CONFIG for that command alone.

    Args:
        name: what the CONFIG is called in an error.

    Raises:
        ConfigError: a key belongs to no part, or this part's table is missing.
    """
    if not is_whole(values):
        return values
    check_whole(values, name)
    if part != "serve" and part not in values:
        raise ConfigError(f"{name}: it has no table [{part}]: `rollbook {part}` needs one")
    return {"serve": _serve, "train": _train, "rollout": _rollout}[part](values)


def written_key(values: Json, part: str, key: str) -> str:
    """A part's key as it is spelled in the file: in a whole run's CONFIG below the part's table,
    unless it is a shared key.

    Args:
        values: of the file.
    """
    own, top = values.get(part, {}), key.partition(".")[0]
    is_shared = top in values and not (isinstance(own, dict) and top in own)
    return f"{part}.{key}" if is_whole(values) and not is_shared else key


def check_whole(values: Json, name: str) -> None:
    """Check the keys of a whole run's CONFIG; those of its parts are checked by these.

    Raises:
        ConfigError: one is of no part, or what is to be a table is none.
    """
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            suggestion = f"did you mean {near[0]}?" if near else f"there are {', '.join(KEYS)}"
            raise ConfigError(f"{name}: {key}: unknown key: {suggestion}")
        if key in (*TABLES, "evaluation") and not isinstance(value, dict):
            raise ConfigError(f"{name}: {key} is to be a table, [{key}]")


def engine_urls(values: Json) -> list[str]:
    """Addresses of the engines that a run starts; none where it starts none."""
    if "engines" not in values:
        return []
    return [f"http://{address}" for address in values["engines"].get("addresses", [ENGINE])]


def proxy_url(values: Json) -> str:
    """The address of a run's proxy, as its other parts reach it."""
    if "proxy" in values:
        return str(values["proxy"]).rstrip("/")
    serve = values.get("serve", {})
    host = serve.get("host", ADDRESS)
    return f"http://{ADDRESS if host == '0.0.0.0' else host}:{serve.get('port', PORT)}"


def _shared(values: Json, *keys: str) -> Json:
    return {key: values[key] for key in keys if key in values}


def _serve(values: Json) -> Json:
    engines = engine_urls(values)
    sglang = {"engine": "sglang", "engine_url": engines} if engines else {}
    own: Json = values.get("serve", {})
    return _shared(values, "run", "store", "model") | sglang | own


def _train(values: Json) -> Json:
    engine = values.get("serve", {}).get("engine", "embedded")
    engines = engine_urls(values) or ([f"{proxy_url(values)}/engine"] if engine == "embedded" else [])
    settings: Json = _shared(values, "run", "model") | values["train"]
    if engines:
        settings["sync"] = {"engines": engines} | settings.get("sync", {})
    if "evaluation" in values:
        evaluation = {"wait_s": WAIT_S} | _shared(values["evaluation"], "every", "wait_s")
        settings["evaluation"] = evaluation | settings.get("evaluation", {})
    return settings


def _rollout(values: Json) -> Json:
    algorithm = values.get("train", {}).get("algorithm", {})
    settings: Json = {"proxy": proxy_url(values), "run": "default"} | _shared(values, "run", "store")
    settings |= _shared(values.get("serve", {}), "run", "store")
    if "group_size" in algorithm:
        settings["samples"] = algorithm["group_size"]
    if "evaluation" in values:
        of_training = ("every", "wait_s", "source_runs", "max_samples")
        settings["evaluation"] = {k: v for k, v in values["evaluation"].items() if k not in of_training}
    settings |= values["rollout"]
    return settings


Positive = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Table(BaseModel):
    """Unknown and ill-typed keys are errors, numbers must be finite, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def described(table: type[Table]) -> dict[str, str]:
    """Key -> its docstring, where it has no other description.

    It is read from the source, here: pydantic would read those of every table that is imported, which takes a
    tenth of a second.
    """
    texts = {}
    for cls in reversed(table.__mro__):
        if issubclass(cls, Table):
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
            for key, text in itertools.pairwise(body):
                if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[ast.unparse(key.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    own = {key: field.description or texts.get(key) for key, field in table.model_fields.items()}
    return {key: text for key, text in own.items() if text}


def toml_text(values: Json) -> str:
    """The text of a file with these values."""
    return toml_lines(values).lstrip("\n") + "\n"


def toml_lines(values: Json, path: str = "") -> str:
    """A line for each value, a comment where there is none; tables behind all others.

    Args:
        path: of the table, as a header has it.
    """
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    # A JSON text is a TOML text for every other value that a configuration has.
    lines = [
        f"# {key}: not set" if value is None else f"{key} = {json.dumps(value)}"
        for key, value in values.items()
        if key not in tables
    ]
    for key, table in tables.items():
        inner = f"{path}{key if _BARE_KEY.fullmatch(key) else json.dumps(key)}"
        lines.append(f"\n[{inner}]\n{toml_lines(table, f'{inner}.')}")
    return "\n".join(lines)
