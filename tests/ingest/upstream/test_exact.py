"""Turns are exact where the upstream tells the ids of prompt and completion, and text only where it does not.

Nothing is ever tokenized, and no logprob is made up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.processes.warm import run_warm
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, sse, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook import store
from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import all_samples

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
PROMPT, IDS, LOGPROBS = [5, 6, 7], [101, 102, 103], [-0.5, -0.25, -1.5]


def _content(logprobs: list[float]) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs]}


def _choice(ids: Any = IDS, logprobs: Any = LOGPROBS, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hi you"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids}
    return choice | {"logprobs": None if logprobs is None else _content(logprobs)} | more


def _vllm(**more: Any) -> dict[str, Any]:
    return chat_reply(choices=[_choice()], prompt_token_ids=PROMPT, prompt_logprobs=None) | more


def _sglang(name: str = "12") -> dict[str, Any]:
    choice = _choice(None, matched_stop=103, response_token_ids=IDS, prompt_token_ids=PROMPT)
    return chat_reply(choices=[choice], metadata={"weight_version": name})


def _vllm_stream() -> bytes:
    events: list[dict[str, Any]] = [
        {"prompt_token_ids": PROMPT, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    ]
    for i, text in enumerate(("Hi", " you", "")):
        choice = {"index": 0, "delta": {"content": text}, "token_ids": [IDS[i]]}
        events.append({"choices": [choice | {"logprobs": _content([LOGPROBS[i]])}]})
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": None}]})
    head = {"id": "chatcmpl-up1", "object": "chat.completion.chunk", "created": 1700000000, "model": "big"}
    usage = head | {"choices": [], "usage": chat_reply()["usage"]}
    return sse(*(head | event for event in events), usage)


def _completions() -> dict[str, Any]:
    logprobs = {
        "tokens": ["a", "b", "c"],
        "token_logprobs": LOGPROBS,
        "top_logprobs": None,
        "text_offset": [],
    }
    choice = {"index": 0, "text": "Hi you", "finish_reason": "stop", "logprobs": logprobs}
    choice |= {"token_ids": IDS, "prompt_token_ids": PROMPT}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def _samples(passed: Any) -> list[Any]:
    return [s for s in all_samples(passed.trajectories().values()) if s.loss_mask.any()]


@pytest.mark.parametrize(
    ("path", "answer", "version"),
    [
        (CHAT, whole(_vllm()), None),
        (CHAT, streamed(_vllm_stream(), range(9, 900, 37)), None),
        (CHAT, whole(_sglang()), 12),
        (CHAT, whole(_sglang("run/actor/12/0123456789ab")), 12),
        ("/v1/completions", whole(_completions()), None),
    ],
    ids=["vllm", "vllm stream", "sglang", "sglang after a sync", "completions"],
)
def test_told_ids_are_an_exact_turn(
    passed: Passed, upstream: HttpUpstream, path: str, answer: Any, version: int | None
) -> None:
    """Ids, logprobs and version are recorded as they were told, and can be trained."""
    upstream.answers.append(answer)
    passed.post(path, {"prompt": "x"} if path != CHAT else {"messages": [USER]})
    turn = passed.turn()
    done = turn.completed
    assert done.flags == []
    assert done.prompt_ids.tolist() == PROMPT
    assert done.completion_ids.tolist() == IDS
    assert done.logprobs.tolist() == LOGPROBS
    assert (done.policy, done.policy_version) == (None if version is None else "actor", version)
    assert [(s.version, s.start, s.end) for s in done.version_spans] == (
        [] if version is None else [(12, 0, 3)]
    )
    assert done.prompt_length == 3
    assert done.reply["content"] == "Hi you"
    assert "token_ids" not in str(done.upstream)
    passed.finish(reward=1.0)
    [sample] = _samples(passed)
    assert sample.tokens.tolist() == PROMPT + IDS
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert sample.logprobs.tolist() == [0, 0, 0, *LOGPROBS]
    assert sample.reward == 1.0


def test_whole_and_streamed_are_one_record(passed: Passed, upstream: HttpUpstream) -> None:
    """What a stream tells in pieces is what a whole reply tells at once."""
    upstream.answers += [whole(_vllm(created=1700000000)), streamed(_vllm_stream())]
    passed.chat(USER)
    passed.chat(USER, stream=True)
    first, second = passed.turns(count=2)
    for name in ("reply", "upstream", "finish_reason", "logprob_semantics", "prompt_sha256", "flags"):
        assert getattr(first.completed, name) == getattr(second.completed, name)
    assert np.array_equal(first.completed.logprobs, second.completed.logprobs)


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        (chat_reply(choices=[_choice()]), {"token_ids": IDS, "logprobs": LOGPROBS}),
        (chat_reply(choices=[_choice(None)], prompt_token_ids=PROMPT), {"prompt_token_ids": PROMPT}),
        (chat_reply(choices=[_choice([])], prompt_token_ids=PROMPT), {"prompt_token_ids": PROMPT}),
        (chat_reply(choices=[_choice(["1", 2])], prompt_token_ids=PROMPT), {"prompt_token_ids": PROMPT}),
        (chat_reply(choices=[_choice([2**31])], prompt_token_ids=PROMPT), {"prompt_token_ids": PROMPT}),
        (chat_reply(choices=[_choice([1.0, 2.0])], prompt_token_ids=PROMPT), {"prompt_token_ids": PROMPT}),
        (
            chat_reply(choices=[_choice()], prompt_token_ids=[-1]),
            {"token_ids": IDS, "logprobs": LOGPROBS, "prompt_token_ids": [-1]},
        ),
        (chat_reply(choices=[_choice(None)]), {}),
    ],
)
def test_half_of_the_ids_is_text_only(
    passed: Passed, upstream: HttpUpstream, reply: Any, kept: dict[str, Any]
) -> None:
    """Ids without their context, or that are none, are kept aside and never trained."""
    upstream.answers.append(whole(reply))
    passed.chat(USER)
    done = passed.turn().completed
    assert done.flags == ["text_only"]
    assert (len(done.prompt_ids), len(done.completion_ids), done.logprobs) == (0, 0, None)
    names = ("prompt_token_ids", "token_ids", "logprobs")
    assert {k: v for k, v in done.upstream.items() if k in names} == kept
    passed.finish(reward=1.0)
    assert _samples(passed) == []


@pytest.mark.parametrize("logprobs", [None, LOGPROBS[:2], [-0.5, None, -0.5], [-0.5, float("nan"), 0.0, 1.0]])
def test_logprobs_that_do_not_fit_are_none(passed: Passed, upstream: HttpUpstream, logprobs: Any) -> None:
    """Without a number for every id there are none: no 0.0 and no NaN takes a missing one's place."""
    upstream.answers.append(whole(_vllm(choices=[_choice(IDS, logprobs)])))
    passed.chat(USER)
    done = passed.turn().completed
    assert (done.flags, done.completion_ids.tolist(), done.logprobs) == ([], IDS, None)
    assert done.logprob_semantics == {"kind": "none"}
    assert ("choice" in done.upstream) == (logprobs is not None)
    passed.finish(reward=1.0)
    [sample] = _samples(passed)
    assert np.isnan(sample.logprobs[3:]).all()


def test_what_else_a_token_could_have_been_is_kept(passed: Passed, upstream: HttpUpstream) -> None:
    """top_logprobs have no column; they stay beside the reply."""
    logprobs = _content(LOGPROBS)
    logprobs["content"][1]["top_logprobs"] = [{"token": "u", "logprob": -3.0}]
    upstream.answers.append(whole(_vllm(choices=[_choice(logprobs=None) | {"logprobs": logprobs}])))
    passed.chat(USER)
    done = passed.turn().completed
    assert done.logprobs.tolist() == LOGPROBS
    assert done.upstream["choice"]["logprobs"] == logprobs


def test_exact_and_text_only_turns_in_one_conversation(passed: Passed, upstream: HttpUpstream) -> None:
    """Whatever hangs on what, every exact turn is trained once, with the prompt that was told."""
    prompts = {1: [1, 2], 3: [1, 2, 101, 102, 103, 3, 4, 5], 4: [1, 2, 101, 102, 103, 3, 4, 5, 9]}
    messages: list[Any] = [USER]
    for number in range(5):
        choice = _choice(message={"role": "assistant", "content": f"a{number}"})
        exact = number in prompts
        ids = {"prompt_token_ids": prompts[number]} if exact else {}
        upstream.answers.append(
            whole(chat_reply(choices=[choice if exact else choice | {"token_ids": None}]) | ids)
        )
        passed.chat(*messages)
        messages = [*messages, {"role": "assistant", "content": f"a{number}"}, USER]
    passed.finish(reward=1.0)
    turns = passed.turns(count=5)
    assert [t.completed.flags for t in turns] == [["text_only"], [], ["text_only"], [], []]
    assert turns[1].requested.parent_turn_id == turns[0].turn_id
    assert [t.requested.root_reason for t in turns] == [
        "first_turn",
        None,
        "upstream_renders",
        None,
        "upstream_renders",
    ]
    samples = _samples(passed)
    assert sorted(s.tokens.tolist() for s in samples) == sorted(p + IDS for p in prompts.values())
    assert sum(int(s.loss_mask.sum()) for s in samples) == 9
    passed.recorder.store.trajectory(turns[0].requested.trajectory_id)


def test_what_was_asked_for_besides_is_asked(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """--engine-ask puts fields into chats and completions; an agent's own word counts more."""
    passed = passing(ask={"return_token_ids": True, "logprobs": True})
    passed.chat(USER, logprobs=False)
    passed.post("/v1/messages", {"max_tokens": 4, "messages": [USER]}, name="u")
    chat, messages = (request.json for request in upstream.asked)
    assert chat == {"model": "m", "messages": [USER], "return_token_ids": True, "logprobs": False}
    assert messages == {"max_tokens": 4, "messages": [USER]}
    assert passed.turn().requested.request == {"model": "m", "logprobs": False}


def test_the_commands_take_such_turns(passed: Passed, upstream: HttpUpstream, tmp_path: Path) -> None:
    """sql, samples, show and export work where arrays are empty; only the exact turn can be trained."""
    upstream.answers += [whole(chat_reply()), whole(_vllm())]
    passed.chat(USER)
    passed.chat(USER, name="u")
    for name in ("t", "u"):
        passed.turn(name)
        assert passed.finish(name, reward=1.0).status_code == 200
    rows = passed.sql("select trajectory, completion_length, flags, content from turns order by trajectory")
    assert rows == [("t", 0, '["text_only"]', "Hi"), ("u", 3, "[]", "Hi you")]
    assert passed.sql("select count(*), count(logprob) from tokens") == [(3, 3)]
    passed.close()

    def rollbook(*arguments: str) -> str:
        command = [sys.executable, "-m", "rollbook", *arguments, "--store", str(passed.path)]
        ran = run_warm(command, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert "text_only" in rollbook("sql", "select flags from turns", "--format", "csv")
    assert "Hi" in rollbook("show", "t")
    lines = json.loads(rollbook("samples", "--json"))
    assert [(s["trajectory"], sum(s["loss_mask"])) for s in lines if any(s["loss_mask"])] == [("u", 3)]
    rollbook("export", "--to", str(tmp_path / "out"), "--format", "jsonl")
    [file] = [p for p in [tmp_path / "out", *(tmp_path / "out").rglob("*.jsonl")] if p.is_file()]
    paths = {p["trajectory"]: p for p in map(json.loads, file.read_text().splitlines())}
    assert paths["t"]["messages"] == [USER, {"role": "assistant", "content": "Hi"}]
    assert paths["t"]["tokens"]["input_ids"] == []
    assert paths["u"]["tokens"]["input_ids"] == PROMPT + IDS
    assert len(fold(store.open(passed.path).events())) == 2
