"""A turn that no engine answered keeps its prompt, to be looked at or asked again; a request has it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.streamed import PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook.store import Event, connect
from rollbook.store.errors import EngineError
from rollbook.store.events import RECORDS, TurnFailed
from rollbook.store.events.erased import erase_row
from rollbook.store.fold.trajectory import prompt_sha256

CHAT = PATHS["chat"]


def turns(proxy: Any, name: str) -> tuple[Any, list[Any]]:
    """(a trajectory, its turns)"""
    trajectory = proxy.trajectories()[name]
    return trajectory, list(trajectory.turns.values())


def test_what_was_asked_of_an_engine(played: Callable[..., InProcess]) -> None:
    """Root and extension, several completions at once: the ids that the engine was given."""
    proxy = played(lambda prompt, sampling: answers.pop(0))
    answers: list[Any] = ["Hello", *3 * [EngineError("it is full")], "Hello"]
    first = proxy.ask(f"/t/t{CHAT}", asked("chat"))
    more = [first.json["choices"][0]["message"], {"role": "user", "content": "go on"}]
    body = asked("chat") | {"messages": [*asked("chat")["messages"], *more]}
    assert proxy.ask(f"/t/t{CHAT}", body | {"n": 3}).status == 502
    assert proxy.ask(f"/t/t{CHAT}", body).status == 200
    trajectory, recorded = turns(proxy, "t")
    assert [turn.failed is None for turn in recorded] == [True, False, False, False, True]
    prompts = [prompt.ids.tolist() for prompt in proxy.engine.prompts]
    assert [trajectory.prompt_ids(turn).tolist() for turn in recorded] == prompts
    failed = [turn.failed for turn in recorded[1:4]]
    assert [failure.prompt_ids is None for failure in failed] == [False, True, True]
    assert len(failed[0].prompt_ids) < failed[0].prompt_length == len(prompts[1])
    assert {failure.prompt_sha256 for failure in failed} == {prompt_sha256(proxy.engine.prompts[1].ids)}
    query = f"SELECT status, len(prompt_delta) FROM turns WHERE turn_id = '{failed[0].turn_id}'"
    assert connect(proxy.store.path).sql(query).fetchall() == [("failed", len(failed[0].prompt_ids))]


def test_a_request_that_no_engine_took(played: Callable[..., InProcess]) -> None:
    """It waited until nobody would wait longer: what would have been sent is there."""
    proxy = played()
    proxy.engine.doors.clear()
    proxy.turn_runner.hold_s = 0.05
    assert proxy.ask(f"/t/t{CHAT}", asked("chat")).status == 503
    trajectory, (turn,) = turns(proxy, "t")
    proxy.engine.doors.set()
    assert proxy.ask(f"/t/u{CHAT}", asked("chat")).status == 200
    assert trajectory.prompt_ids(turn).tolist() == proxy.engine.prompts[0].ids.tolist()


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_it_is_erased_like_any_prompt(played: Callable[..., InProcess], keep_tokens: bool) -> None:
    """The ids are -1, and their digest is gone, unless tokens are kept."""
    from rollbook.store.events.schema import ROW_NAMES, row_of

    failed = TurnFailed("t", "u", "no", played().engine.tokenizer.encode("secret"), 6, "sha")
    row = dict(zip(ROW_NAMES, row_of(Event(failed, "run", "e1")), strict=True))
    erased = erase_row(TurnFailed.KIND, row, keep_tokens=keep_tokens)
    assert RECORDS[TurnFailed.KIND] is TurnFailed
    assert b"no" not in str(erased["extra"]).encode().replace(b"null", b"")
    assert (set(erased["prompt_ids"].tolist()) == {-1}) != keep_tokens
    assert ("sha" in str(erased["extra"]).replace("prompt_sha256", "")) == keep_tokens
