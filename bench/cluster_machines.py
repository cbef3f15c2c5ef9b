"""Hosts on one machine: each with a network, a name and a disk of its own, as far as this machine allows.

A process enters its host right after it was forked: a network namespace, which a pair of virtual interfaces
joins to one bridge, and a mount namespace in which `disk` is the host's folder and no other host's can be
seen. Where namespaces cannot be had, hosts are folders, and all of them are at 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.bench.processes import BenchError

NETWORK, OUTSIDE = "10.87", 1
_NEW_MOUNTS, _NEW_NAMES, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_PRIVATE, _BIND = 0x40000 | 0x4000, 0x1000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs; it goes to other processes.

    Attributes:
        namespace: of its network; None: hosts are folders.
        own: the folder that the host's disk is; hidden: that of all hosts.
        disk: where the host finds its own.
    """

    name: str
    namespace: str | None
    own: str
    hidden: str
    disk: str

    def enter(self) -> None:
        """Have this process, which has one thread, be there from now on."""
        if self.namespace is None:
            return
        with open(f"/run/netns/{self.namespace}") as network:
            _checked(_LIBC.setns(network.fileno(), _NEW_NETWORK))
        _checked(_LIBC.unshare(_NEW_MOUNTS | _NEW_NAMES))
        socket.sethostname(self.name)
        _checked(_LIBC.mount(None, b"/", None, _PRIVATE, None))
        _checked(_LIBC.mount(self.own.encode(), self.disk.encode(), None, _BIND, None))
        _checked(_LIBC.mount(b"none", self.hidden.encode(), b"tmpfs", 0, None))


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass(slots=True)
class Machine:
    """One host.

    Attributes:
        address: of its network.
        own: the folder that is its disk, as seen from outside.
        disk: the same, as its processes see it.
    """

    name: str
    address: str
    own: Path
    disk: Path
    place: Place

    def lose_disk(self) -> None:
        """Remove all that is on it; its processes have ended."""
        shutil.rmtree(self.own)
        self.own.mkdir()

    def cut_off(self, address: str) -> None:
        """Let nothing from here reach an address any more, nor be told so."""
        self._drop("-A", address)

    def heal(self, address: str) -> None:
        """Let it reach that address again."""
        self._drop("-D", address)

    def _drop(self, how: str, address: str) -> None:
        assert self.place.namespace is not None
        rule = ["iptables", how, "OUTPUT", "-d", address, "-j", "DROP"]
        _run("ip", "netns", "exec", self.place.namespace, *rule)


@dataclass(slots=True)
class Network:
    """Hosts that reach each other, and the process that made them.

    Attributes:
        folder: where their disks are.
        apart: whether each has namespaces of its own.
    """

    folder: Path
    apart: bool
    _tag: str = field(default_factory=lambda: secrets.token_hex(3))  # the kernel frees names when it likes
    _subnet: int = 0
    _count: int = 0
    _namespaces: list[str] = field(default_factory=list)

    @property
    def outside(self) -> str:
        """The address at which hosts reach processes that are in none of them."""
        return f"{NETWORK}.{self._subnet}.{OUTSIDE}" if self.apart else "127.0.0.1"

    def open(self) -> None:
        """Make the bridge."""
        for folder in ("hosts", "disk"):
            (self.folder / folder).mkdir(parents=True)
        if self.apart:
            self._subnet = os.getpid() % 250 + 1
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "address", "add", f"{self.outside}/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")

    def machine(self, name: str) -> Machine:
        """One more host."""
        self._count += 1
        own = self.folder / "hosts" / name
        own.mkdir()
        if not self.apart:
            return Machine(name, "127.0.0.1", own, own, Place(name, None, "", "", ""))
        namespace, address = f"rb{self._tag}-{name}", f"{NETWORK}.{self._subnet}.{OUTSIDE + self._count}"
        _run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)
        here, there = f"v{self._tag}n{self._count}", f"w{self._tag}n{self._count}"
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        _run("ip", "link", "set", here, "master", self._bridge, "up")
        _run("ip", "link", "set", there, "netns", namespace)
        for words in (("address", "add", f"{address}/24", "dev", there), ("link", "set", there, "up")):
            _run("ip", "-n", namespace, *words)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        hidden, disk = self.folder / "hosts", self.folder / "disk"
        return Machine(name, address, own, disk, Place(name, namespace, str(own), str(hidden), str(disk)))

    @property
    def _bridge(self) -> str:
        return f"br{self._tag}"

    def close(self) -> None:
        """Remove what was made, but for the folders."""
        for namespace in self._namespaces:
            _run("ip", "netns", "del", namespace, may_fail=True)
        if self.apart:
            _run("ip", "link", "del", self._bridge, may_fail=True)


def _run(*words: str, may_fail: bool = False) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise BenchError(f"{' '.join(words)}: {done.stderr.strip()}")


def namespaces() -> bool:
    """Whether this process may make networks and mounts."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("iptables") is None:
        return False
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False)
    return tried.returncode == 0


@contextlib.contextmanager
def network(folder: Path, *, apart: bool | None = None) -> Iterator[Network]:
    """Hosts below a folder, which is new.

    Args:
        apart: whether each has namespaces; None: where that can be had.
    """
    made = Network(folder, namespaces() if apart is None else apart)
    try:
        made.open()
        yield made
    finally:
        made.close()
