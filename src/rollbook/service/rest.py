"""The routes of clients that read, share and remove what there is; under /api/v1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from rollbook.edge.guard import caller_of
from rollbook.service.downloads import ROUTE as DOWNLOADS
from rollbook.service.requests import (
    CopyWeights,
    KeepWeights,
    Page,
    PageOfModels,
    SearchSessions,
    WeightsPath,
    read_body,
    read_values,
)
from rollbook.service.service import TrainingService
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.train.tenants.operations import EXTERNAL_WEIGHTS, path_of

Answer = Callable[[Request, bytes], Awaitable[Any]]
PREFIX = "/api/v1"
MOST_LISTED = 100
"""Weights on a page, where a client does not say."""
_DONE = 204


class RestRoutes:
    """What each of these routes answers."""

    def __init__(self, service: TrainingService) -> None:
        self._lists, self._weights, self._downloads = service.lists, service.weights, service.downloads

    def all(self) -> list[tuple[str, str, Answer]]:
        """(method, path, answer) of each."""
        one = "training_runs/{model_id}/checkpoints/{kind}/{name}"
        return [
            ("GET", "training_runs", self._training_runs),
            ("GET", "training_runs/{model_id}", self._training_run),
            ("GET", "training_runs/{model_id}/checkpoints", self._checkpoints_of),
            ("GET", "checkpoints", self._checkpoints),
            ("DELETE", one, self._delete),
            ("PUT", f"{one}/ttl", self._keep),
            ("POST", f"{one}/publish", self._publish),
            ("DELETE", f"{one}/publish", self._unpublish),
            ("GET", f"{one}/external_weights_urls", self._urls),
            ("GET", DOWNLOADS + "/{model_id}/{name}/{file}", self._file),
            ("POST", "weights_info", self._weights_info),
            ("POST", "copy_weights", self._copy),
            ("GET", "sessions", self._sessions),
            ("POST", "sessions/search", self._search),
            ("GET", "sessions/{session_id}", self._session),
        ]

    async def _training_runs(self, request: Request, _: bytes) -> Json:
        page = read_values(PageOfModels, dict(request.query_params))
        return await self._lists.training_runs(page, caller_name(request))

    async def _training_run(self, request: Request, _: bytes) -> Json:
        return await self._lists.training_run(request.path_params["model_id"], caller_name(request))

    async def _checkpoints_of(self, request: Request, _: bytes) -> Json:
        return await self._lists.checkpoints_of(request.path_params["model_id"], caller_name(request))

    async def _checkpoints(self, request: Request, _: bytes) -> Json:
        return await self._lists.checkpoints(_page(request, limit=str(MOST_LISTED)), caller_name(request))

    async def _sessions(self, request: Request, _: bytes) -> Json:
        return self._lists.sessions(_page(request), caller_name(request))

    async def _session(self, request: Request, _: bytes) -> Json:
        return self._lists.session(request.path_params["session_id"], caller_name(request))

    async def _search(self, request: Request, body: bytes) -> Json:
        return self._lists.search(read_body(SearchSessions, body), caller_name(request))

    async def _weights_info(self, request: Request, body: bytes) -> Json:
        return self._weights.described(read_body(WeightsPath, body).tinker_path, caller_name(request))

    async def _delete(self, request: Request, _: bytes) -> Response:
        await self._weights.delete(_path(request), caller_name(request))
        return Response(status_code=_DONE)

    async def _keep(self, request: Request, body: bytes) -> Response:
        await self._weights.keep(
            _path(request), read_body(KeepWeights, body).ttl_seconds, caller_name(request)
        )
        return Response(status_code=_DONE)

    async def _publish(self, request: Request, _: bytes) -> Response:
        await self._weights.publish(_path(request), True, caller_name(request))
        return Response(status_code=_DONE)

    async def _unpublish(self, request: Request, _: bytes) -> Response:
        await self._weights.publish(_path(request), False, caller_name(request))
        return Response(status_code=_DONE)

    async def _copy(self, request: Request, body: bytes) -> Json:
        if "x-tinker-weights-access-token" in request.headers:
            text = "copy_weights: access tokens of other accounts are not served: have the weights published"
            raise RequestError(400, "not_supported", text)
        sent, once = read_body(CopyWeights, body), request.headers.get("x-idempotency-key")
        return {"tinker_path": await self._weights.copy(sent, once, caller_name(request))}

    async def _urls(self, request: Request, _: bytes) -> Json:
        prefix = f"{request.url.scheme}://{request.url.netloc}{PREFIX}"
        return await self._downloads.urls(_path(request), caller_name(request), prefix)

    async def _file(self, request: Request, _: bytes) -> Response:
        named, asked = request.path_params, request.query_params
        path = path_of(named["model_id"], EXTERNAL_WEIGHTS, named["name"])
        signed = asked.get("expires", ""), asked.get("signature", "")
        return FileResponse(self._downloads.file(path, named["file"], *signed))


def caller_name(request: Request) -> str | None:
    """Name of the key that a request came with; None where keys are not checked."""
    return caller_of(request).name


def _path(request: Request) -> str:
    named = request.path_params
    return path_of(named["model_id"], named["kind"], named["name"])


def _page(request: Request, **otherwise: str) -> Page:
    return read_values(Page, otherwise | dict(request.query_params))
