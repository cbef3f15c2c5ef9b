"""Configurations: TOML that people write, read strictly into typed tables.

`Table` is the base of all of them; the docstring under a key describes it. What pydantic refuses is said with
each key whole, as it stands in the file: a model names its own inner parts as well (the branch of a union, a
validator), which a user never wrote.

The CONFIG of a whole run is one file with a table for each command that takes part in it.

`rollbook run CONFIG` starts all of them. `rollbook serve`, `train` and `rollout` read the same file, each its
own table and what follows for it from the rest, so that a part can run by itself on another machine.
"""

from __future__ import annotations

import difflib
import json
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
            found: dict[str, Any] = json.loads(text)
            return found
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
class Refused:
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


def refused(error: ValidationError, values: Any) -> list[Refused]:
    """All that is wrong with values, once each: of a union the branch that comes furthest is believed."""
    found = [_of(one, values) for one in error.errors(include_url=False)]
    kept: list[Refused] = []
    for one in found:
        deeper = one.inside and any(_extends(other.keys, one.keys) for other in found)
        same = next((i for i, other in enumerate(kept) if one.inside and other.keys == one.keys), None)
        if same is not None:
            kept[same] = replace(one, what=_either(kept[same].what, one.what))
        elif not deeper:
            kept.append(one)
    return kept


def first_refused(error: ValidationError, values: Any) -> str:
    """The first thing that is wrong with values, in one line, without the value, which may be anything."""
    first = refused(error, values)[0]
    return f"{first.key}: {first.what or 'unknown key'}" if first.keys else first.what


def meant(name: str, choices: Iterable[str], of: str = "choose of") -> str:
    """What a wrong name was meant for: the nearest choice, or all of them."""
    known = list(choices)
    near = _near(name, known)
    return f"did you mean {near}?" if near else f"{of} {', '.join(known)}"


def _near(name: str, choices: Sequence[str]) -> str | None:
    """The nearest choice: one of the same letters, if there is one, and else the most alike."""
    near = difflib.get_close_matches(name, choices, 5)
    return next((one for one in near if sorted(one) == sorted(name)), near[0] if near else None)


def told(model: type[BaseModel], one: Refused) -> str:
    """What is wrong with a value; of an unknown key, what it was meant for."""
    known = [] if one.what else _keys_beside(model, one.keys)
    return one.text or f"unknown key{f': {meant(one.keys[-1], known, _THERE)}' if known else ''}"


def _keys_beside(model: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """The keys that a model has where an unknown one stands; none where its table is of no one model."""
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


def _of(error: ErrorDetails, values: Any) -> Refused:
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
    return Refused(tuple(keys), inside, *_text(error))


def _text(error: ErrorDetails) -> tuple[str, str]:
    """(what is wrong, the value in brackets)."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "", ""
    if kind in _LACKING:
        return MISSING, ""
    if kind == "union_tag_invalid":
        choices = [choice.strip("' ") for choice in context["expected_tags"].split(",")]
        return f"there is no {context['tag']!r}: {meant(str(context['tag']), choices)}", ""
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
    """What both branches of a union say of one value."""
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
    """What a CONFIG says to `serve`, `train` or `rollout`: all of it, if it is that command's alone.

    Args:
        name: what the CONFIG is called in an error.

    Raises:
        ConfigError: a key is of no part, or the table of this one is missing.
    """
    if not is_whole(values):
        return values
    check_whole(values, name)
    if part != "serve" and part not in values:
        raise ConfigError(f"{name}: it has no table [{part}]: `rollbook {part}` needs one")
    return {"serve": _serve, "train": _train, "rollout": _rollout}[part](values)


def written_key(values: Json, part: str, key: str) -> str:
    """The key of a part's value as its file has it: of a whole run's, below the part's table.

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
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(KEYS)}"
            raise ConfigError(f"{name}: {key}: unknown key: {meant}")
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
    found: Json = _shared(values, "run", "model") | values["train"]
    if engines:
        found["sync"] = {"engines": engines} | found.get("sync", {})
    if "evaluation" in values:
        evaluation = {"wait_s": WAIT_S} | _shared(values["evaluation"], "every", "wait_s")
        found["evaluation"] = evaluation | found.get("evaluation", {})
    return found


def _rollout(values: Json) -> Json:
    algorithm = values.get("train", {}).get("algorithm", {})
    found: Json = {"proxy": proxy_url(values), "run": "default"} | _shared(values, "run", "store")
    found |= _shared(values.get("serve", {}), "run", "store")
    if "group_size" in algorithm:
        found["samples"] = algorithm["group_size"]
    if "evaluation" in values:
        of_training = ("every", "wait_s", "source_runs", "max_samples")
        found["evaluation"] = {k: v for k, v in values["evaluation"].items() if k not in of_training}
    found |= values["rollout"]
    return found


Positive = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Table(BaseModel):
    """Unknown and ill-typed keys are errors, numbers must be finite, and values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def toml_lines(values: Json) -> str:
    """A line for each value, a comment where there is none."""
    # A JSON text is a TOML text for every value that a configuration has.
    return "\n".join(f"# {k}: not set" if v is None else f"{k} = {json.dumps(v)}" for k, v in values.items())
