"""The fold of what clients asked, and whose operation is next: pure, over any arrival."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.service.worker import Turns
from rollbook.store.errors import RequestError
from rollbook.store.events import (
    Json,
    OperationAccepted,
    OperationEnded,
    SamplerOpened,
    SessionEnded,
    SessionOpened,
)
from rollbook.train.tenants.operations import (
    Bounds,
    Operations,
    path_of,
    request_id_of,
    run_of,
    saved_at,
)

MODEL = "s1:train:0"


def accepted(
    number: int, operation: str = "forward_backward", digest: str = "d", name: str | None = None
) -> OperationAccepted:
    """An operation of the model."""
    settings = {"kind": "weights", "name": name}
    return OperationAccepted(request_id_of(MODEL, number), MODEL, number, operation, {}, digest, settings)


def ended(number: int, result: Json | None = None) -> OperationEnded:
    """Its end."""
    return OperationEnded(
        request_id_of(MODEL, number), MODEL, number, result, None, {}, f"checkpoints/{number}"
    )


@pytest.fixture
def operations() -> Operations:
    """A session of alice's with a model whose making has ended."""
    fold = Operations()
    for record in (SessionOpened("s1", "once", {}, "alice"), accepted(0, "create_model"), ended(0, {})):
        fold.add(record)
    return fold


@given(st.permutations([1, 2, 3, 4, 5]))
def test_operations_are_done_by_number_however_they_arrive(order: list[int]) -> None:
    """None is next before all that come before it have ended."""
    fold = Operations()
    for record in (SessionOpened("s1", None, {}, None), accepted(0, "create_model"), ended(0)):
        fold.add(record)
    model, done = fold.models[MODEL], []
    for number in order:
        fold.add(accepted(number))
        while (operation := model.next) is not None:
            done.append(operation.accepted.number)
            fold.add(ended(operation.accepted.number))
    assert done == [1, 2, 3, 4, 5]
    assert (model.next, model.pending, [model.operations[n].accepted.number for n in range(model.done)]) == (
        None,
        0,
        [0, *done],
    )


def test_a_repetition_is_known_by_its_body(operations: Operations) -> None:
    """The same body is the same operation, before and after its end; another is refused for good."""
    assert not operations.repeated(accepted(1))
    operations.add(accepted(1))
    assert operations.repeated(accepted(1))
    operations.add(ended(1))
    assert operations.repeated(accepted(1))
    with pytest.raises(
        RequestError, match="operation 1 of s1:train:0 came before, with another body"
    ) as error:
        operations.repeated(accepted(1, digest="other"))
    assert error.value.status == 422


def test_the_next_operation_is_never_refused_for_others_that_wait(operations: Operations) -> None:
    """Where later ones came first, those wait for it."""
    for number in range(2, Bounds().pending + 2):
        assert not operations.repeated(accepted(number))
        operations.add(accepted(number))
    with pytest.raises(RequestError, match="256 operations of s1:train:0 wait") as error:
        operations.repeated(accepted(Bounds().pending + 2))
    assert error.value.status == 429
    assert not operations.repeated(accepted(1))


@pytest.mark.parametrize("caller", ["bob", None])
def test_anothers_is_not_there(operations: Operations, caller: str | None) -> None:
    """Neither a session nor a model, a request or weights; as what never was."""
    operations.add(accepted(1, "save_weights", name="first"))
    operations.add(ended(1))
    operations.add(SamplerOpened("s1:sample:0", "s1", "tiny", None, None, 0, "d", None))
    asks = (
        lambda who: operations.session("s1", who),
        lambda who: operations.model(MODEL, who),
        lambda who: operations.sampler("s1:sample:0", who),
        lambda who: operations.request(request_id_of(MODEL, 1), who),
        lambda who: saved_at(operations.models, path_of(MODEL, "weights", "first"), who, 0),
    )
    for ask in asks:
        assert ask("alice")
        with pytest.raises(RequestError, match="is not there") as error:
            ask(caller)
        assert error.value.status == 404


def test_weights_are_found_by_their_newest_save(operations: Operations) -> None:
    """A name that was written over means what was saved last; a name that never was is not there."""
    path = path_of(MODEL, "weights", "best")
    for number in (1, 2):
        operations.add(accepted(number, "save_weights", name="best"))
        operations.add(ended(number))
    assert saved_at(operations.models, path, "alice", 0).checkpoint == "checkpoints/2"
    for odd in (
        path + "x",
        "best",
        "tinker://",
        f"tinker://{MODEL}/sampler_weights/best",
        "tinker://s2:train:0/a/b",
    ):
        with pytest.raises(RequestError, match="is not there"):
            saved_at(operations.models, odd, "alice", 0)


def test_nothing_that_was_sent_stays_in_memory(operations: Operations) -> None:
    """Of an operation that ended: where in the log it is does."""
    operations.add(replace(accepted(1), body={"large": 1}), ("service", 5))
    operation = operations.by_request[request_id_of(MODEL, 1)]
    assert operation.accepted.body == {"large": 1}
    operations.add(ended(1, {"large": 2}), ("service", 9))
    assert operation.ended is not None
    assert (operation.accepted.body, operation.ended.result) == ({}, None)
    assert (operation.accepted_at, operation.ended_at) == (("service", 5), ("service", 9))


def test_what_is_sampled_is_no_operation_of_a_model(operations: Operations) -> None:
    """It ends in any order, and so much of it may wait as a session may have."""
    operations.add(SamplerOpened("s1:sample:0", "s1", "tiny", None, None, 0, "d", None))

    def sample(number: int, count: int) -> OperationAccepted:
        named = f"s1:sample:0:{number}", "s1:sample:0", number, "sample"
        return OperationAccepted(*named, {}, "d", {"sequence_ids": ["x"] * count})

    for number in (7, 3):
        assert not operations.repeated(sample(number, 128))
        operations.add(sample(number, 128))
    keys = [str(at) for at in range(128)]
    operations.add(OperationEnded("s1:sample:0:3", "s1:sample:0", 3, {}, None, {"sequences": keys}))
    assert [*operations.sampling] == ["s1:sample:0:7"]
    assert operations.sequences == {"s1": 128}
    assert [*operations.models] == [MODEL]
    operations.add(sample(8, Bounds().sequences - 128))
    assert operations.repeated(sample(7, 128))
    with pytest.raises(RequestError, match="4096 sequences of session s1 are sampled") as error:
        operations.repeated(sample(9, 1))
    assert error.value.status == 429


def test_what_is_being_written_counts(operations: Operations) -> None:
    """Requests that came at the same moment find no room that each thinks is its own."""
    coming = [accepted(number) for number in range(2, Bounds().pending + 2)]
    assert not operations.repeated(accepted(Bounds().pending + 2), coming[1:])
    with pytest.raises(RequestError, match="256 operations of s1:train:0 wait"):
        operations.repeated(accepted(Bounds().pending + 2), coming)
    assert not operations.repeated(accepted(1), coming)


def test_bytes_that_wait_are_bounded(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was sent and has not ended; one operation may have more."""
    operations.bounds = Bounds(bytes=100)

    def large(number: int) -> OperationAccepted:
        return replace(accepted(number), body={"protobuf": "x" * 60})

    assert not operations.repeated(replace(large(2), body={"protobuf": "x" * 101}))
    operations.add(large(1))
    with pytest.raises(RequestError, match="1 operations of s1:train:0 wait, with 120 bytes") as error:
        operations.repeated(large(2))
    assert error.value.status == 429
    operations.add(ended(1, {}))
    assert not operations.repeated(large(3))
    assert operations.models[MODEL].bytes == 0


def test_sessions_are_known_by_their_request(operations: Operations) -> None:
    """One's repetition is the same session; another's with the same key is not."""
    assert operations.by_key == {("alice", "once"): "s1"}
    operations.add(SessionEnded("s1", {"reason": "done"}))
    assert operations.over == {"s1"}
    assert replace(operations.sessions["s1"], by="bob") != operations.sessions["s1"]


def test_names_of_runs_are_names_of_folders() -> None:
    """A model's id has colons, its run none."""
    assert run_of(MODEL) == "s1.train.0"


# Turns ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=5), st.integers(1, 300))
def test_every_model_gets_its_share(costs: list[int], rounds: int) -> None:
    """In tokens: models that always have an operation get the same but for one operation of each."""
    turns, had = Turns(), {str(i): 0 for i in range(len(costs))}
    asked = {str(i): cost for i, cost in enumerate(costs)}
    for _ in range(rounds):
        model = turns.next(asked)
        had[model] += asked[model]
    assert max(had.values()) - min(had.values()) <= max(costs)


def _served(turns: Turns, costs: dict[str, int], count: int) -> str:
    return "".join(turns.next(costs) for _ in range(count))


@pytest.mark.parametrize("cost", [1, 256, 100_000])
def test_who_comes_waits_for_one_operation_at_most(cost: int) -> None:
    """Beside a model whose operations wait without end, and however small those are."""
    turns = Turns()
    assert _served(turns, {"a": cost}, 1000) == "a" * 1000
    for _ in range(20):
        assert "b" in _served(turns, {"a": cost, "b": cost}, 2)
        _served(turns, {"a": cost}, 3)


def test_a_model_without_operations_saves_nothing_up() -> None:
    """One that comes behind many operations of another is not given as many."""
    turns = Turns()
    _served(turns, {"a": 10}, 50)
    assert _served(turns, {"a": 10, "b": 10}, 20).count("b") == 10
    _served(turns, {"b": 10}, 50)
    assert {*turns.ends} == {"b"}


def test_a_pause_does_not_pay() -> None:
    """A model that comes back at once goes on where it was: large operations of one that pauses between them
    are followed by as many tokens of the others."""
    turns = Turns()
    served = ""
    for _ in range(30):
        served += turns.next({"a": 10, "b": 100})
        served += turns.next({"a": 10})
    assert served.count("b") * 100 <= served.count("a") * 10 + 100
