"""Completions of several prompts: each choice answers its own, and its ids are exact only if they can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.upstreams.server import HttpUpstream, sse, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook.ingest.endpoints import completions
from rollbook.ingest.upstream.recorder import prompt_ids
from rollbook.ingest.upstream.routes import gathered, read_reply
from rollbook.train.select.samples import all_samples

PATH = "/v1/completions"
FORM = completions.API.upstream
PROMPTS = ["one", "two"]
IDS = {0: [1, 2], 1: [3, 4, 5]}
"""Of the prompts."""


def _choice(index: int | None, prompt: Any, **more: Any) -> dict[str, Any]:
    place = 0 if index is None else index
    choice = {"text": f"c{place}", "finish_reason": "stop", "token_ids": [100 + place, 9]}
    choice |= {"logprobs": {"token_logprobs": [-0.5 - place, -0.25]}}
    return choice | ({} if index is None else {"index": index}) | {"prompt_token_ids": prompt} | more


def _reply(*choices: Any, **more: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "choices": list(choices)} | more


def _ask(passed: Any, upstream: Any, answer: Any, **body: Any) -> list[Any]:
    upstream.answers.append(answer)
    reply = passed.post(PATH, {"prompt": PROMPTS} | body)
    assert reply.status_code == 200
    turns = passed.turns(count=len(reply.headers["x-rollbook-turn-id"].split(",")))
    return sorted(turns, key=lambda t: t.requested.wire.get("choice", 0))


def _content(passed: Any, turn: Any) -> Any:
    [message] = passed.trajectories()["t"].messages(turn)
    return message["content"]


def test_each_choice_has_its_own_prompt(passed: Passed, upstream: HttpUpstream) -> None:
    """Ids, text and sample of choice i are of prompt i // n, in whatever order the choices come."""
    choices = [_choice(i, IDS[i // 2]) for i in (2, 0, 3, 1)]
    turns = _ask(passed, upstream, whole(_reply(*choices)), n=2)
    assert len(turns) == 4
    for index, turn in enumerate(turns):
        assert turn.completed.flags == []
        assert turn.completed.prompt_ids.tolist() == IDS[index // 2]
        assert turn.completed.completion_ids.tolist() == [100 + index, 9]
        assert turn.completed.logprobs.tolist() == [-0.5 - index, -0.25]
        assert _content(passed, turn) == PROMPTS[index // 2]
        assert turn.requested.wire["prompt"] == index // 2
    assert len({turn.requested.request_id for turn in turns}) == 1
    passed.finish(reward=1.0)
    samples = [s for s in all_samples(passed.trajectories().values()) if s.loss_mask.any()]
    assert sorted(s.tokens.tolist() for s in samples) == [[*IDS[i // 2], 100 + i, 9] for i in range(4)]


def test_a_stream_of_several_prompts_is_the_same(passed: Passed, upstream: HttpUpstream) -> None:
    """Chunks of several choices among each other; what an event says of a prompt is of its choices."""
    events = [
        {"choices": [{"index": 1, "text": "c", "token_ids": [101], "prompt_token_ids": IDS[1]}]},
        {"prompt_token_ids": IDS[0], "choices": [{"index": 0, "text": "c", "token_ids": [100]}]},
        {"choices": [{"index": 1, "text": "1", "token_ids": [9], "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "text": "0", "token_ids": [9], "finish_reason": "stop"}]},
    ]
    head = {"id": "cmpl-1", "object": "text_completion"}
    turns = _ask(passed, upstream, streamed(sse(*(head | e for e in events))), stream=True)
    assert [t.completed.prompt_ids.tolist() for t in turns] == [IDS[0], IDS[1]]
    assert [t.completed.completion_ids.tolist() for t in turns] == [[100, 9], [101, 9]]
    assert [t.completed.reply["content"] for t in turns] == ["c0", "c1"]
    assert [_content(passed, t) for t in turns] == PROMPTS


UNTRUE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one list for all": (_reply(_choice(0, None), _choice(1, None), prompt_token_ids=IDS[0]), {}),
    "the same beside each": (_reply(_choice(0, IDS[0]), _choice(1, IDS[0])), {}),
    "siblings disagree": (_reply(*(_choice(i, [i + 1]) for i in range(4))), {"n": 2}),
    "equal prompts, other ids": (
        _reply(_choice(0, IDS[0]), _choice(1, IDS[1])),
        {"prompt": ["same", "same"]},
    ),
    "not the ids that were sent": (
        _reply(_choice(0, IDS[1]), _choice(1, IDS[0])),
        {"prompt": [IDS[0], IDS[1]]},
    ),
    "one index for all": (_reply(_choice(0, IDS[0]), _choice(0, IDS[1])), {}),
    "no index": (_reply(_choice(None, IDS[0]), _choice(None, IDS[1])), {}),
    "echo": (_reply(_choice(0, IDS[0]), _choice(1, IDS[1])), {"echo": True}),
    "n is no number": (_reply(_choice(0, IDS[0]), _choice(1, IDS[1])), {"n": "1"}),
}


@pytest.mark.parametrize("case", UNTRUE)
def test_what_cannot_be_true_is_text_only(passed: Passed, upstream: HttpUpstream, case: str) -> None:
    """No turn is exact, and every choice is there with its own text."""
    reply, body = UNTRUE[case]
    turns = _ask(passed, upstream, whole(reply), **body)
    assert len(turns) == len(reply["choices"])
    assert sorted(t.completed.reply["content"] for t in turns) == sorted(c["text"] for c in reply["choices"])
    for turn in turns:
        assert "text_only" in turn.completed.flags
        assert len(turn.completed.prompt_ids) == len(turn.completed.completion_ids) == 0
    passed.finish(reward=1.0)
    assert not any(s.loss_mask.any() for s in all_samples(passed.trajectories().values()))


def test_one_prompts_doubt_is_not_anothers(passed: Passed, upstream: HttpUpstream) -> None:
    """Where the choices of the first prompt disagree, those of the second are exact still."""
    choices = [_choice(0, [1]), _choice(1, [2]), _choice(2, IDS[1]), _choice(3, None)]
    turns = _ask(passed, upstream, whole(_reply(*choices)), n=2)
    exact = [turn.completed.flags == [] for turn in turns]
    assert exact == [False, False, True, True]
    assert turns[3].completed.prompt_ids.tolist() == IDS[1]


def test_a_choice_that_nobody_asked_for_answers_no_prompt(passed: Passed, upstream: HttpUpstream) -> None:
    """It is recorded, as text of nobody knows what."""
    upstream.answers.append(whole(_reply(*(_choice(i, IDS[i % 2]) for i in range(3)))))
    passed.post(PATH, {"prompt": PROMPTS})
    turns = sorted(passed.turns(count=3), key=lambda t: t.requested.wire.get("choice", 0))
    assert [t.completed.flags for t in turns] == [[], [], ["text_only"]]
    assert "prompt" not in turns[2].requested.wire
    assert passed.trajectories()["t"].messages(turns[2]) == []


def test_each_prompt_goes_on_over_a_restart(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """The log alone says which prompt a turn answers; what several choices share is stored once."""
    passed = passing()
    _ask(passed, upstream, whole(_reply(*(_choice(i, IDS[i // 2]) for i in range(4)))), n=2)
    again = passing()
    turns = sorted(again.turns(count=4), key=lambda t: t.requested.wire.get("choice", 0))
    assert [_content(again, turn) for turn in turns] == ["one", "one", "two", "two"]
    assert [len(turn.requested.messages) for turn in turns] == [1, 0, 1, 0]


def _prompts(body: dict[str, Any], reply: Any) -> dict[int, list[int]]:
    return prompt_ids(FORM.prompts(FORM.read(body, None)), reply)


@pytest.mark.parametrize("prompt", ["x", ["x"], [7, 8], [[7, 8]]])
def test_one_prompt_may_be_told_in_any_place(prompt: Any) -> None:
    """For the whole reply, beside each choice, or beside the first alone: it is the same prompt."""
    ids = [7, 8]
    for reply in (
        _reply(_choice(0, None), _choice(1, None), prompt_token_ids=ids),
        _reply(_choice(0, ids), _choice(1, ids)),
        _reply(_choice(0, ids), _choice(1, None)),
    ):
        assert _prompts({"prompt": prompt, "n": 2}, read_reply(FORM, reply)) == {0: ids, 1: ids}
    disagreeing = _reply(_choice(0, ids), _choice(1, None), prompt_token_ids=[9])
    assert _prompts({"prompt": prompt, "n": 2}, read_reply(FORM, disagreeing)) == {}


def test_a_stream_that_takes_back_its_ids_is_not_believed() -> None:
    """Two lists for one choice are none."""
    events = [
        {"choices": [{"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [5]}]},
        {"choices": [{"index": 0, "text": "b", "token_ids": [2], "prompt_token_ids": [6]}]},
    ]
    assert _prompts({"prompt": "x"}, read_reply(FORM, gathered(FORM, events) or {})) == {}


def test_a_prompt_sent_as_ids_may_be_told_with_one_in_front() -> None:
    """An upstream puts its first token before them, or cuts a long prompt at its beginning."""
    for ids in ([0, 7, 8], [8], [7, 8]):
        reply = read_reply(FORM, _reply(_choice(0, ids), _choice(1, IDS[0])))
        assert _prompts({"prompt": [[7, 8], IDS[0]]}, reply) == {0: ids, 1: IDS[0]}
