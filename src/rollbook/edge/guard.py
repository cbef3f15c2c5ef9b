"""The guard before every route: checks a request's key, and whether its role allows the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from rollbook.edge.errors import ErrorForm, error_reply
from rollbook.edge.keys import (
    Caller,
    Keys,
    Role,
    Rule,
    Rules,
    check_role,
    is_trajectory_key,
    key_name,
    sent_key,
    trajectory_key,
    typed_key,
)
from rollbook.edge.web_pages import AllowedHosts, WebPages, is_loopback, shown_origins
from rollbook.store.errors import RequestError

CALLER = "rollbook.caller"
"""The key under which a request's scope holds its caller."""
CALLER_HEADER = "x-rollbook-caller"
"""Of a request that a proxy has admitted and passes on to a process of its own: the caller's role and, behind
a space, the name of its key."""
_PASSED_ON = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers that another proxy adds: then the sender is not the one who connected."""


ASK_USER = 'Basic realm="Rollbook: any name, and an API key as the password", charset="UTF-8"'
"""Has a browser ask its user for a key."""
NOBODY = Caller(None, Role.trajectory)
"""The caller without a valid key, on routes that are open."""


def caller_of(request: Request) -> Caller:
    """The caller of a request that the guard let in."""
    caller: Caller = request.scope[CALLER]
    return caller


@dataclass(frozen=True, slots=True)
class Guard:
    """Identifies callers by their keys.

    Attributes:
        rules: which roles may use which routes.
        run: whose trajectories have keys of their own here.
        secret: the secret behind the keys of single trajectories; None: no keys are checked.
    """

    keys: Keys
    rules: Rules
    run: str
    secret: bytes | None

    def key_of(self, name: str) -> str:
        """The key of one trajectory."""
        return trajectory_key(name, self.run, self.secret)

    def admitted(self, method: str, path: str, headers: Mapping[str, str], peer: str) -> Caller:
        """The caller of a request.

        Args:
            path: decoded, as routes are matched.
            peer: the address that the request is from.

        Raises:
            RequestError: 401, no valid key; 403, the caller's role does not allow it.
        """
        rule = self.rules.of(method, path)
        if self.secret is None:
            check_local(rule, headers, peer)
            sent = sent_key(headers)
            return Caller(None, Role.operator, None if key_name(sent) is None else sent)
        sent = sent_key(headers) or (typed_key(headers) if rule.browser else None)
        try:
            caller = self._caller(sent, self.secret)
            check_role(caller, rule, method, path)
        except RequestError:
            if rule.open:
                return NOBODY
            raise
        return caller

    def _caller(self, sent: str | None, secret: bytes) -> Caller:
        key = self.keys.find(sent) if sent else None
        if key is not None and key.expired(datetime.now(UTC)):
            text = f"the API key {key.name!r} expired at {key.expires}: have a new one made"
            raise RequestError(401, "expired_api_key", text)
        if key is not None:
            return Caller(key.name, key.role)
        if sent and is_trajectory_key(sent, self.run, secret):
            return Caller(Role.trajectory.value, Role.trajectory, sent)
        text = "no valid API key: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise RequestError(401, "invalid_api_key", text)


def check_local(rule: Rule, headers: Mapping[str, str], peer: str) -> None:
    """Refuse a local route to other hosts. A request that a proxy passed on counts as from another host.

    Raises:
        RequestError: 403.
    """
    if not rule.local:
        return
    if not is_loopback(peer) or any(name in headers for name in _PASSED_ON):
        text = "without keys this is for this host only: start the server with --keys, and "
        raise RequestError(403, "loopback_only", text + "send an operator's")


class Guarded:
    """ASGI middleware: only requests that the guard admits reach the application."""

    def __init__(
        self, app: Any, guard: Guard, refused: Callable[[RequestError], None], form: ErrorForm
    ) -> None:
        self._app, self._guard, self._refused, self._form = app, guard, refused, form

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with the refusal, or pass on to the application, which finds the caller in the scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # there are no routes of another kind
            return
        path = scope["path"]
        try:
            peer = scope["client"][0] if scope.get("client") else ""
            scope[CALLER] = self._guard.admitted(scope["method"], path, Headers(scope=scope), peer)
        except RequestError as error:
            self._refused(error)
            reply = error_reply(path, error, self._form)
            if error.status == 401 and self._guard.rules.of(scope["method"], path).browser:
                reply.headers["www-authenticate"] = ASK_USER
            await reply(scope, receive, send)
            return
        await self._app(scope, receive, send)


def add_guards(
    app: Any, guard: Guard, mine: AllowedHosts, refused: Callable[[RequestError], None], form: ErrorForm
) -> None:
    """Put the guard and the check of web pages before an application.

    Args:
        refused: called with the error of each refusal.
        form: of the replies to refused requests.
    """
    app.add_middleware(Guarded, guard=guard, refused=refused, form=form)
    if mine.origins:
        # Browsers show a page what it asked for only where the reply says that it may see it.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(shown_origins(mine)),
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(WebPages, mine=mine, refused=refused, form=form)
