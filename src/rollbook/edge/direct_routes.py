"""A way past the router for the routes that nearly all requests are for.

FastAPI looks through all routes, and prepares what dependencies might need, for requests that need none.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response


class DirectRoutes:
    """ASGI middleware: POST requests for some paths are answered by one function, as by a route of it.

    Args:
        paths: which, decoded.
        handlers: the application's, of errors.
    """

    def __init__(
        self,
        app: Any,
        paths: re.Pattern[str],
        answer: Callable[[Request], Awaitable[Response]],
        handlers: Mapping[Any, Any],
    ) -> None:
        self._app, self._paths, self._answer = app, paths, answer
        # Starlette's outermost middleware answers what nobody expected.
        expected = {kind: handler for kind, handler in handlers.items() if kind not in (500, Exception)}
        self._direct = ExceptionMiddleware(self._respond, expected)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or have the application answer."""
        direct = (
            scope["type"] == "http" and scope["method"] == "POST" and self._paths.fullmatch(scope["path"])
        )
        await (self._direct if direct else self._app)(scope, receive, send)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)
