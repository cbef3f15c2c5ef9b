"""What a client may read of its sessions, models and weights: of another's, nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool

from rollbook.service.journal import Journal
from rollbook.service.requests import Page, PageOfModels, SearchSessions, Status
from rollbook.service.weights import bytes_of
from rollbook.store.events import Json, SessionOpened
from rollbook.store.safe_paths import place_inside
from rollbook.train.tenants.operations import (
    CREATE,
    EXTERNAL_WEIGHTS,
    SAMPLER_WEIGHTS,
    SCHEME,
    WEIGHTS,
    ModelOperations,
    Saved,
    model_in,
    session_of,
)

TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler", EXTERNAL_WEIGHTS: "external"}
"""What clients call the kinds of weights in lists."""
ACTIVE_S = 120.0
"""A session is active for so long behind a sign of life."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Lists:
    """Sessions, models and weights of a caller, the newest first."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._operations = journal, journal.operations
        self._alive: dict[str, float] = {}

    def alive(self, session_id: str) -> None:
        """Note a session's sign of life."""
        self._alive[session_id] = time.monotonic()

    # Models and weights -----------------------------------------------------------------------------

    async def training_runs(self, page: PageOfModels, caller: str | None) -> Json:
        """A page of a caller's models."""
        models = [
            model
            for model in reversed(self._models(caller))
            if page.project_id in (None, self._project(model.session_id))
        ]
        runs = [await self._run(model) for model in _part(models, page)]
        return {"training_runs": runs, "cursor": _cursor(page, models)}

    async def training_run(self, model_id: str, caller: str | None) -> Json:
        """A caller's model.

        Raises:
            RequestError: 404, there is none.
        """
        return await self._run(self._operations.model(model_id, caller, trained=False))

    async def checkpoints_of(self, model_id: str, caller: str | None) -> Json:
        """The weights of a caller's model.

        Raises:
            RequestError: 404, there is no such model.
        """
        model = self._operations.model(model_id, caller, trained=False)
        return {"checkpoints": await self._described(self._saved([model]))}

    async def checkpoints(self, page: Page, caller: str | None) -> Json:
        """A page of a caller's weights."""
        saved = self._saved(self._models(caller))
        return {"checkpoints": await self._described(_part(saved, page)), "cursor": _cursor(page, saved)}

    def _models(self, caller: str | None) -> list[ModelOperations]:
        models = list(self._operations.models.values())
        return [m for m in models if m.owner == caller and (m.copy_of or CREATE in m.operations)]

    def _saved(self, models: Sequence[ModelOperations]) -> list[tuple[str, Saved]]:
        """Paths and what is there under them."""
        now_us = self._journal.now_us()
        found = [(p, s) for model in models for p, s in list(model.saved.items()) if s.there(now_us)]
        return sorted(found, key=lambda one: one[1].saved_us, reverse=True)

    async def _run(self, model: ModelOperations) -> Json:
        made = self._operations.models[model.copy_of or model.model_id].operations[CREATE]
        saved, newest = self._saved([model]), dict[str, Json]()
        for kind, name in ((WEIGHTS, "last_checkpoint"), (SAMPLER_WEIGHTS, "last_sampler_checkpoint")):
            of_kind = [one for one in saved if one[1].kind == kind]
            if of_kind:
                [newest[name]] = await self._described(of_kind[:1])
        settings = made.accepted.resolved
        lora = settings.get("lora", {})
        return {
            "training_run_id": model.model_id,
            "base_model": settings["base_model"],
            "model_owner": model.owner or "",
            "is_lora": lora is not None,
            "lora_rank": (lora or {}).get("rank"),
            "corrupted": made.ended is not None and not made.succeeded,
            "last_request_time": as_time(model.used_us),
            "user_metadata": _texts(settings.get("user_metadata")),
            **newest,
        }

    async def _described(self, saved: Sequence[tuple[str, Saved]]) -> list[Json]:
        return await run_in_threadpool(lambda: [self._checkpoint(path, one) for path, one in saved])

    def _checkpoint(self, path: str, saved: Saved) -> Json:
        return {
            "checkpoint_id": path.removeprefix(SCHEME).partition("/")[2],
            "checkpoint_type": TYPES[saved.kind],
            "time": as_time(saved.saved_us),
            "tinker_path": path,
            "size_bytes": bytes_of(place_inside(self._journal.log.path, saved.checkpoint)),
            "public": saved.public,
            "user_metadata": saved.metadata,
            "expires_at": None if saved.expires_us is None else as_time(saved.expires_us),
        }

    # Sessions ---------------------------------------------------------------------------------------

    def sessions(self, page: Page, caller: str | None) -> Json:
        """A page of a caller's sessions."""
        ids = [s.session_id for s in reversed(list(self._operations.sessions.values())) if s.by == caller]
        return {"sessions": [*_part(ids, page)]}

    def session(self, session_id: str, caller: str | None) -> Json:
        """A caller's session.

        Raises:
            RequestError: 404, there is none.
        """
        session, operations = self._operations.session(session_id, caller), self._operations
        return {
            "training_run_ids": [m.model_id for m in self._models(caller) if m.session_id == session_id],
            "sampler_ids": [name for name in list(operations.samplers) if session_of(name) == session_id],
            "user_metadata": _texts(session.client.get("user_metadata")),
            "display_name": session.client.get("display_name"),
        }

    def search(self, sent: SearchSessions, caller: str | None) -> Json:
        """A page of the caller's sessions that fulfil all that is asked."""
        if sent.owner.type == "user" and (caller or "") not in (sent.owner.owner_urns or ()):
            return {"sessions": []}
        places = sorted(((self._opened_us(s), s.session_id) for s in self._fit(sent, caller)), reverse=True)
        if sent.cursor is not None:
            behind = as_us(sent.cursor.last_created_at), sent.cursor.last_session_id
            places = [place for place in places if place < behind]
        page = places[: sent.limit]
        counts = dict.fromkeys((session_id for _, session_id in page), 0)
        for path, _ in self._saved(self._models(caller)):
            if (session_id := session_of(model_in(path))) in counts:
                counts[session_id] += 1
        came: Json = {"sessions": [self._summary(name, counts[name]) for _, name in page]}
        if len(places) > len(page):
            opened_us, last = page[-1]
            came["next_cursor"] = {"last_created_at": as_time(opened_us), "last_session_id": last}
        return came

    def _fit(self, sent: SearchSessions, caller: str | None) -> Iterator[SessionOpened]:
        for session in list(self._operations.sessions.values()):
            told, asked = session.client, list[bool]()
            said, words = _texts(told.get("user_metadata")) or {}, (sent.display_name or "").lower().split()
            if sent.session_id is not None:
                asked.append(session.session_id == sent.session_id)
            if sent.display_name is not None:
                asked.append(all(word in (told.get("display_name") or "").lower() for word in words))
            if (
                session.by == caller
                and (not asked or any(asked))
                and (sent.project_ids is None or self._project(session.session_id) in sent.project_ids)
                and sent.user_metadata.items() <= said.items()
                and (sent.statuses is None or self._is_any(session.session_id, sent.statuses))
            ):
                yield session

    def _is_any(self, session_id: str, wanted: Sequence[Status]) -> bool:
        """Whether a session has one of these statuses."""
        status = self._status(session_id) or {"type": None}
        reason = (status.get("reason") or {}).get("type")
        return any(
            one.type == status["type"] and (one.reasons is None or reason in one.reasons) for one in wanted
        )

    def _summary(self, session_id: str, checkpoints: int) -> Json:
        session = self._operations.sessions[session_id]
        return {
            "session_id": session_id,
            "created_at": as_time(self._opened_us(session)),
            "owner": session.by or "",
            "project_id": self._project(session_id) or "",
            "status": self._status(session_id),
            "checkpoints_count": checkpoints,
            "display_name": session.client.get("display_name"),
            "user_metadata": _texts(session.client.get("user_metadata")),
        }

    def _status(self, session_id: str) -> Json | None:
        """None: it neither ended, nor gave a sign of life lately."""
        if (ending := self._operations.endings.get(session_id)) is not None:
            told = {"reason": ending.get("reason") or {"type": "success"}, "detail": ending.get("detail")}
            return {"type": "client_finished"} | told
        seen = self._alive.get(session_id)
        is_active = seen is not None and time.monotonic() - seen < ACTIVE_S
        return {"type": "active"} if is_active else None

    def _opened_us(self, session: SessionOpened) -> int:
        return self._operations.opened_us[session.session_id]

    def _project(self, session_id: str) -> str | None:
        project: str | None = self._operations.sessions[session_id].client.get("project_id")
        return project


def _part(things: Sequence[Any], page: Page) -> Sequence[Any]:
    return things[page.offset : page.offset + page.limit]


def _cursor(page: Page, things: Sequence[Any]) -> Json:
    return {"offset": page.offset, "limit": page.limit, "total_count": len(things)}


def _texts(metadata: Json | None) -> dict[str, str] | None:
    """What a client said of something, as it reads it: texts, and all else as JSON."""
    if metadata is None:
        return None
    return {name: v if isinstance(v, str) else orjson.dumps(v).decode() for name, v in metadata.items()}


def as_time(us: int) -> str:
    """Microseconds since 1970 as an ISO 8601 time, as clients read them."""
    return (_EPOCH + timedelta(microseconds=us)).isoformat()


def as_us(time: datetime) -> int:
    """The other way."""
    return (time - _EPOCH) // timedelta(microseconds=1)
