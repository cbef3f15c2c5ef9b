"""The viewer beside a proxy: requests under /view pass to a process of its own, which begins with the first.

So no page takes time from the event loop that records.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from yarl import URL

import rollbook
from rollbook.edge.bodies import BodyBudget
from rollbook.edge.forwarding import MADE_ANEW, end_to_end, header_value
from rollbook.edge.guard import CALLER_HEADER, caller_of
from rollbook.store.errors import RequestError

BEGIN_S = 30.0
"""So long the viewer may take to begin."""
BODY_BYTES = 64 << 10
_NOT_PASSED_ON = MADE_ANEW | {b"authorization", b"x-api-key", CALLER_HEADER.encode()}


@dataclass(slots=True, eq=False)
class ViewerBeside:
    """The viewer of a proxy's store, one for all workers of the proxy.

    Attributes:
        model: directory whose tokenizer gives tokens their text.
        folder: of its socket, for this user alone; made by the first page.
        proxy: number of the process that the viewer ends with.
    """

    store: Path
    model: Path | None
    folder: Path
    proxy: int
    _child: subprocess.Popen[bytes] | None = None
    _replies: set[aiohttp.ClientResponse] = field(default_factory=set)

    def add(self, app: FastAPI) -> None:
        """Answer requests under /view."""
        room = BodyBudget(most=BODY_BYTES, total=16 * BODY_BYTES)

        async def answer(request: Request) -> Response:
            async with room.body(request) as raw:
                return await self._answer(request, raw)

        for path in ("/view", "/view/{page:path}"):
            app.add_route(path, answer, methods=["GET", "HEAD", "POST"])

    def stop(self) -> None:
        """End replies that would go on: the proxy ends."""
        for reply in self._replies:
            reply.close()

    async def _answer(self, request: Request, body: bytes) -> Response:
        # A session each: a connection that was kept would be found dead only after a request was sent.
        session = _session(self._socket)
        try:
            try:
                reply = await _asked(session, request, body)
            except aiohttp.ClientConnectorError:
                await asyncio.to_thread(self._begin)
                reply = await _asked(session, request, body)
        except BaseException as error:
            await session.close()
            if not isinstance(error, aiohttp.ClientError):
                raise
            text = f"the viewer ended in the middle of this ({type(error).__name__}): ask again"
            raise RequestError(502, "no_viewer", text) from error
        headers = [pair for pair in end_to_end(reply.raw_headers) if pair[0] not in MADE_ANEW]
        answer = StreamingResponse(self._content(session, reply), reply.status)
        answer.raw_headers = headers
        return answer

    async def _content(
        self, session: aiohttp.ClientSession, reply: aiohttp.ClientResponse
    ) -> AsyncIterator[bytes]:
        self._replies.add(reply)
        try:
            async for part in reply.content.iter_any():
                yield part
        except aiohttp.ClientError:
            pass  # the proxy ends, or the viewer did: a page asks again
        finally:
            self._replies.discard(reply)
            reply.close()
            await session.close()

    # The process ----------------------------------------------------------------------------------------

    @property
    def _socket(self) -> Path:
        return self.folder / "socket"

    def _begin(self) -> None:
        """Start the viewer, unless another worker just did, and wait until it listens.

        Raises:
            RequestError: 503, it does not.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._listens():
                return
            command = [sys.executable, "-m", "rollbook", "view", "--store", str(self.store)]
            command += ["--socket", str(self._socket), "--parent", str(self.proxy)]
            # The same package that this process runs, wherever it was imported from.
            path = [str(Path(rollbook.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._child = subprocess.Popen(
                command + ([] if self.model is None else ["--model", str(self.model)]),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a terminal's interrupt goes to the proxy, with which this process ends
            )
            until = time.monotonic() + BEGIN_S
            while not self._listens():
                if self._child.poll() is not None or time.monotonic() > until:
                    text = "the viewer did not begin: see what the proxy printed, or use `rollbook view`"
                    raise RequestError(503, "no_viewer", text)
                time.sleep(0.05)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(self._socket))
            return True
        return False


def _session(socket: Path) -> aiohttp.ClientSession:
    """One that adds nothing to requests, and takes nothing from replies."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket)),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        auto_decompress=False,
    )


async def _asked(session: aiohttp.ClientSession, request: Request, body: bytes) -> aiohttp.ClientResponse:
    """The viewer's reply to a request that the proxy has admitted."""
    caller = caller_of(request)
    passed_on = [(k, v) for k, v in end_to_end(request.headers.raw) if k not in _NOT_PASSED_ON]
    headers = [(name.decode(), header_value(value)) for name, value in passed_on]
    headers.append((CALLER_HEADER, f"{caller.role.value} {caller.name or ''}"))
    path, query = request.scope["raw_path"].decode(), request.url.query
    address = URL(f"http://viewer{path}{'?' if query else ''}{query}", encoded=True)
    return await session.request(
        request.method, address, headers=headers, data=body or None, allow_redirects=False
    )


@contextlib.contextmanager
def viewer_beside(store: Path, model: Path | None) -> Iterator[ViewerBeside]:
    """A viewer of the store, while the context lasts, for this process and those that it forks."""
    folder = Path(tempfile.gettempdir()) / f"rollbook-view-{secrets.token_hex(8)}"  # nobody else can make it
    try:
        yield ViewerBeside(store, model, folder, os.getpid())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
