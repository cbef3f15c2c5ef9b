"""What engines and clients do to a completion: crashes, swapped weights, stop strings, siblings, images."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from rollbook.ingest.endpoints import chat
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import chain_all
from rollbook.store.errors import EngineError, RequestError, WriteFailedError
from rollbook.store.events import TurnCompleted
from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import samples_of

from .invariants import check_invariants

USER = {"role": "user", "content": "What is the weather in Paris?"}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"city": "Paris"}}\n</tool_call>'


def _user(text: str = "And tomorrow?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _script(*answers: Any) -> Callable[[Any, Any], Any]:
    waiting = deque(answers)
    return lambda messages, tools: waiting.popleft()


# Failures ------------------------------------------------------------------------------------------


def test_a_crash_before_the_commit_leaves_no_turn(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """30: what was sampled and never recorded was never sent: after the crash the request samples anew."""
    d = desk(_script("Sunny.", "lost", "Rain."))
    first = d.take([USER])
    messages = [USER, first.reply, _user()]
    write = Recorder.write

    async def die(self: Recorder, *records: Any, **behind: Any) -> Any:
        if any(isinstance(record, TurnCompleted) for record in records):
            raise WriteFailedError("the machine is gone")
        return await write(self, *records, **behind)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "write", die)
        with pytest.raises(WriteFailedError):
            d.take(messages)
    d.restart()
    lost = list(d.trajectory().turns.values())[-1]
    assert lost.completed is None
    assert lost.requested.parent_turn_id == first.turn_id
    again = d.take(messages)
    assert d.link(again) == first.turn_id
    (sample,) = check_invariants(d)
    assert sample.turn_ids == (first.turn_id, again.turn_id)
    assert "lost" not in d.tokenizer.decode(sample.tokens)


def test_a_failed_engine_leaves_no_turn(desk: Any) -> None:
    """30: an engine that fails leaves a failed turn, which is no parent and in no sample."""
    d = desk(_script("Sunny.", EngineError("out of memory"), "Rain."))
    first = d.take([USER])
    with pytest.raises(EngineError):
        d.take([USER, first.reply, _user()])
    second = d.take([USER, first.reply, _user()])
    assert d.link(second) == first.turn_id
    assert [t.failed is not None for t in d.trajectory().turns.values()] == [False, True, False]
    assert len(check_invariants(d)) == 1


def test_no_ids_at_all_are_a_turn_of_none(desk: Any) -> None:
    """30: an engine stopped before its first token: the turn is recorded, trained and extended by nobody."""
    d = desk(_script("Sunny.", ("", "abort", None), "Rain."))
    first = d.take([USER])
    messages = [USER, first.reply, _user()]
    none = d.take(messages)
    assert (none.reply["content"], len(none.completed.completion_ids)) == ("", 0)
    third = d.take([*messages, none.reply, _user("Well?")])
    assert d.link(third) == "root:parent_without_end_of_turn"
    d.restart()  # which reads it back
    left, right = samples_of(d.trajectory())
    assert (left.turn_ids, right.turn_ids) == ((first.turn_id, none.turn_id), (third.turn_id,))
    assert int(left.loss_mask.sum()) == len(first.completed.completion_ids)


# Weights -------------------------------------------------------------------------------------------


def test_weights_that_change_in_mid_completion_are_two_spans(desk: Any) -> None:
    """33: each token has the version that sampled it, and the next prompt holds the ids of both."""
    d = desk(_script("Sunny and warm, all day long.", "Rain."))
    d.engine.swaps = 3
    first = d.take([USER])
    d.engine.swaps = None
    second = d.take([USER, first.reply, _user()])
    spans = d.turn(first).completed.version_spans
    length = len(first.completed.completion_ids)
    assert [(s.version, s.start, s.end) for s in spans] == [(3, 0, 3), (4, 3, length)]
    assert first.completed.policy_version == 4
    (sample,) = check_invariants(d)
    start, end = first.completed.prompt_length, second.completed.prompt_length
    assert sample.versions[start : start + length].tolist() == [3] * 3 + [4] * (length - 3)
    assert (sample.versions[start + length : end] == -1).all()
    assert sample.oldest_version == 3


# Ends ----------------------------------------------------------------------------------------------


def test_a_stop_string_inside_a_token_trims_the_text_alone(desk: Any) -> None:
    """34: the token that completed the stop string is kept whole; the client's text ends in front of it."""
    d = desk(_script(("the weather in Paris today", "stop", None), "Rain."))
    d.engine.ids_of = lambda text: d.tokenizer.encode(text).tolist()
    texts = [d.tokenizer.decode([i]) for i in d.engine.ids_of("the weather in Paris today")]
    cut = next(t for t in texts[1:] if len(t) > 3)  # a token of several letters
    stop = cut[1:3]
    first = d.take([USER], stop=[stop])
    before = "the weather in Paris today".split(stop)[0]
    assert first.reply["content"] == before
    assert before.endswith(cut[0])  # half of the token is text, half is not
    assert first.completed.finish_reason == "stop"
    assert first.completed.flags == ["stop_string"]
    ids = d.turn(first).completed.completion_ids
    assert d.tokenizer.decode(ids) == "the weather in Paris today"
    assert d.link(d.take([USER, first.reply, _user()])) == "root:parent_without_end_of_turn"
    left, _ = check_invariants(d)
    assert left.tokens[left.loss_mask].tolist() == ids.tolist()


def test_an_immediate_stop_is_a_turn_of_one_token(desk: Any) -> None:
    """40: a completion that is its end-of-turn token alone is trained, and extended."""
    d = desk(_script("", "Rain."))
    first = d.take([USER])
    assert first.reply == {"role": "assistant", "content": ""}
    assert first.completed.completion_ids.tolist() == [d.tokenizer.stop_ids[0]]
    second = d.take([USER, {"role": "assistant", "content": None}, _user()])
    assert d.link(second) == first.turn_id
    (sample,) = check_invariants(d)
    assert d.tokenizer.decode(sample.tokens[sample.loss_mask], special=True) == "<|im_end|>Rain.<|im_end|>"


# Reasoning -----------------------------------------------------------------------------------------

THOUGHTS = {
    "spaces within": ("<think>\n\n hm \n</think>\n\nSunny.", "hm", "Sunny."),
    "spaces around": (" \n<think>hm</think>  Sunny. ", "hm", "  Sunny. "),
    "nothing within": ("<think>\n\n</think>\n\nSunny.", "", "Sunny."),
    "nothing behind": ("<think>hm</think>", "hm", ""),
    "unclosed": ("<think>hm, it is", "hm, it is", ""),
    "closed twice": ("<think>a</think>b</think>c", "a", "b</think>c"),
    "never opened": ("Sunny.</think>", None, "Sunny.</think>"),
    "opened later": ("Sunny. <think>hm</think>", None, "Sunny. <think>hm</think>"),
}


@pytest.mark.parametrize("case", THOUGHTS)
@pytest.mark.parametrize("shown", [True, False], ids=["shown", "dropped"])
def test_thoughts_of_every_shape_extend(desk: Any, case: str, shown: bool) -> None:
    """41: white space around </think>, empty, unclosed and stray marks: read one way, kept as sampled."""
    text, reasoning, content = THOUGHTS[case]
    d = desk(_script(text, "Rain."))
    first = d.take([USER])
    assert (first.reply.get("reasoning_content"), first.reply["content"]) == (reasoning, content)
    echoed = first.reply if shown else {"role": "assistant", "content": content}
    assert d.link(d.take([USER, echoed, _user()])) == first.turn_id
    (sample,) = check_invariants(d)
    assert text + "<|im_end|>\n" in d.tokenizer.decode(sample.tokens, special=True)


# Siblings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", range(4))
def test_four_choices_are_four_siblings(desk: Any, tools: list[dict[str, Any]], chosen: int) -> None:
    """35: n=4: one prompt, four turns of their own; the conversation goes on from the one that is echoed."""
    d = desk(_script("Hi.", *[CALL] * 4, "Rain."))
    first = d.take([USER], tools=tools)
    messages = [USER, first.reply, _user()]
    [siblings] = d.take_all({"messages": messages, "tools": tools, "n": 4, "seed": 11})
    assert len({t.turn_id for t in siblings}) == 4
    requests = [d.turn(t).requested for t in siblings]
    assert {a.parent_turn_id for a in requests} == {first.turn_id}
    assert len({a.request_id for a in requests}) == 1
    assert [a.sampling["seed"] for a in requests] == [11, 12, 13, 14]
    assert len({t.completed.prompt_sha256 for t in siblings}) == 1
    assert len({t.completed.completion_ids.tobytes() for t in siblings}) == 4
    assert all(d.trajectory().messages(d.turn(t)) == messages for t in siblings)
    d.restart()
    picked = siblings[chosen]
    call_id = picked.reply["tool_calls"][0]["id"]
    messages += [picked.reply, {"role": "tool", "tool_call_id": call_id, "content": "3"}]
    assert d.link(d.take(messages, tools=tools)) == picked.turn_id
    samples = check_invariants(d)
    assert len(samples) == 4
    assert samples[0].turn_ids[0] == first.turn_id
    assert sum(int(s.loss_mask.sum()) for s in samples) == sum(
        len(sampled.generation.completion_ids) for sampled in d.engine.seen.values()
    )


def test_call_ids_that_collide_keep_trajectories_apart(desk: Any, tools: list[dict[str, Any]]) -> None:
    """36: two agents that name their calls alike, in the very same words, go on from their own turns."""
    d = desk(_script(CALL, CALL, "Rain.", "Snow."))
    firsts = {name: d.take([USER], name, tools=tools) for name in ("a", "b")}
    for name, first in firsts.items():
        [call] = first.reply["tool_calls"]
        echoed = first.reply | {"tool_calls": [call | {"id": "call_0"}]}
        result = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
        second = d.take([USER, echoed, result], name, tools=tools)
        assert d.link(second, name) == first.turn_id
        (sample,) = check_invariants(d, name)
        assert sample.turn_ids == (first.turn_id, second.turn_id)


def test_a_call_id_of_another_trajectory_decides_nothing(desk: Any, tools: list[dict[str, Any]]) -> None:
    """36: an id minted elsewhere tells no twins apart here: the latest is taken, and flagged."""
    d = desk(_script(CALL, CALL, CALL, "Rain."))
    elsewhere = d.take([USER], "other", tools=tools)
    d.take([USER], tools=tools)
    late = d.take([USER], tools=tools)
    last = d.take([USER, elsewhere.reply, {"role": "tool", "content": "3"}], tools=tools)
    assert d.link(last) == late.turn_id
    assert "ambiguous_parent" in last.completed.flags
    check_invariants(d)


# The log -------------------------------------------------------------------------------------------


def test_folding_the_log_twice_gives_the_same_samples(desk: Any, tools: list[dict[str, Any]]) -> None:
    """43: a fold is a function of the events: again, after a restart, and with other traffic in between."""
    d = desk(_script(CALL, "other", "Rain.", "Snow."))
    first = d.take([USER], tools=tools)
    d.take([USER], "other")
    messages = [USER, first.reply, {"role": "tool", "content": "3"}]
    d.take(messages, tools=tools)
    d.take(messages, tools=tools)

    def digests() -> list[list[str]]:
        return [[s.digest() for s in samples_of(t)] for t in fold(d.store.events()).values()]

    d.runner.run(d.recorder.settle())
    before = digests()
    assert before == digests()
    assert [len(samples) for samples in before] == [2, 1]
    d.restart()
    assert before == digests()
    assert sorted(before) == sorted([s.digest() for s in samples_of(t)] for t in d.trajectories())
    check_invariants(d)


# Images --------------------------------------------------------------------------------------------


def _image(letter: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{letter * 8}"}}


def test_images_go_on_as_text_does(desk: Any, real_chat: Callable[..., ChatTokenizer]) -> None:
    """44: an image takes its place in the prompt and goes to the engine with every turn that shows it."""
    d = desk(_script("A cat.", "A dog.", "No."), real_chat("qwen2_5_vl"))
    d.engine.takes_images = True
    shown = {"role": "user", "content": [_image("A"), {"type": "text", "text": "What is it?"}]}
    more = {"role": "user", "content": [{"type": "text", "text": "And this?"}, _image("B")]}
    first = d.take([shown])
    second = d.take([shown, first.reply, more])
    assert d.link(second) == first.turn_id
    urls = [part["image_url"]["url"] for part in (_image("A"), _image("B"))]
    assert [d.engine.seen[t.turn_id].images for t in (first, second)] == [(urls[0],), tuple(urls)]
    (sample,) = check_invariants(d)
    pad = d.tokenizer.tokenizer.token_to_id("<|image_pad|>")
    assert int((sample.tokens == pad).sum()) == 2
    other = {"role": "user", "content": [_image("C"), shown["content"][1]]}
    assert d.link(d.take([other, first.reply, more])) == "root:no_matching_turn"


def test_images_are_refused_where_the_engine_takes_none(desk: Any) -> None:
    """44: an engine without eyes would answer about nothing: 400, and nothing is recorded."""
    d = desk(_script("A cat."))
    with pytest.raises(RequestError, match="takes none"):
        d.take([{"role": "user", "content": [_image("A")]}])
    assert list(d.store.events()) == []


def test_ids_come_back_as_they_were_sent(desk: Any) -> None:
    """11: the parent's ids in the next prompt are the array that was sampled, not an encoding of its text."""
    d = desk(_script("Sunny and warm.", "Rain."))
    first = d.take([USER])
    d.restart()
    second = d.take([USER, first.reply, _user()])
    sampled = d.engine.seen[first.turn_id].generation.completion_ids
    start = first.completed.prompt_length
    assert np.array_equal(d.engine.seen[second.turn_id].prompt[start : start + len(sampled)], sampled)
    assert sampled.tolist() != d.tokenizer.encode(d.tokenizer.decode(sampled, special=True)).tolist()


def test_a_quarantined_conversation_goes_on_after_a_restart(desk: Any) -> None:
    """What names no trajectory is told apart by what it goes on from, whoever recorded the beginning."""
    d = desk(lambda messages, tools: "yes")
    history = [{"role": "user", "content": "who am I?"}]

    async def take(messages: list[Any]) -> tuple[str, str]:
        live = d.recorder.unnamed(chain_all(messages))
        raw = orjson.dumps({"messages": messages})
        call = chat.API.read(orjson.loads(raw), lambda turn_id: None)
        [turn] = await d.turn_runner.begin(live, call, Arrival.of(call.endpoint, raw, 0)).done
        return live.opened.name, turn.turn_id

    name, first = d.runner.run(take(history))
    d.restart()
    more = [*history, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}]
    again, second = d.runner.run(take(more))
    assert again == name
    other, _ = d.runner.run(take(history))
    assert other != name
    [trajectory] = [t for t in d.trajectories() if t.opened.name == name]
    assert trajectory.turns[second].requested.parent_turn_id == first
    assert trajectory.opened.split == "quarantine"
