"""A real engine behind a cassette: what was not recorded is passed on to it, byte for byte."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollbook.ingest.http.forwarding import end_to_end
from rollbook.ingest.upstream.target import Upstream
from rollbook.store.errors import EngineError
from rollbook.store.redaction import shown

CONNECT_S = 10.0


class EngineBehind:
    """Passes requests on, to each of several engines in turn.

    Args:
        upstreams: where they are; at least one.
    """

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self._turns = itertools.cycle(upstreams)
        self._client: httpx.AsyncClient | None = None

    async def answer(self, request: Request, path: str, raw: bytes, ours: Mapping[str, str]) -> Response:
        """The reply of the next engine, as it comes.

        Args:
            path: the endpoint's, without a trajectory before it.
            raw: the body, without a content encoding.
            ours: headers that are added to the reply's.

        Raises:
            EngineError: it cannot be reached.
        """
        if self._client is None:  # made on the loop that it is used on
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
        upstream = next(self._turns)
        headers = upstream.headers(request.headers.raw, path, own_keys=False, plain=False)
        headers.popall("content-encoding", None)
        query = request.scope.get("query_string", b"").decode("latin-1")
        url = upstream.target(path, query)
        asked = self._client.build_request(request.method, url, content=raw, headers=[*headers.items()])
        try:
            reply = await self._client.send(asked, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = shown(str(error) or type(error).__name__)
            raise EngineError(f"{upstream.url} cannot be reached: {text}") from error
        answer = StreamingResponse(_passed(reply), reply.status_code)
        added = [(name.encode(), value.encode("latin-1")) for name, value in ours.items()]
        answer.raw_headers = [*end_to_end(reply.headers.raw), *added]
        return answer


async def _passed(reply: httpx.Response) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(reply):
        async for data in reply.aiter_raw():
            yield data
