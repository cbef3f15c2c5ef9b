"""What the service counts for Prometheus: operations, how long they took, and how many wait."""

from __future__ import annotations

import time

from prometheus_client import Gauge, Histogram

from rollbook.edge.metrics import EdgeMetrics
from rollbook.store.events import OperationAccepted, OperationEnded

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServiceMetrics(EdgeMetrics):
    """Counters of operations, by their names."""

    def __init__(self) -> None:
        super().__init__()
        text = "Operations that ended, by their names and how: done, user or server."
        self._ended = self.counter("service_operations", text, "operation", "status")
        text = "Tokens of passes that were done, thrice where there was a backward pass."
        self._tokens = self.counter("service_pass_tokens", text)
        name, text = (
            "rollbook_service_operation_seconds",
            "Seconds from accepted to ended.",
        )
        self._seconds = Histogram(name, text, ("operation",), registry=self.registry, buckets=SECONDS)
        text = "Operations that were accepted and did not end."
        self._waiting = Gauge("rollbook_service_waiting", text, ("operation",), registry=self.registry)
        self._came: dict[str, float] = {}

    def accepted(self, operation: OperationAccepted) -> None:
        """Count an operation that came, or that waited when the service began."""
        self._came[operation.request_id] = time.monotonic()
        self._waiting.labels(operation.operation).inc()

    def ended(self, accepted: OperationAccepted, ended: OperationEnded) -> None:
        """Count how one ended."""
        name, status = accepted.operation, "done" if ended.error is None else ended.error["category"]
        self._ended.labels(name, status).inc()
        self._waiting.labels(name).dec()
        self._seconds.labels(name).observe(time.monotonic() - self._came.pop(accepted.request_id))
        if ended.error is None:
            self._tokens.inc(accepted.resolved.get("tokens", 0))
