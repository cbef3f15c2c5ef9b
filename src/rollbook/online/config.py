"""The CONFIG of `rollbook run`, checked whole before anything is started.

The docstring under a key is its text on the page of keys.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollbook.ingest.settings import ServeSettings, parse_settings
from rollbook.rollouts.config import RolloutConfig, Seconds, parse_rollouts, typed
from rollbook.store.config import (
    ENGINE,
    TABLES,
    WAIT_S,
    Table,
    check_whole,
    is_whole,
    override,
    part_of,
    proxy_url,
    read_toml,
    written_key,
)
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.files import read_training


class SharedConfig(Table):
    """What the parts share, at the top of the file."""

    run: str = "default"
    """Name of the run."""
    store: Path
    """Folder of the store."""
    model: Path | None = None
    """Model directory that the run starts from, or a name at the hub; engines and proxy serve it."""
    proxy: str | None = None
    """The proxy's address, as the other parts reach it; absent: by `host` and `port` of [serve]."""
    logs: Path = Path("logs")
    """Folder for what the parts print."""


class EvaluatedConfig(Table):
    """`[evaluation]`: agents are evaluated on tasks that are held out, at every so many steps; the training
    waits for that, so that it is of one version."""

    tasks: str
    """Tasks that are held out, in a form that [rollout] takes."""
    every: Annotated[int, Field(ge=1)] = 50
    """Optimizer steps between evaluations. One comes before the first step, and one after the last."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Trajectories of each task."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Tasks, the first; absent: all."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Trajectories at once; absent: as in training."""
    wait_s: Seconds = WAIT_S
    """Longest wait for them; training goes on after it."""


class PlacedConfig(Table):
    """`[engines.placed]`: engines that Ray places on nodes of its cluster; their addresses follow."""

    count: Annotated[int, Field(ge=1)] = 1
    """Engines."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: {"GPU": 1.0})
    """What each takes of a node."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How they are spread over nodes."""
    within_s: Annotated[float, Field(ge=0)] = 60.0
    """Longest wait for room in the cluster."""
    port: Annotated[int, Field(ge=1, lt=65000)] = 30000
    """Their ports are the first that are free from here on."""


class EnginesConfig(Table):
    """`[engines]`: SGLang servers of the run; absent: the proxy's own engine answers."""

    addresses: Annotated[tuple[str, ...], Field(min_length=1)] = (ENGINE,)
    """host:port of each. Those of this host are started; others are waited for, and started there by
    `rollbook run CONFIG --only engines`."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] = ("python", "-m", "sglang.launch_server")
    """What starts one. It is given --model-path, --host, --port and the options."""
    options: tuple[str, ...] = ("--dtype", "float32", "--attention-backend", "triton")
    """More of its options: see docs/engines.md."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that each is given besides this process's."""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each that is started here, such as ["0,1", "2,3"]."""
    ready_s: Seconds = 900.0
    """Longest time until one answers."""
    silence_s: Seconds = 120.0
    """One that answers nothing for so long is ended, and started again."""
    placed: PlacedConfig | None = None
    """Absent: they are where `addresses` says."""

    @model_validator(mode="after")
    def _addressed(self) -> EnginesConfig:
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"addresses: {address!r} is no host:port, such as {ENGINE}")
        if self.placed is not None and (self.gpus or "addresses" in self.model_fields_set):
            raise ValueError(
                "placed: Ray says where engines are, and on which GPUs: leave addresses and gpus out"
            )
        if self.gpus and len(self.gpus) != len(self.here):
            raise ValueError(f"gpus: {len(self.gpus)} entries for {len(self.here)} engines of this host")
        return self

    @property
    def here(self) -> list[str]:
        """Addresses that are this host's."""
        return [address for address in self.addresses if is_local(address.rpartition(":")[0])]


@dataclass(frozen=True, slots=True)
class WholeConfig:
    """What `rollbook run` runs: the parts that the CONFIG has.

    Attributes:
        path: of the file that the parts read.
        values: what the file says.
        group: the placement group of the engines, where Ray places them, once it is there.
        proxy: its address, as the parts reach it; here: it is to run on this host.
    """

    path: Path
    logs: Path
    proxy: str
    here: bool
    engines: EnginesConfig | None
    serve: ServeSettings
    train: TrainConfig | None
    rollout: RolloutConfig | None
    values: Json
    group: str | None = None

    @property
    def run(self) -> str:
        """The run's name."""
        return self.serve.run


def load_whole(path: Path, overrides: Sequence[str] = ()) -> WholeConfig:
    """Read a CONFIG, apply `key=value` overrides (`train.optimizer.lr=1e-4`), and check each part of it.

    What was overruled is written beside the logs, for the parts to read.

    Raises:
        ConfigError: it cannot be read, is of one command alone, or a key is unknown, missing or ill-typed.
    """
    values = read_toml(path)
    for text in overrides:
        override(values, text)
    if not is_whole(values):
        tables = ", ".join(f"[{table}]" for table in TABLES)
        raise ConfigError(f"{path}: a run has at least one of the tables {tables}")
    name = str(path)
    check_whole(values, name)
    shared = typed(SharedConfig, {k: v for k, v in values.items() if k in SharedConfig.model_fields}, name)
    engines = typed(EnginesConfig, values["engines"], name, within="engines") if "engines" in values else None
    if "evaluation" in values:
        typed(EvaluatedConfig, values["evaluation"], name, within="evaluation")
    serve = parse_settings(part_of(values, "serve", name), name, partial(written_key, values, "serve"))
    trained = read_training(values, path) if "train" in values else None
    written = partial(written_key, values, "rollout")
    rollouts = (
        parse_rollouts(part_of(values, "rollout", name), name, written) if "rollout" in values else None
    )
    _check_evaluation(trained, rollouts, name)
    if engines is not None and serve.model is None:
        raise ConfigError(f"{name}: [engines] needs `model`, the directory of what they serve")
    return WholeConfig(
        path=_written(values, path, shared.logs) if overrides else path,
        logs=shared.logs,
        proxy=proxy_url(values),
        here=is_local(serve.host),
        engines=engines,
        serve=serve,
        train=trained,
        rollout=rollouts,
        values=values,
    )


def at_addresses(config: WholeConfig, group: str, addresses: Sequence[str]) -> WholeConfig:
    """The same run, with engines at these addresses, of a placement group; the parts read it from a file."""
    assert config.engines is not None
    table = {key: value for key, value in config.values["engines"].items() if key != "placed"}
    values = config.values | {"engines": table | {"addresses": list(addresses)}}
    engines = config.engines.model_copy(update={"addresses": tuple(addresses)})
    path = _written(values, config.path, config.logs)
    return replace(config, path=path, engines=engines, group=group)


def at_port(config: WholeConfig, port: int) -> WholeConfig:
    """The same run, with its proxy at another port; the parts read it from a file."""
    serve = config.values.get("serve", {}) | {"port": port}
    return load_whole(_written(config.values | {"serve": serve}, config.path, config.logs))


def is_local(host: str) -> bool:
    """Whether an address is this host's: a server could listen on it."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _check_evaluation(trained: TrainConfig | None, rollouts: RolloutConfig | None, name: str) -> None:
    """Check that who waits for an evaluation and who runs it agree.

    Raises:
        ConfigError: one of them is missing.
    """
    if trained is None or rollouts is None:
        return
    waits = trained.evaluation is not None and trained.evaluation.wait_s > 0
    if waits and rollouts.evaluation is None:
        raise ConfigError(f"{name}: the training waits for agents to be evaluated: add [evaluation] tasks")


def _written(values: Json, path: Path, logs: Path) -> Path:
    """A file with the values, which the parts read in place of the CONFIG."""
    recipe = values.get("train", {}).get("recipe")
    if isinstance(recipe, str):  # it is looked for beside the CONFIG
        values = values | {"train": values["train"] | {"recipe": str((path.parent / recipe).resolve())}}
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / f"{path.stem}.json"
    file.write_text(json.dumps(values, default=str, indent=2))
    return file
