"""Keeps web pages out: requests that a browser may send for a foreign page never reach a route.

A page on any site can make its visitor's browser send requests to this host, loopback included,
and can even read the replies through a name whose address it changes (DNS rebinding). Browsers
reveal such a page by the `Host` they meant, the `Origin` of the page, and `Sec-Fetch-Site`.
Other clients send neither of the last two.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollbook.edge.errors import ErrorForm, error_reply
from rollbook.store.errors import ConfigError, RequestError

LOOPBACK_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")
ASKS_NOBODY = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Types of bodies that a page sends anywhere without asking there first."""

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(?::(?P<port>[0-9]*))?")
_LONGEST_HOST = 300
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_READS = ("GET", "HEAD")

HeaderList = Sequence[tuple[bytes, bytes]]


@lru_cache(maxsize=1024)
def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1024)
def is_loopback(address: str) -> bool:
    """Whether an address is this host's own; False for a name."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The names, addresses and origins that count as ours.

    Attributes:
        names: host names that requests may be meant for, in small letters, beside loopback's.
        addresses: any IP address, which DNS cannot redirect; otherwise loopback's only.
        origins: pages of these may send requests, as `scheme://host:port`, beside our own.
    """

    names: frozenset[str] = frozenset()
    addresses: bool = False
    origins: frozenset[str] = frozenset()

    def is_host(self, name: str) -> bool:
        """Whether a name or address, as `host_of` gives it, is ours."""
        if name in LOOPBACK_NAMES or name in self.names:
            return True
        return _is_address(name) and (self.addresses or is_loopback(name))


def allowed_hosts(
    listening: str, machine: str, hosts: Iterable[str] = (), origins: Iterable[str] = ()
) -> AllowedHosts:
    """What counts as ours when listening on this address.

    Args:
        machine: this machine's name.
        hosts: more names, such as that of a reverse proxy before us.
        origins: of pages that may send requests, such as http://localhost:3000.

    Raises:
        ConfigError: a host or origin is invalid.
    """
    names = {machine.lower(), machine.lower().partition(".")[0], listening.lower()}
    for host in hosts:
        parsed = host_of(host)
        if parsed is None:
            raise ConfigError(f"--allow-host {host!r}: give a host name, such as rollbook.example.org")
        names.add(parsed[0])
    normal = {origin: origin_of(origin) for origin in origins}
    if wrong := [origin for origin, parsed in normal.items() if parsed is None]:
        raise ConfigError(
            f"--allow-origin {wrong[0]!r}: give scheme://host:port, such as http://localhost:3000"
        )
    beyond = not is_loopback(listening) and listening.lower() not in LOOPBACK_NAMES
    shown = frozenset(f"{scheme}://{host}:{port}" for scheme, host, port in filter(None, normal.values()))
    return AllowedHosts(frozenset(names - {""}), beyond, shown)


def host_of(text: str) -> tuple[str, str] | None:
    """(name or address in small letters, without brackets and last dot; port or "") of a Host, or None."""
    match = _HOST.fullmatch(text.strip().lower())
    if match is None or len(text) > _LONGEST_HOST:
        return None
    name = match["name"].strip("[]").removesuffix(".")
    return (name, match["port"] or "") if name else None


def origin_of(text: str) -> tuple[str, str, str] | None:
    """(scheme, name, port) of an origin; None for one that names no host, such as `null`."""
    scheme, _, place = text.strip().lower().partition("://")
    host = host_of(place)
    if scheme not in _DEFAULT_PORTS or host is None:
        return None
    return scheme, host[0], host[1] or _DEFAULT_PORTS[scheme]


def shown_origins(mine: AllowedHosts) -> set[str]:
    """Origins of ours as browsers write them: without a port that is the scheme's own."""
    return {origin.removesuffix(f":{_DEFAULT_PORTS[origin.partition(':')[0]]}") for origin in mine.origins}


# The checks ---------------------------------------------------------------------------------


def check_page(
    mine: AllowedHosts, method: str, path: str, headers: HeaderList, http_version: str = "1.1"
) -> None:
    """Refuse a request that a foreign page may have caused.

    Args:
        headers: names in small letters, as ASGI has them.

    Raises:
        RequestError: 400, its Host is unclear; 421, it is meant for another host; 403, from a
            foreign page; 415, a page could send its body without a preflight request.
    """
    host = _checked_host(mine, _values(headers, b"host"), http_version)
    origins = _values(headers, b"origin")
    for origin in origins:
        if not _is_ours(mine, origin, host):
            text = (
                f"a page of origin {origin[:200]!r} sent this: pages of one's own are named by --allow-origin"
            )
            raise RequestError(403, "foreign_origin", text)
    if not origins:
        _check_site(method, path, headers)
    elif _has_body(headers):
        _check_type(_values(headers, b"content-type"))


def _checked_host(mine: AllowedHosts, hosts: list[str], http_version: str) -> tuple[str, str] | None:
    if not hosts and http_version in ("0.9", "1.0"):
        return None  # no browser uses it any more
    host = host_of(hosts[0]) if len(hosts) == 1 else None
    if host is None:
        raise RequestError(400, "bad_host", f"{len(hosts)} Host headers, or one that names no host: send one")
    if not mine.is_host(host[0]):
        text = (
            f"Host {hosts[0][:200]!r} is none of this proxy's: names of one's own are given by --allow-host"
        )
        raise RequestError(421, "foreign_host", text)
    return host


def _is_ours(mine: AllowedHosts, origin: str, host: tuple[str, str] | None) -> bool:
    parsed = origin_of(origin)
    if parsed is None:
        return False
    scheme, name, port = parsed
    if f"{scheme}://{name}:{port}" in mine.origins:
        return True
    # TLS may end before us, so both are taken to be of one scheme.
    return host is not None and (name, port) == (host[0], host[1] or _DEFAULT_PORTS[scheme])


def _check_site(method: str, path: str, headers: HeaderList) -> None:
    """Check a request without an Origin: one that only reads may be a link that a user clicked on."""
    site = _values(headers, b"sec-fetch-site")
    if not site or set(site) <= {"none", "same-origin"}:
        return
    mode, dest = _values(headers, b"sec-fetch-mode"), _values(headers, b"sec-fetch-dest")
    if method in _READS and (mode, dest) == (["navigate"], ["document"]) and not path.startswith("/engine/"):
        return
    text = "a page of another site sent this: pages of one's own are named by --allow-origin"
    raise RequestError(403, "foreign_origin", text)


def _check_type(types: list[str]) -> None:
    kind = types[0].partition(";")[0].strip().lower() if types else ""
    if len(types) != 1 or not kind or kind in ASKS_NOBODY:
        text = f"a page sent a body of type {kind or 'none'!r}: send content-type: application/json"
        raise RequestError(415, "unasked_body", text)


def _has_body(headers: HeaderList) -> bool:
    length = _values(headers, b"content-length")
    return bool(_values(headers, b"transfer-encoding")) or any(value.strip() != "0" for value in length)


def _values(headers: HeaderList, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


# The middleware -----------------------------------------------------------------------------


class WebPages:
    """ASGI middleware: no request of a foreign page reaches the application."""

    def __init__(
        self, app: Any, mine: AllowedHosts, refused: Callable[[RequestError], None], form: ErrorForm
    ) -> None:
        self._app, self._mine, self._refused, self._form = app, mine, refused, form

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with the refusal, or pass on to the application."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            method = scope.get("method", "GET")
            version = scope.get("http_version", "1.1")
            check_page(self._mine, method, scope["path"], scope["headers"], version)
        except RequestError as error:
            self._refused(error)
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await error_reply(scope["path"], error, self._form)(scope, receive, send)
            return
        await self._app(scope, receive, send)
