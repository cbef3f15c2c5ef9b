"""The settings of `rollbook serve`, typed: the keys of its TOML file, and its options of the same
names.

The docstring under each key is the help of its option and its text on the page of keys. Secrets
have no key: they come from key files, the environment and options.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, ValidationError

from rollbook.engines.address import EngineAddress
from rollbook.store.config import MISSING, InvalidValue, Table, invalid_values, part_of, read_toml, toml_lines
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.redaction import shown

Seconds = Annotated[float, Field(ge=0)]
Megabytes = Annotated[float, Field(gt=0)]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]
ProxyUrl = Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+$")]
Address = Annotated[
    EngineAddress,
    PlainValidator(EngineAddress.of, json_schema_input_type=str),
    PlainSerializer(str, return_type=str),
]

TRAJECTORY_HEADER = "x-rollbook-trajectory"
"""The header that names a trajectory; operators may add headers that programs for other systems send."""

SECRETS: Mapping[str, str] = {
    "engine_key": "give it as ROLLBOOK_ENGINE_KEY",
    "engine_admin_key": "give it as ROLLBOOK_ENGINE_ADMIN_KEY",
    "api_key": "name a file of keys with `keys`, or give it as ROLLBOOK_API_KEYS",
}
"""Options that are no keys of the file, and what to do instead."""


class ServeSettings(Table):
    """All of a file of settings."""

    store: Path
    """Folder of the store."""
    model: Path | None = None
    """Model directory, or a name at the hub; for sglang its tokenizer and template do."""
    engine: str = "embedded"
    """embedded, sglang, upstream or scripted."""
    engine_url: tuple[Address, ...] = ()
    """For sglang and upstream: the address; several SGLang servers: once each."""
    engine_ask: Json | None = None
    """For upstream: JSON to ask for besides, such as {"return_token_ids": true}."""
    script: str | None = None
    """For scripted: file.py:function or file.jsonl."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port; 0 takes a free one."""
    run: str = "default"
    """Run to record into."""
    lane: str = "serve"
    """Lane to write; one process each."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes behind the port, each with some of the trajectories; not for embedded."""
    proxies: tuple[ProxyUrl, ...] = ()
    """Several proxies of one run, one on each host: the addresses of all, the same list for each."""
    proxy: Annotated[int, Field(ge=0)] = 0
    """Which of `proxies` this one is, from 0."""
    policy: str = "actor"
    """Name of the line of weights served."""
    device: str = "cpu"
    """For embedded: cpu or cuda."""
    threads: int | None = None
    """For embedded: torch threads on the CPU."""
    images: bool = False
    """For sglang: its model takes images."""
    routed_experts: bool = False
    """For sglang with --enable-return-routed-experts: keep each token's experts."""
    image_host: tuple[str, ...] = ()
    """Fetch linked images from this host; other links pass on."""
    reply_format: str = "auto"
    """How replies are read: auto (by the chat template), hermes, qwen_coder, ..."""
    reasoning: Literal["restore", "respect"] = "restore"
    """Reasoning that a client drops: restore it, or respect the removal."""
    history: Literal["faithful", "preserve"] = "faithful"
    """Where the template rewrites earlier turns: a root, or preserve them."""
    unfinished: Literal["root", "close"] = "root"
    """After a turn that was cut off: a root, or close it and go on."""
    hold_s: Seconds = 110.0
    """Longest wait for an engine whose weights change."""
    abandon_s: Seconds = 0.0
    """Finish trajectories not heard of for so long, as aborted; 0: never."""
    trajectory_header: tuple[HeaderName, ...] = ()
    """Header that names a trajectory as X-Rollbook-Trajectory does, of programs for other systems."""
    keys: Path | None = None
    """File of keys, each with a role: see `rollbook keys`. Read again as it changes."""
    allow_host: tuple[str, ...] = ()
    """Name that requests may be meant for, beside this host's own."""
    allow_origin: tuple[str, ...] = ()
    """Origin whose web pages may send requests; others are refused."""
    forwarded_from: tuple[str, ...] = ()
    """Address or network of a proxy before this one: its X-Forwarded-For counts."""
    pass_path: tuple[str, ...] = ()
    """For upstream with --engine-key: pass this too, such as 'POST /v1/rerank'."""
    on_store_failure: Literal["pass", "refuse"] = "pass"
    """For upstream: what cannot be recorded passes, or is refused."""
    redact: tuple[str, ...] = ()
    """Take out of conversations, too: known (key formats), or a regular expression."""
    max_body_mb: Megabytes = 64.0
    """Largest request body, and n times it: more is a 413, or a 400."""
    max_bodies_mb: Megabytes = 512.0
    """Memory for all bodies that are read and answered at once; others wait."""
    body_timeout_s: Seconds = 30.0
    """Longest silence of a client in the middle of its body; then a 408."""
    max_reply_mb: Megabytes = 64.0
    """For upstream: largest reply that is recorded; larger ones pass alone."""
    max_running: int = 4096
    """Most requests answered at once; more get a 429."""
    max_connections: int | None = None
    """Most connections at once; else as many as descriptors allow."""
    max_consumers: int = 64
    """Most readers of /v1/events at once; more get a 503."""
    memory_mb: Annotated[float, Field(ge=0)] = 512.0
    """Memory of open trajectories; beyond it they are read back when asked for."""
    admission: bool = True
    """Hold new trajectories that would be too old before an online training uses them."""
    seal: bool = True
    """Seal closed segments beside it, in a process of low priority."""

    @property
    def max_body_bytes(self) -> int:
        """Largest request body."""
        return int(self.max_body_mb * 2**20)

    @property
    def max_bodies_bytes(self) -> int:
        """Memory for all bodies."""
        return int(self.max_bodies_mb * 2**20)

    @property
    def max_reply_bytes(self) -> int:
        """Largest reply of an upstream that is recorded."""
        return int(self.max_reply_mb * 2**20)

    @property
    def memory_bytes(self) -> int:
        """Memory of open trajectories."""
        return int(self.memory_mb * 2**20)

    @property
    def body_limits(self) -> dict[str, Any]:
        """What bounds bodies, by the arguments of `BodyBudget`."""
        return {
            "most": self.max_body_bytes,
            "total": self.max_bodies_bytes,
            "silence_s": self.body_timeout_s,
        }

    @property
    def naming(self) -> tuple[str, ...]:
        """The headers that name a trajectory, in lower case."""
        return (TRAJECTORY_HEADER, *dict.fromkeys(name.lower() for name in self.trajectory_header))

    @property
    def share(self) -> ServeSettings:
        """The same, with what each of its workers has of the limits."""
        if self.workers == 1:
            return self
        most = self.max_connections
        shares = {
            "max_bodies_mb": self.max_bodies_mb / self.workers,
            "max_running": -(-self.max_running // self.workers),
            "max_connections": None if most is None else -(-most // self.workers),
            "max_consumers": -(-self.max_consumers // self.workers),
            "memory_mb": self.memory_mb / self.workers,
        }
        return self.model_copy(update=shares)


def load_settings(file: Path | None, options: Mapping[str, Any]) -> ServeSettings:
    """The settings of a file, overruled by what was given as options.

    Raises:
        ConfigError: the file cannot be read, or holds a secret; or a key is unknown, missing or ill-typed.
    """
    values = {} if file is None else _read(file)
    return parse_settings({**values, **options}, "rollbook serve" if file is None else str(file))


def parse_settings(
    values: Mapping[str, Any], name: str, written: Callable[[str], str] = str
) -> ServeSettings:
    """Check settings.

    Args:
        name: what they are called in an error; written: a key as the file of a whole run has it.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed; all are named.
    """
    plain = dict(values)
    addresses = [EngineAddress.of(url) for url in plain.pop("engine_url", None) or ()]
    try:
        # JSON mode: TOML's lists serve as tuples and its integers as floats, yet types stay strict.
        settings = ServeSettings.model_validate_json(json.dumps(plain, default=str))
    except ValidationError as error:
        errors = invalid_values(error, plain)
        lines = [f"  {written(item.key) if item.keys else 'file'}: {_say(item)}" for item in errors]
        raise ConfigError(f"{name}:\n" + "\n".join(lines)) from error
    return settings.model_copy(update={"engine_url": tuple(addresses)})


def as_toml(settings: ServeSettings) -> str:
    """Settings as a file; keys without a value are comments. Logins of addresses are left out."""
    values = settings.model_dump(mode="json")
    ask = values.pop("engine_ask")
    table = "# engine_ask: not set" if ask is None else f"\n[engine_ask]\n{toml_lines(ask)}"
    return f"{toml_lines(values)}\n{table}"


def _read(file: Path) -> Json:
    """What a file says, without secrets.

    Raises:
        ConfigError: it cannot be read, or holds one.
    """
    values = part_of(read_toml(file), "serve", str(file))
    urls = values.get("engine_url", [])
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"{file}:\n  engine_url: send a list of addresses")
    if any(EngineAddress.of(url).secrets for url in urls):
        text = "engine_url holds a login or a key, and a file of settings holds no secrets: use --engine-url"
        raise ConfigError(f"{file}:\n  {text}")
    return values


def _say(error: InvalidValue) -> str:
    if error.key == "store" and error.text == MISSING:
        return f"{MISSING}: give --store DIR, or set ROLLBOOK_STORE"
    return shown(error.text) or f"unknown key: {_suggestion(error.keys[-1])}"


def _suggestion(key: str) -> str:
    """A hint which key an unknown one was meant for."""
    name = key.replace("-", "_")
    if name in SECRETS:
        return f"a file of settings holds no secrets: {SECRETS[name]}"
    keys = sorted(ServeSettings.model_fields)
    near = [name] if name in keys else difflib.get_close_matches(name, keys, 1)
    return f"did you mean {near[0]}?" if near else f"a file of settings has {', '.join(keys)}"
