"""What the proxy tells Prometheus, at /metrics."""

from __future__ import annotations

from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from rollbook.ingest.answered import AnsweredTurn
from rollbook.ingest.error_replies import told
from rollbook.ingest.recorder import Recorder

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series of its own for each, saying when it began: nobody asks

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        turn_labels = ["endpoint", "link", "finish", "delivered"]
        self.turns = counter("rollbook_turns", "Completed turns.", turn_labels)
        self.tokens = counter("rollbook_tokens", "Tokens of completed turns.", ["kind"])
        self.failures = counter("rollbook_failures", "Requests that failed, by code.", ["code"])
        text = "Requests and connections that a limit refused, by code."
        self.refusals = counter("rollbook_refusals", text, ["code"])
        text = "Requests that clients repeated, by what was done."
        self.retries = counter("rollbook_retries", text, ["how"])
        self.unrecorded = counter("rollbook_unrecorded", "Turns that were passed on and not recorded.")
        text = "Events that were refused, or that the disk did not take; what rested on them failed."
        self.lost_events = counter("rollbook_lost_events", text)
        text = "Requests that were passed on and ask for no turn, by method: nothing of them is recorded."
        self.passed = counter("rollbook_passed", text, ["method"])
        text = "Spells in which the lane took no events, such as a full disk; it goes on by itself."
        self.store_failures = counter("rollbook_store_failures", text)
        self._spells = 0
        text = "Time of a turn in the engine."
        self.engine_s = Histogram("rollbook_engine_seconds", text, buckets=SECONDS, registry=self.registry)
        self.running = gauge("rollbook_running", "Requests being answered.")
        text = "Trajectories that wait until a training has room for them."
        self.held = gauge("rollbook_held_trajectories", text)
        self.open = gauge("rollbook_open_trajectories", "Trajectories not finished.")
        self.version = gauge("rollbook_policy_version", "Policy version served.")

    def answered(self, turn: AnsweredTurn, *, delivered: bool) -> None:
        """Count a completed turn whose reply was sent, or could not be."""
        done = turn.completed
        link = "extend" if turn.requested.parent_turn_id else turn.requested.root_reason or "root"
        endpoint = turn.requested.wire.get("endpoint", "")
        self.turns.labels(endpoint, link, done.finish_reason, str(delivered).lower()).inc()
        self.tokens.labels("prompt").inc(done.prompt_length)
        self.tokens.labels("completion").inc(len(done.completion_ids))
        if "engine_us" in done.timings:
            self.engine_s.observe(done.timings["engine_us"] / 1e6)

    def failed(self, error: BaseException) -> None:
        """Count a request that was refused, or that failed on the way."""
        if isinstance(error, Exception):
            self.failures.labels(told(error)[1]).inc()

    def refused(self, code: str) -> None:
        """Count a request or a connection that a limit refused."""
        self.refusals.labels(code).inc()

    def page(self, recorder: Recorder, version: int | None = None) -> Response:
        """The text that Prometheus reads."""
        alive = recorder.open_trajectories()
        self.open.set(len(alive))
        self.running.set(sum(live.running for live in alive))
        self.store_failures.inc(recorder.writer.spells - self._spells)
        self._spells = recorder.writer.spells
        if version is not None:
            self.version.set(version)
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)
