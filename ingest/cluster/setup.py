"""Connects an application with the other processes that record its run, if any: workers or proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from rollbook.edge.bodies import BodyBudget
from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.web_pages import AllowedHosts
from rollbook.ingest.cluster.doors import add_forwarding, add_peers, counted
from rollbook.ingest.cluster.peers import Peers
from rollbook.ingest.cluster.siblings import Siblings
from rollbook.ingest.endpoints.registry import error_body
from rollbook.ingest.recording.metrics import Metrics
from rollbook.store.events import Json

Cluster = Siblings | Peers


def join(
    app: FastAPI,
    others: Cluster | None,
    cleaned: Callable[[str], str],
    knows: Callable[[str], bool],
    room: BodyBudget,
    metrics: Metrics,
) -> None:
    """Let the others know what this one knows, and have what is another proxy's sent on.

    Args:
        cleaned: takes secrets out of a text.
        knows: whether a reply, by its id, is known here.
    """
    if others is not None:
        others.cleaned, others.knows = cleaned, knows
    if isinstance(others, Peers):
        add_forwarding(app, others, room, counted(metrics.failed, metrics.refused))


def add_all_guards(
    app: FastAPI, others: Cluster | None, own: AllowedHosts, guard: Guard, metrics: Metrics
) -> None:
    """Put before every route whatever comes before it. Add this last."""
    add_guards(app, guard, own, metrics.failed, error_body)
    if isinstance(others, Peers):
        add_peers(app, others)


def stops(app: FastAPI, others: Cluster | None, *more: Callable[[], None]) -> None:
    """Let the server tell all who keep requests waiting when the application is to end."""
    of_peers = (others.stop,) if isinstance(others, Peers) else ()

    def stop() -> None:
        for callback in (*of_peers, *more):
            callback()

    app.state.stop = stop


@asynccontextmanager
async def meeting(others: Cluster | None) -> AsyncIterator[None]:
    """Speak with the others while the context lasts."""
    if isinstance(others, Peers):
        async with others.running():
            yield
    elif others is not None:
        with others.bus.running():
            yield
    else:
        yield


def health(others: Cluster | None) -> Json:
    """What /healthz says of other proxies; of other workers `aggregate` does."""
    return {"proxies": others.seats.states()} if isinstance(others, Peers) else {}
