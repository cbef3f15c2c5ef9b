"""Adversarial cases over HTTP: clients that leave, come again, overflow, or refer to what is not theirs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.engines.played import Play
from tests.fakes.proxies.in_process import InProcess

from rollbook.train.select.samples import samples_of

USER = {"role": "user", "content": "What is the weather in Paris?"}
RETRY = {"x-stainless-retry-count": "1"}


def _user(text: str = "And tomorrow?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _path(name: str) -> str:
    return f"/t/{name}/v1/chat/completions"


def _pieces(data: bytes) -> list[Any]:
    """The chunks of a stream."""
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line.startswith(b"data: ")]
    return [orjson.loads(line) for line in lines if line != b"[DONE]"]


def _text(data: bytes) -> str:
    choices = [choice for piece in _pieces(data) for choice in piece["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_client_that_leaves_in_mid_stream_comes_again(played: Any) -> None:
    """31: what it did not wait for is an undelivered leaf without loss; its retry is a turn of its own."""
    p = played("Sunny and warm, all day long.")
    body = {"messages": [USER], "stream": True}

    async def leave() -> None:
        p.engine.pace = asyncio.Semaphore(4)
        exchange = p.exchange(_path("left"), body)
        await exchange.until(lambda: exchange.parts)
        exchange.leave()
        await exchange.end()
        await p.turn_runner.drained()

    p.run(leave())
    p.engine.pace = None
    again = p.ask(_path("left"), body, headers=RETRY)
    assert _text(again.data) == "Sunny and warm, all day long."
    trajectory = p.trajectories()["left"]
    cut, whole = trajectory.turns.values()
    assert (cut.completed.finish_reason, cut.delivered) == ("abort", None)
    assert (whole.completed.finish_reason, whole.delivered) == ("stop", "sent")
    assert len(cut.completed.completion_ids) < len(whole.completed.completion_ids)
    assert np.array_equal(trajectory.prompt_ids(cut), trajectory.prompt_ids(whole))
    left, right = samples_of(trajectory)
    assert not left.loss_mask.any()
    assert right.tokens[right.loss_mask].tolist() == whole.completed.completion_ids.tolist()
    reply = {"role": "assistant", "content": "Sunny and warm, all day long."}
    p.chat("left", USER, reply, _user()).raise_for_status()
    last = list(p.trajectories()["left"].turns.values())[-1]
    assert last.requested.parent_turn_id == whole.turn_id


def test_requests_at_once_are_siblings(played: Any) -> None:
    """32: two equal requests without a retry's mark are two samples of one prompt."""
    p = played()

    async def both() -> list[Any]:
        begun = [p.exchange(_path("pair"), {"messages": [USER]}) for _ in range(2)]
        return [await exchange.end() for exchange in begun]

    replies = p.run(both())
    assert len({reply.json["id"] for reply in replies}) == 2
    assert len(p.engine.prompts) == 2
    turns = list(p.trajectories()["pair"].turns.values())
    assert [t.requested.parent_turn_id for t in turns] == [None, None]
    assert len({t.completed.prompt_sha256 for t in turns}) == 1


@pytest.mark.parametrize("late", [False, True], ids=["while it runs", "after it"])
def test_a_retry_is_the_request_it_repeats(played: Callable[..., InProcess], late: bool) -> None:
    """32: with a retry's mark there is one generation: the retry joins it, or gets the stored reply."""
    p = played()

    async def both() -> list[Any]:
        p.engine.pace = None if late else asyncio.Semaphore(0)
        first = p.exchange(_path("retried"), {"messages": [USER]})
        await first.until(lambda: first.ended if late else p.engine.prompts)
        second = p.exchange(_path("retried"), {"messages": [USER]}, headers=RETRY)
        await asyncio.sleep(0.02)
        if p.engine.pace is not None:
            for _ in range(100):
                p.engine.pace.release()
        return [await first.end(), await second.end()]

    first, second = p.run(both())
    assert first.json == second.json
    assert len(p.engine.prompts) == 1
    (turn,) = p.trajectories()["retried"].turns.values()
    assert turn.delivered == "sent"


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [5]], ids=str)
def test_characters_are_never_cut(played: Any, sizes: list[int]) -> None:
    """37: a character whose bytes are several tokens, sampled apart, streams whole."""
    text = "天気は🌦 é ✓ 👩‍👩‍👧."
    p = played(text)
    p.engine.sizes = lambda: itertools.cycle(sizes)
    exchange = p.ask(_path("utf"), {"messages": [USER], "stream": True})
    deltas = [c["delta"].get("content") or "" for piece in _pieces(exchange.data) for c in piece["choices"]]
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas)
    (turn,) = p.trajectories()["utf"].turns.values()
    assert len(turn.completed.completion_ids) > len(text)  # most characters are several tokens
    assert turn.completed.reply["content"] == text


def test_half_a_character_at_the_end_is_told_as_such(played: Any) -> None:
    """37: a completion cut off within a character says so once, and its ids are kept."""
    p = played()
    whole = p.engine.tokenizer.encode("ok 天").tolist()
    p.engine.answer = lambda *_: Play(whole[:-1], "length")
    exchange = p.ask(_path("half"), {"messages": [USER], "stream": True})
    (turn,) = p.trajectories()["half"].turns.values()
    assert turn.completed.completion_ids.tolist() == whole[:-1]
    assert _text(exchange.data) == turn.completed.reply["content"]
    assert turn.completed.reply["content"].startswith("ok ")


@pytest.mark.parametrize("body", [{}, {"max_tokens": 40_000}, {"max_completion_tokens": 32_768}], ids=str)
def test_what_does_not_fit_is_a_400(played: Callable[..., InProcess], body: dict[str, Any]) -> None:
    """38: a prompt beyond the context, or one that leaves no room, is refused before anything is sampled."""
    p = played()
    messages = [USER if body else _user("x " * 40_000)]
    refused = p.chat("long", *messages, **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert p.engine.prompts == []
    assert "long" not in p.trajectories()


def test_an_item_of_another_trajectory_is_unknown(played: Callable[..., InProcess]) -> None:
    """39: what another trajectory said is not to be had by its id; what this one said is."""
    p = played()
    ids = {}
    for name in ("a", "b"):
        reply = p.ask(f"/t/{name}/v1/responses", {"input": "Hi"}).json
        ids[name] = next(item["id"] for item in reply["output"] if item["type"] == "message")

    def refer(name: str, item_id: str) -> Any:
        items = [
            {"role": "user", "content": "Hi"},
            {"type": "item_reference", "id": item_id},
            {"role": "user", "content": "More"},
        ]
        return p.ask(f"/t/{name}/v1/responses", {"input": items})

    for item_id in (ids["b"], "msg_nothing", None):
        refused = refer("a", item_id)
        assert refused.status in (400, 404)
        assert refused.json["error"]["code"] == "unknown_item"
    assert refer("a", ids["a"]).status == 200
    parent, child = p.trajectories()["a"].turns.values()
    assert child.requested.parent_turn_id == parent.turn_id
    assert len(p.trajectories()["b"].turns) == 1


def test_a_response_of_another_trajectory_is_unknown(played: Callable[..., InProcess]) -> None:
    """39: nor is it by `previous_response_id`."""
    p = played()
    other = p.ask("/t/other/v1/responses", {"input": "Hi"}).json["id"]
    refused = p.ask("/t/mine/v1/responses", {"input": "More", "previous_response_id": other})
    assert refused.status in (400, 404)
    assert "mine" not in p.trajectories()


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], "empty_messages"),
        ([USER, {"role": "assistant", "content": "Sun"}], "nothing_to_answer"),
    ],
    ids=["none", "prefill"],
)
@pytest.mark.parametrize(
    "extra", [{}, {"continue_final_message": True, "add_generation_prompt": False}], ids=str
)
def test_nothing_to_answer_is_a_400(
    played: Callable[..., InProcess], messages: Any, code: str, extra: Any
) -> None:
    """45: no messages, or the assistant's last: refused, also where the client asks to go on from it."""
    p = played()
    refused = p.chat("nothing", *messages, **extra)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    assert p.engine.prompts == []
    assert "nothing" not in p.trajectories()
