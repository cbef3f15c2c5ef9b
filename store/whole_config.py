"""The CONFIG of a whole run: one file, with a table for each command that takes part in it. Pure.

`rollbook run CONFIG` starts all of them. `rollbook serve`, `train` and `rollout` read the same file, each its
own table and what follows for it from the rest, so that a part can run by itself on another machine.
"""

from __future__ import annotations

import difflib
from typing import Any

from rollbook.store.errors import ConfigError

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
