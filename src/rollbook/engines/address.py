"""An engine's address, parsed once: the URL to show, and the secrets in it. Pure."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from rollbook.store.errors import ConfigError
from rollbook.store.redaction.text import grants_access


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is.

    Attributes:
        url: without a login, a query or a slash at the end: to be shown, recorded and compared.
        login: the header `authorization` that the login in the address stands for, or None.
        query: what every request's address is to hold besides, such as a key or an API's version.
    """

    url: str
    login: str | None = field(default=None, repr=False)
    query: str = field(default="", repr=False)

    @classmethod
    def of(cls, text: str | EngineAddress) -> EngineAddress:
        """Parse an address as a person writes it; a parsed address is returned as it is.

        Raises:
            ConfigError: it is no address of an HTTP server. The message does not repeat it.
        """
        if isinstance(text, EngineAddress):
            return text
        try:
            parts = urlsplit(text.strip())
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            sound = False
        if not sound:
            raise ConfigError(
                "an engine's address must be http://HOST:PORT or https://HOST, with a path or without"
            )
        login, _, place = parts.netloc.rpartition("@")
        url = urlunsplit((parts.scheme, place, parts.path, "", "")).rstrip("/")
        return cls(url, _basic(login) if login else None, parts.query)

    @property
    def plain(self) -> EngineAddress:
        """The same, of an engine whose routes take no query.

        Raises:
            ConfigError: it has one.
        """
        if self.query:
            raise ConfigError(f"{self.url}: an SGLang server's address has no query; its key is --engine-key")
        return self

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets in the address."""
        values = tuple(value for name, value in parse_qsl(self.query) if grants_access(name))
        return (*values, self.login.partition(" ")[2]) if self.login else values

    def headers(self, key: str | None) -> dict[str, str]:
        """The authorization header: the address's login, or the key as a bearer token.

        Raises:
            ConfigError: there are both, and one header.
        """
        if self.login is None:
            return {"authorization": f"Bearer {key}"} if key else {}
        if key:
            raise ConfigError(
                f"{self.url}: its address holds a login and there is a key too: give one of them"
            )
        return {"authorization": self.login}

    def __str__(self) -> str:
        return self.url


def _basic(login: str) -> str:
    """RFC 7617, in UTF-8."""
    name, _, password = login.partition(":")
    return "Basic " + base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
