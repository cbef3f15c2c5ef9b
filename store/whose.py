"""Identifies a proxy by its store, its run, and the start of `rollbook run` that it belongs to. Pure.

Before a process gives a proxy work or weights, it checks whose proxy that is: any port may be
another's. The proxy proves it by answering a nonce in a way that only a process with the store's
folder can.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

ASKS, PROVES = "x-rollbook-asks", "x-rollbook-proves"
"""Headers of a question for a proof, with the word, and of its answer."""
FOR = "x-rollbook-for"
"""The header by which whoever controls a proxy's engine says for whom."""
START, WANTED = "ROLLBOOK_START", "ROLLBOOK_PROXY_START"
"""In the environment of all that one start of `rollbook run` has started: that start, and that of the proxy
which is to be asked."""
PROVING = "whose a proxy is"
"""The purpose of the store's secret by which it is proven."""


@dataclass(frozen=True, slots=True)
class ProxyIdentity:
    """The identity of a proxy, actual or wanted; an empty field is unknown, or may be anything."""

    store: str = ""
    run: str = ""
    start: str = ""

    def __str__(self) -> str:
        run = f"run {self.run!r}" if self.run else "a run"
        return f"{run} of store {self.store}" if self.store else run

    @classmethod
    def of_health(cls, details: Mapping[str, Any]) -> ProxyIdentity:
        """The identity that a proxy reports at /healthz."""
        return cls(*(str(details.get(name) or "") for name in ("store", "run", "start")))

    @classmethod
    def of_header(cls, text: str) -> ProxyIdentity:
        """The identity in the header `FOR`."""
        return cls(*map(unquote, [*text.split("/"), "", ""][:3]))

    @property
    def header(self) -> str:
        """The value of the header `FOR`."""
        return "/".join(quote(part, safe="") for part in (self.store, self.run, self.start))

    def refuses(self, actual: ProxyIdentity) -> str | None:
        """Why another identity does not match this wanted one; None if it does."""
        for mine, theirs in ((self.store, actual.store), (self.run, actual.run)):
            if mine and mine != theirs:
                return f"is of {actual}, and not of {self}"
        if self.start and self.start != actual.start:
            return f"is of {actual}, but of another start of `rollbook run`"
        return None


def proof(secret: bytes, word: str, whose: ProxyIdentity) -> str:
    """The answer to a nonce, which only a process with the store's folder can compute.

    Args:
        secret: the store's, for `PROVING`.
    """
    message = "\0".join((word, whose.store, whose.run, whose.start))
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()
