"""The network interface on which gloo and nccl listen: the loopback, or one towards another host."""

from __future__ import annotations

import os
import socket

import psutil

LOOPBACK = "127.0.0.1"
INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interface_towards(host: str) -> str | None:
    """The network interface with whose address this host reaches another host, or itself; None if
    none of its interfaces has that address.

    Gloo would choose by the host's name, which often is an address of the loopback.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as nothing_is_sent:
        nothing_is_sent.connect(address)
        own = nothing_is_sent.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return str(name)
    return None


def choose_interface(host: str) -> None:
    """Make gloo use the network interface towards a host, unless the environment names one."""
    _choose(INTERFACE, host)


def stay_on_this_host() -> None:
    """Make gloo and nccl listen on the loopback only, unless the environment names an interface."""
    for variable in (INTERFACE, NCCL_INTERFACE):
        _choose(variable, LOOPBACK)


_chosen: dict[str, str] = {}
"""What this process itself gave variables: who started it may have given others."""


def _choose(variable: str, host: str) -> None:
    free = os.environ.get(variable) in (None, _chosen.get(variable))
    if free and (name := interface_towards(host)):
        os.environ[variable] = _chosen[variable] = name


def given_environment() -> dict[str, str]:
    """The environment of this process, without the interfaces that it set itself."""
    return {name: value for name, value in os.environ.items() if _chosen.get(name) != value}
