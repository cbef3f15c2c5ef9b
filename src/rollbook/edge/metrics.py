"""What every HTTP service counts for Prometheus: failures, and what limits refused."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics

from rollbook.edge.errors import describe

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series of its own for each, saying when it began: nobody asks


class EdgeMetrics:
    """Counters in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.failures = self.counter("failures", "Requests that failed, by code.", "code")
        text = "Requests and connections that a limit refused, by code."
        self.refusals = self.counter("refusals", text, "code")

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter in the registry."""
        return Counter(f"rollbook_{name}", text, labels, registry=self.registry)

    def failed(self, error: BaseException) -> None:
        """Count a request that was refused, or that failed on the way."""
        if isinstance(error, Exception):
            self.failures.labels(describe(error)[1]).inc()

    def refused(self, code: str) -> None:
        """Count a request or a connection that a limit refused."""
        self.refusals.labels(code).inc()
