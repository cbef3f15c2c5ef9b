"""What the proxy counts for Prometheus: turns, tokens, trajectories."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollbook.edge.metrics import EdgeMetrics
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class _Spells:
    """How often the lane stopped taking events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Spells in which the lane took no events, such as a full disk; it goes on by itself."
        self._counter = Counter("rollbook_store_failures", text, registry=registry)
        self._counted = 0

    def count(self, spells: int) -> None:
        """Update the counter to the number of spells so far."""
        self._counter.inc(spells - self._counted)
        self._counted = spells


class Metrics(EdgeMetrics):
    """What one proxy counts."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = self.counter("turns", "Completed turns.", "endpoint", "link", "finish", "delivered")
        self.tokens = self.counter("tokens", "Tokens of completed turns.", "kind")
        self.retries = self.counter("retries", "Requests that clients repeated, by what was done.", "how")
        self.unrecorded = self.counter("unrecorded", "Turns that were passed on and not recorded.")
        text = "Events that were refused, or that the disk did not take; what rested on them failed."
        self.lost_events = self.counter("lost_events", text)
        text = "Requests that were passed on and ask for no turn, by method: nothing of them is recorded."
        self.passed = self.counter("passed", text, "method")
        self._spells = _Spells(self.registry)
        self.engine_s = Histogram(
            "rollbook_engine_seconds",
            "Time of a turn in the engine.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.running = Gauge("rollbook_running", "Requests being answered.", registry=self.registry)
        self.held = Gauge(
            "rollbook_held_trajectories",
            "Trajectories that wait until a training has room for them.",
            registry=self.registry,
        )
        self.open = Gauge("rollbook_open_trajectories", "Trajectories not finished.", registry=self.registry)
        self.version = Gauge("rollbook_policy_version", "Policy version served.", registry=self.registry)

    def answered(self, turn: CompletedTurn, *, delivered: bool) -> None:
        """Count a completed turn whose reply was sent, or could not be."""
        done = turn.completed
        link = "extend" if turn.requested.parent_turn_id else turn.requested.root_reason or "root"
        endpoint = turn.requested.wire.get("endpoint", "")
        self.turns.labels(endpoint, link, done.finish_reason, str(delivered).lower()).inc()
        self.tokens.labels("prompt").inc(done.prompt_length)
        self.tokens.labels("completion").inc(len(done.completion_ids))
        if "engine_us" in done.timings:
            self.engine_s.observe(done.timings["engine_us"] / 1e6)

    def answered_call(self, in_flight: InFlightCall, turns: list[CompletedTurn], *, delivered: bool) -> None:
        """Count a request's turns, once however many clients wait for them."""
        if not in_flight.counted:
            in_flight.counted = True
            for turn in turns:
                self.answered(turn, delivered=delivered)

    def update(self, recorder: Recorder, version: int | None = None) -> None:
        """Bring what is not counted as it happens up to date."""
        alive = recorder.open_trajectories()
        self.open.set(len(alive))
        self.running.set(sum(live.running for live in alive))
        self._spells.count(recorder.writer.spells)
        if version is not None:
            self.version.set(version)
