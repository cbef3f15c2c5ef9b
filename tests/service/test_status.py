"""The status of a service by its log: what waits, what ended, and how long it took."""

from __future__ import annotations

from rollbook.service.metrics import ServiceMetrics
from rollbook.service.status import Status, _status
from rollbook.store import Event
from rollbook.store.events import OperationAccepted, OperationEnded, SamplerOpened, SessionOpened

MODEL, SAMPLER = "s1:train:0", "s1:sample:0"


def _accepted(model: str, number: int, operation: str, **resolved: object) -> OperationAccepted:
    return OperationAccepted(f"{model}:{number}", model, number, operation, {}, "d", resolved)


def _ended(model: str, number: int, error: str | None = None, **digests: object) -> OperationEnded:
    told = None if error is None else {"category": error, "error": "why"}
    return OperationEnded(f"{model}:{number}", model, number, {}, told, digests)


def test_a_row_for_each_model_and_for_what_is_sampled() -> None:
    """Times are from accepted to ended, in seconds."""
    records = [
        (0, SessionOpened("s1", None, {}, "alice")),
        (0, _accepted(MODEL, 0, "create_model", lora={"rank": 4})),
        (1, _ended(MODEL, 0)),
        (1, SamplerOpened(SAMPLER, "s1", "tiny", None, None, 0, "d", None)),
        (2, _accepted(MODEL, 1, "forward_backward", rewards={})),
        (5, _ended(MODEL, 1)),
        (5, _accepted(MODEL, 2, "optim_step")),
        (6, _ended(MODEL, 2, "user")),
        (6, _accepted(MODEL, 3, "optim_step")),
        (7, _accepted(MODEL, 4, "forward_backward", rewards={})),
        (8, _accepted(SAMPLER, 0, "sample", sequence_ids=["a"])),
        (8, _ended(SAMPLER, 0, sequences=["k"])),
    ]
    events = [Event(record, "s1.train.0", time_us=time * 1_000_000) for time, record in records]
    model, samples = _status(events, 10_000_000)
    assert model == Status("alice", MODEL, 4, 0, 0, 2, 3, 1, 4.0, 1.0, 2.8)
    assert samples == Status("alice", "s1:sample", None, 0, 0, 0, 1, 0, None, 0.0, 0.0)


def test_what_prometheus_is_told() -> None:
    """By the names of operations, and how they ended."""
    metrics = ServiceMetrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"rollbook_service_{name}", labels)

    passed = _accepted(MODEL, 1, "forward_backward", tokens=30)
    metrics.accepted(passed)
    metrics.accepted(_accepted(MODEL, 2, "optim_step"))
    assert value("waiting", operation="forward_backward") == 1
    metrics.ended(passed, _ended(MODEL, 1))
    assert value("waiting", operation="forward_backward") == 0
    assert value("waiting", operation="optim_step") == 1
    assert value("operations_total", operation="forward_backward", status="done") == 1
    assert value("pass_tokens_total") == 30
    assert value("operation_seconds_count", operation="forward_backward") == 1
    metrics.ended(_accepted(MODEL, 2, "optim_step"), _ended(MODEL, 2, "user"))
    assert value("operations_total", operation="optim_step", status="user") == 1
