"""Ranks that a launcher such as torchrun or Slurm starts: their places, their secret, and where they meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.errors import ConfigError, NotAStoreError
from rollbook.store.marker import read_marker
from rollbook.store.secret import store_secret
from rollbook.train.interface import LOOPBACK, choose_interface, stay_on_this_host
from rollbook.train.ranks.meeting import SECRET, Meeting, MeetingPoint, meet, take_secret

FEWEST_CHARACTERS = 32
"""Of a secret that somebody made."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among ranks that a launcher started, and where they meet.

    Args:
        one_host: all of them are on this host.
    """

    rank: int
    count: int
    local_rank: int
    host: str
    port: int
    one_host: bool = False


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun, Slurm or another launcher gives this process in its environment;
    None if it is not one of several ranks.

    Raises:
        ConfigError: there are several ranks, and nothing says where they meet.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "RANK" not in environment and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    rank, count, local = (environment.get(name) for name in names)
    if rank is None or count is None or int(count) == 1:
        return None
    host = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    port = environment.get("MASTER_PORT")
    if host is None or port is None:
        raise ConfigError(
            f"rank {rank} of {count} ({names[0]}, {names[1]}): MASTER_ADDR and MASTER_PORT do not "
            "say where they meet: set both to an address of rank 0's host and a free port there"
        )
    one_host = environment.get("LOCAL_WORLD_SIZE") == count or environment.get("SLURM_NNODES") == "1"
    return Place(int(rank), int(count), int(local or 0), host, int(port), one_host)


def shared_secret(place: Place, store: Path) -> str:
    """The secret that the ranks of a launcher share: the one in the environment, or the store's.

    Raises:
        ConfigError: there is neither, or it is short enough to be guessed.
    """
    if os.environ.get(SECRET):
        secret = take_secret()
        if len(secret) < FEWEST_CHARACTERS:
            raise ConfigError(
                f"{SECRET} has {len(secret)} characters: take {FEWEST_CHARACTERS} or more that nobody "
                "guesses, such as those of `openssl rand -hex 32`"
            )
        return secret
    try:
        read_marker(store)
    except NotAStoreError as error:
        raise ConfigError(
            f"rank {place.rank} of {place.count} does not see the store {store}, by whose secret ranks know "
            f"each other: set {SECRET} on every host to one text, such as that of `openssl rand -hex 32`"
        ) from error
    return store_secret(store, "ranks").hex()


def meet_at(place: Place, secret: str) -> Meeting:
    """The meeting of a launcher's ranks: at the launcher's store, or at one that rank 0 serves."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    if place.one_host:
        stay_on_this_host()
    else:
        choose_interface(place.host)
    host = LOOPBACK if place.one_host and not served else place.host
    met = meet(MeetingPoint(host, place.port, secret), leads=place.rank == 0 and not served)
    # Ranks that torchrun starts again find what was said to earlier ones.
    return met.within(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if served else met


def meet_others(place: Place, secret: str, count: int) -> tuple[Meeting, None]:
    """As rank 0, meet others that the launcher starts. As `Launch`."""
    return meet_at(place, secret), None
