"""`[sync]` of a CONFIG: the engines that are given weights, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer, PlainValidator

from rollbook.engines.address import EngineAddress
from rollbook.store.config import Positive, Table
from rollbook.store.errors import ConfigError

KEY_VARIABLE = "ROLLBOOK_ENGINE_KEY"
"""Environment variable of the engines' key, where a CONFIG names no other."""
Address = Annotated[EngineAddress, PlainValidator(EngineAddress.of), PlainSerializer(str)]


class SyncConfig(Table):
    """Which engines get new weights, how often, and how running requests are treated."""

    engines: Annotated[tuple[Address, ...], Field(min_length=1)]
    """Control URLs: SGLang servers, or a proxy's own engine, such as http://127.0.0.1:8000/engine."""
    key_env: Annotated[str, Field(min_length=1)] = KEY_VARIABLE
    """Environment variable with the key sent to the engines: SGLang's API key, or an operator key of a
    proxy."""
    transport: Literal["auto", "disk", "tensor", "distributed"] = "auto"
    """How weights are sent: from a directory that engines see too, from this host's memory, or by
    broadcast."""
    sync_every: Positive = 1
    """Optimizer steps between syncs."""
    overlap: bool = False
    """Go on while weights travel: the next samples are gathered, scored and trained on meanwhile. It takes a
    copy of the weights in the host's memory, unless they travel by disk."""
    partial_rollout: bool = False
    """Update weights while requests run; they continue with the new version. Otherwise requests finish
    first."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """How running requests continue with partial_rollout: their KV cache is recomputed, or kept, or they are
    aborted and resumed. Keeping it needs SGLang started with --disable-overlap-schedule."""
    drain_s: Annotated[float, Field(ge=0)] = 600.0
    """Longest wait for running requests to end, without partial_rollout; after it they are retracted."""
    bucket_mb: Positive = 512
    """Size of a bucket of tensors; two buckets are in flight at a time."""
    address: str = "127.0.0.1"
    """Address of this host, as engines reach it, for broadcasts."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for a reply of an engine, or for a collective operation."""
    wait_s: Annotated[float, Field(ge=0)] = 600.0
    """Longest wait for an engine to become reachable, if none is."""

    def key(self, environment: Mapping[str, str]) -> str | None:
        """The key sent to engines. It comes from the environment because a configuration is
        recorded.

        Raises:
            ConfigError: the variable is set but empty, or is not the default one and is not set.
        """
        return engine_key(self.key_env, environment, "sync.key_env")


def engine_key(variable: str, environment: Mapping[str, str], named: str) -> str | None:
    """The engines' key in an environment variable, which need not be there if it is the default one.

    Args:
        named: the key of a CONFIG that names the variable, for an error.

    Raises:
        ConfigError: the variable is set but empty, or is not the default one and is not set.
    """
    key = environment.get(variable)
    if (key is None and variable != KEY_VARIABLE) or (key is not None and not key.strip()):
        state = "not set" if key is None else "set and empty"
        raise ConfigError(f"{named} names {variable}, which is {state}: give it the engines' key")
    return key
