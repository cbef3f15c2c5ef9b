"""The results of the training service's benchmark, as figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rollbook.bench.figure import Figure, Spread, quantile, spread

EVEN, TAILED = "even", "tailed"
"""Batches whose sequences are of one length, and of long-tailed ones."""
PASS, STEP = "pass", "step"


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of the same optimizer steps, round by round.

    Attributes:
        tokens: of all of a round's steps.
    """

    service: Sequence[float]
    loop: Sequence[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of small operations of a kind.

    Attributes:
        called: from the call at the client to its result there; accepted: from when it was accepted.
        alone: of the same in the trainer's own loop.
    """

    called: Sequence[float]
    accepted: Sequence[float]
    alone: Sequence[float]

    def added(self, of: Sequence[float]) -> list[float]:
        """What the service adds to each, over the median of the computation alone."""
        alone = median(self.alone)
        return [seconds - alone for seconds in of]


@dataclass(frozen=True, slots=True)
class Switching:
    """Seconds of the same operations, round by round: of one model, and of several.

    Attributes:
        share: of the operations of several before which another model had its turn.
        tokens: of all of a round's steps.
    """

    one: Sequence[float]
    several: Sequence[float]
    models: int
    share: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Publishing:
    """Seconds of a publish by its parts, round by round, and of as many bytes to the disk and back."""

    parts: Sequence[Mapping[str, float]]
    bare: Sequence[float]
    bytes: int

    @property
    def whole(self) -> list[float]:
        """Until the sampler answered, less what a sample costs anyway."""
        return [sum(part.values()) - 2 * part["again"] for part in self.parts]


@dataclass(frozen=True, slots=True)
class Crowd:
    """Passes of a tenant beside another one that pipelines without end.

    Attributes:
        quiet, beside: seconds of each of its passes, without the other and with it.
        each_s: of an operation of the other, which is alone; its tokens.
    """

    quiet: Sequence[float]
    beside: Sequence[float]
    each_s: float
    tokens: int

    @property
    def waits(self) -> list[float]:
        """How much longer each took, in operations of the other."""
        alone = median(self.quiet)
        return [(seconds - alone) / self.each_s for seconds in self.beside]


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds from the start of a killed service's process.

    Attributes:
        listens: until it listens; whole: until the first operation after it was done.
        usual: of such an operation when nothing is to be done again; first: of the first one.
        operations: since the model's last state; ran: the seconds that they took the first time.
    """

    listens: float
    whole: float
    first: float
    usual: float
    operations: int
    ran: float

    @property
    def again(self) -> float:
        """Seconds of what ran again."""
        return self.first - self.usual


@dataclass(frozen=True, slots=True)
class LogBytes:
    """Bytes by which the log grew for so many operations, a pass and a step in turn.

    Attributes:
        sent: of what clients sent, and results: of what they were answered, as these lie in the log.
    """

    grown: int
    sent: int
    results: int
    operations: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured; speeds by batch, latencies by kind of operation."""

    speeds: Mapping[str, Speed]
    latencies: Mapping[str, Latencies]
    switching: Switching
    publishing: Publishing
    crowds: Sequence[Crowd]
    restarts: Sequence[Restart]
    log: LogBytes


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def figures(measured: Measured) -> tuple[Figure, ...]:
    """The figures, those with goals first of their kind."""
    return (
        *(_speed(name, speed) for name, speed in measured.speeds.items()),
        *_latency(measured.latencies),
        _switching(measured.switching),
        _publishing(measured.publishing),
        _waiting(measured.crowds),
        *_restarting(measured.restarts),
        *_bytes(measured.log),
    )


def _speed(batch: str, speed: Speed) -> Figure:
    name = "service.vs_loop" if batch == EVEN else f"service.{batch}_vs_loop"
    rate, bare = (speed.tokens / median(side) for side in (speed.service, speed.loop))
    against = f"the trainer's own loop: {bare:.0f} tokens/s"
    return Figure(name, rate, "tokens/s", against, _ratio(speed.loop, speed.service), len(speed.loop))


def _latency(latencies: Mapping[str, Latencies]) -> list[Figure]:
    accepted = [s for kind in latencies.values() for s in kind.added(kind.accepted)]
    called = [s for kind in latencies.values() for s in kind.added(kind.called)]
    alone = [s for kind in latencies.values() for s in kind.added(kind.alone)]
    shown = ", ".join(f"{kind} {1000 * median(one.alone):.0f} ms" for kind, one in latencies.items())
    control = f"the computation alone ({shown}), p99 {1000 * quantile(alone, 99):.0f} ms more than its median"
    count = len(accepted)
    return [
        Figure("service.added_p50_ms", 1000 * quantile(accepted, 50), "ms", control, None, count),
        Figure("service.added_p99_ms", 1000 * quantile(accepted, 99), "ms", control, None, count),
        Figure("service.call_p50_ms", 1000 * quantile(called, 50), "ms", control, None, count),
        Figure("service.call_p99_ms", 1000 * quantile(called, 99), "ms", control, None, count),
    ]


def _switching(one: Switching) -> Figure:
    rate, bare = (one.tokens / median(side) for side in (one.several, one.one))
    against = (
        f"one model: {bare:.0f} tokens/s; {one.models} models, switched at {one.share:.0%} of operations"
    )
    ratio = _ratio(one.one, one.several)
    return Figure("service.switching", rate, "tokens/s", against, ratio, len(one.one))


def _publishing(one: Publishing) -> Figure:
    against = f"writing, syncing and reading its {one.bytes / 1e6:.0f} MB: {median(one.bare):.3f} s"
    ratio = _ratio(one.whole, one.bare)
    return Figure("service.publish_vs_bytes", median(one.whole), "s", against, ratio, len(one.bare))


def _waiting(crowds: Sequence[Crowd]) -> Figure:
    worst = max(crowds, key=lambda crowd: quantile(crowd.waits, 95))
    against = f"passes of {worst.tokens} tokens, each {worst.each_s:.3f} s; the worst of {len(crowds)} sizes"
    value = quantile(worst.waits, 95)
    return Figure("service.second_tenant_ops", value, "operations", against, None, len(worst.waits))


def _restarting(restarts: Sequence[Restart]) -> list[Figure]:
    count, operations = len(restarts), restarts[0].operations
    again = median(one.again for one in restarts)
    rest = median(one.whole - one.again for one in restarts)
    ran = median(one.ran for one in restarts)
    return [
        Figure("service.restart_s", rest, "s", f"and {again:.1f} s of what ran again", None, count),
        Figure(
            *("service.again_s", again, "s"),
            f"{operations} operations, which took {ran:.1f} s before",
            *(again / ran, count),
        ),
    ]


def _bytes(log: LogBytes) -> list[Figure]:
    count = log.operations
    sent, results = log.sent / count, log.results / count
    beside = (log.grown - log.sent) / count
    return [
        Figure("service.op_bytes", beside, "bytes", f"{sent:.0f} bytes of what was sent", None, count),
        Figure(
            *("service.op_bytes_less_results", beside - results, "bytes"),
            f"and {results:.0f} bytes of results",
            *(None, count),
        ),
    ]


def spreads(measured: Measured) -> tuple[Spread, ...]:
    """Seconds of each part."""
    shown = []
    for batch, speed in measured.speeds.items():
        shown += [spread(f"{batch}, service", "s", speed.service), spread(f"{batch}, loop", "s", speed.loop)]
    for kind, latency in measured.latencies.items():
        for what in ("called", "accepted", "alone"):
            values = [1000 * s for s in getattr(latency, what)]
            shown.append(spread(f"{kind}, {what}", "ms", values))
    one = measured.switching
    shown += [spread("one model", "s", one.one), spread(f"{one.models} models", "s", one.several)]
    for part in measured.publishing.parts[0]:
        shown.append(spread(f"publish, {part}", "s", [p[part] for p in measured.publishing.parts]))
    shown.append(spread("bytes", "s", measured.publishing.bare))
    for crowd in measured.crowds:
        shown.append(spread(f"wait beside {crowd.tokens} tokens", "operations", crowd.waits))
    for what in ("listens", "whole", "first", "usual"):
        shown.append(spread(f"restart, {what}", "s", [getattr(r, what) for r in measured.restarts]))
    return tuple(shown)
