"""Whose a proxy is: of which store, which run, and which start of `rollbook run`. Pure.

Who is about to give a proxy work, or weights, sees first whose it is: any port may be another's. A word that
was never used before is answered with a proof that only who has the store's folder can make.
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
class Whose:
    """Whose a proxy is, or is to be; what is empty is not known, or may be any."""

    store: str = ""
    run: str = ""
    start: str = ""

    def __str__(self) -> str:
        run = f"run {self.run!r}" if self.run else "a run"
        return f"{run} of store {self.store}" if self.store else run

    @classmethod
    def said(cls, details: Mapping[str, Any]) -> Whose:
        """What a proxy says of itself at /healthz."""
        return cls(*(str(details.get(name) or "") for name in ("store", "run", "start")))

    @classmethod
    def of_header(cls, text: str) -> Whose:
        """Of `FOR`."""
        return cls(*map(unquote, [*text.split("/"), "", ""][:3]))

    @property
    def header(self) -> str:
        """For `FOR`."""
        return "/".join(quote(part, safe="") for part in (self.store, self.run, self.start))

    def refuses(self, found: Whose) -> str | None:
        """Why a proxy is not the one that is wanted; None: it is."""
        for mine, its in ((self.store, found.store), (self.run, found.run)):
            if mine and mine != its:
                return f"is of {found}, and not of {self}"
        if self.start and self.start != found.start:
            return f"is of {found}, but of another start of `rollbook run`"
        return None


def proof(secret: bytes, word: str, whose: Whose) -> str:
    """What only who has the store's folder can answer to a word.

    Args:
        secret: the store's, for `PROVING`.
    """
    said = "\0".join((word, whose.store, whose.run, whose.start))
    return hmac.new(secret, said.encode(), hashlib.sha256).hexdigest()
