"""The CONFIG of a training service: typed keys of a TOML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from rollbook.store.config import Table, describe_invalid, invalid_values, override, read_toml
from rollbook.store.errors import ConfigError
from rollbook.train.tenants.operations import Bounds


class SamplerConfig(Table):
    """What samples for clients."""

    engine: Literal["embedded", "sglang", "none"] = "embedded"
    """`embedded`: transformers in this process; `sglang`: a server at `url`; `none`: nothing is sampled."""
    url: str = ""
    """Of `sglang`: the server's address, such as http://127.0.0.1:30000. It reads adapters where the service
    writes them: the store's folder has the same path on both machines."""
    adapters: Annotated[int, Field(ge=1)] = 32
    """Adapters that the engine holds at once."""
    batch_tokens: Annotated[int, Field(ge=1)] = 1024
    """Of `embedded`: tokens of one forward pass, at most."""
    cache_blocks: Annotated[int, Field(ge=1)] = 64
    """Of `embedded`: size of the KV cache in blocks of 256 tokens."""


class LimitsConfig(Table):
    """What clients may ask for; of more they are told to come again, or why not."""

    pending: Annotated[int, Field(ge=1)] = 256
    """Operations of a model that wait at once."""
    pending_mib: Annotated[int, Field(ge=1)] = 256
    """MiB of what was sent with them."""
    sequences: Annotated[int, Field(ge=1)] = 4096
    """Sequences of a session that are sampled at once, or wait."""
    rank: Annotated[int, Field(ge=1, le=256)] = 256
    """Of adapters."""

    def bounds(self) -> Bounds:
        """Of what may be under way."""
        return Bounds(self.pending, self.pending_mib << 20, self.sequences)


class BaseConfig(Table):
    """A further base model."""

    base: str
    """Its folder, in Hugging Face's form."""
    sampler: SamplerConfig = SamplerConfig()


class ServiceConfig(Table):
    """A service: the base model that clients train from, and how it computes."""

    base: str
    """Folder of the base model, in Hugging Face's form; clients name it by `name`, or name none."""
    name: str = ""
    """What clients call the base model; absent: the folder as it is written here. Where it is no folder that
    clients have, they cannot load its tokenizer by this name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; `auto` is CUDA where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Threads of torch on the CPU: they change bits."""
    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them."""

    models: Annotated[int, Field(ge=1)] = 16
    """Adapters of clients in the device's memory at once; as many more are in this host's, the others on its
    disk until their next operation."""
    shared: bool = False
    """Whether other processes serve and train with this one, by the same store. They agree in its catalog,
    which is SQLite for those of one host, and PostgreSQL for several hosts."""
    trains: bool = True
    """Whether `rollbook service` trains itself; where it does not, `rollbook service worker` does."""
    full: Annotated[int, Field(ge=0)] = 0
    """Whole models of clients in the device's memory at once, beside the base and the adapters: each has
    weights, gradients and an optimizer of its own. The others are on the host's disk until their next
    operation. 0: clients train adapters alone."""
    bases: dict[str, BaseConfig] = Field(default_factory=dict)
    """Further base models, by what clients call them: each is in memory as the first is."""
    sampler: SamplerConfig = SamplerConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _check_trained(self) -> ServiceConfig:
        if not self.trains and not self.shared:
            raise ValueError("trains = false needs shared = true: nobody would train")
        if self.base_name in self.bases:
            raise ValueError(f"{self.base_name!r} is two base models: give one of them another name")
        return self

    def served(self) -> dict[str, BaseConfig]:
        """All base models, by what clients call them, that which they have by default first."""
        return {self.base_name: BaseConfig(base=self.base, sampler=self.sampler), **self.bases}

    @property
    def base_name(self) -> str:
        """What clients call the base model."""
        return self.name or self.base


def load_service_config(path: Path, overrides: list[str]) -> ServiceConfig:
    """Read a CONFIG.

    Raises:
        ConfigError: it cannot be read, or a key is unknown, missing or ill-typed; all are named.
    """
    values = read_toml(path)
    for text in overrides:
        override(values, text)
    try:
        return ServiceConfig.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        invalid = ((v.key, describe_invalid(ServiceConfig, v)) for v in invalid_values(error, values))
        wrong = [f"  {key}: {why}" if key else f"  {why}" for key, why in invalid]
        raise ConfigError("\n".join([f"{path}:", *wrong])) from error
