"""The address of a run's proxy: one that is free to listen at, or the run's own; never another run's."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from rollbook import store
from rollbook.online.config import WholeConfig, at_port
from rollbook.store.errors import ConfigError, RollbookError
from rollbook.store.ids import new_id
from rollbook.store.secret import store_secret
from rollbook.store.whose import ASKS, PROVES, PROVING, ProxyIdentity, proof

ANSWER_S = 5.0
TRIED = 100
"""Ports after the default one that are tried."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A challenge by which a proxy proves whose it is.

    Attributes:
        secret: of the store, for that purpose.
        whose: the owner that it is to prove.
    """

    secret: bytes
    whose: ProxyIdentity

    @classmethod
    def of(cls, config: WholeConfig, start: str) -> Proof:
        """The proof that a proxy belongs to this run, and to this start of it."""
        log = store.open(config.serve.store, create=True)
        return cls(store_secret(log.path, PROVING), ProxyIdentity(log.store_id, config.run, start))

    def question(self) -> dict[str, str]:
        """Headers that ask for it."""
        return {ASKS: new_id()}

    def proven(self, question: dict[str, str], answer: httpx.Response) -> bool:
        """Whether an answer is that of the proxy which is meant."""
        return bool(answer.headers.get(PROVES) == proof(self.secret, question[ASKS], self.whose))


def placed_at(config: WholeConfig, say: Callable[[str], None]) -> WholeConfig:
    """The run, with its proxy at an address that is free: if the default port is taken, at another one.

    Raises:
        ConfigError: the address that the CONFIG gives is taken; it says by whom.
    """
    host, port = config.serve.host, config.serve.port
    if not port or _is_free(host, port):
        return config
    own = ProxyIdentity(_store_of(config), config.run)
    conflict = f"{host}:{port} is taken by {_who(config.proxy)}"
    if "port" in config.values.get("serve", {}) or "proxy" in config.values:
        raise ConfigError(
            f"{config.path}: {conflict}, and this is {own}: choose another port, such as "
            f"--set serve.port={_next_free(host, port)}"
        )
    config = at_port(config, _next_free(host, port))
    say(f"{conflict}: the proxy of this run listens at {config.proxy}")
    return config


def check_is_ours(config: WholeConfig) -> None:
    """Check that a proxy which is started elsewhere, if it answers by now, is this run's.

    Raises:
        ConfigError: it is another's.
    """
    owner = _owner_at(config.proxy)
    if owner is not None and owner.run:
        wanted = ProxyIdentity(_store_of(config), config.run)
        if (why := wanted.refuses(owner)) is not None:
            raise ConfigError(f"{config.path}: the proxy at {config.proxy} {why}: name its own with `proxy`")


def _is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _next_free(host: str, port: int) -> int:
    free = (candidate for candidate in range(port + 1, port + TRIED) if _is_free(host, candidate))
    return next(free, 0)


def _who(url: str) -> str:
    """Who answers at an address, in words."""
    owner = _owner_at(url)
    if owner is None:
        return "something that is no proxy of Rollbook"
    return f"a proxy of {owner}" if owner.run else "a proxy that does not say whose it is (it asks for a key)"


def _owner_at(url: str) -> ProxyIdentity | None:
    """The owner that a proxy names at /healthz; None: no proxy answers."""
    key = os.environ.get("ROLLBOOK_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with contextlib.suppress(httpx.HTTPError, ValueError):
        health = httpx.get(f"{url}/healthz", headers=headers, timeout=ANSWER_S).json()
        if isinstance(health, dict) and "status" in health:
            return ProxyIdentity.of_health(health)
    return None


def _store_of(config: WholeConfig) -> str:
    """The id of the run's store, if it is here."""
    with contextlib.suppress(RollbookError):
        return store.open(config.serve.store).store_id
    return ""
