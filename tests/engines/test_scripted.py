"""The scripted engine: its scripts, its errors, and how they reach the client and the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.settings import proxy_parts

from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.engines.scripted import ScriptedEngine, load_script
from rollbook.ingest.replies.json_calls import HERMES
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.serve.engines import make_engine
from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template
from rollbook.ingest.tokens.message_form import conversation_digest
from rollbook.store.errors import ConfigError, EngineError
from rollbook.store.events import TurnFailed, token_ids
from rollbook.store.fold.trajectory import fold

Chat = Callable[..., ChatTokenizer]

USER = {"role": "user", "content": "Hello"}


def _generate(tokenizer: ChatTokenizer, script: Any, messages: Any = (USER,)) -> Generation:
    prompt = Prompt(token_ids([]), list(messages), None)
    return asyncio.run(
        ScriptedEngine(ReplyWriter(tokenizer, HERMES), script).generate(prompt, Sampling(8, 1.0, 0))
    )


def test_text_becomes_the_ids_that_would_be_sampled(chat: Chat) -> None:
    """A text answer is tokenized with its end-of-turn token and without what the template adds."""
    generation = _generate(chat(), lambda messages, tools: "  Hi\n")
    assert chat().decode(generation.completion_ids, special=True) == "  Hi\n<|im_end|>"
    assert generation.finish_reason == "stop"
    assert generation.logprobs is None
    assert generation.version_spans == ()
    assert generation.logprob_semantics == {"kind": "none", "why": "scripted"}


def test_calls_become_the_templates_text(chat: Chat) -> None:
    """A message with calls is written as this template writes calls."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    generation = _generate(chat(), lambda m, t: {"role": "assistant", "content": "ok", "tool_calls": [call]})
    assert chat().decode(generation.completion_ids, special=True) == (
        'ok\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )


def test_an_async_script_is_awaited(chat: Chat) -> None:
    """A coroutine function serves as well."""

    async def script(messages: Any, tools: Any) -> str:
        await asyncio.sleep(0)
        return f"{len(messages)} messages"

    generation = _generate(chat(), script, [USER, USER])
    assert chat().decode(generation.completion_ids) == "2 messages"


async def _spoken(messages: Any, tools: Any) -> AsyncIterator[str]:
    """A completion in pieces: what the model was asked, cut where its tokenizer would not cut."""
    for piece in ("<tool_call>", "tod", "ay", " the weather"):
        await asyncio.sleep(0)
        yield piece


def test_pieces_are_tokenized_alone_and_told_as_they_come(chat: Chat) -> None:
    """An async generator gives the completion itself: its ids are those of its pieces, and then the stop."""
    heard: list[list[int]] = []
    prompt = Prompt(token_ids([]), [USER], None)
    engine = ScriptedEngine(ReplyWriter(chat(), HERMES), _spoken)
    generation = asyncio.run(
        engine.generate(prompt, Sampling(8, 1.0, 0), lambda ids, _: heard.append([*ids]))
    )
    pieces = [chat().encode(p).tolist() for p in ("<tool_call>", "tod", "ay", " the weather")]
    assert heard == [*pieces, [chat().stop_ids[0]]]
    assert generation.completion_ids.tolist() == [i for piece in heard for i in piece]
    assert (
        generation.completion_ids.tolist() != chat().encode("<tool_call>today the weather<|im_end|>").tolist()
    )
    assert generation.finish_reason == "stop"
    assert generation.logprobs is None


def test_pieces_can_be_aborted(chat: Chat) -> None:
    """What had come by then is the completion, without a stop; another request's abort changes nothing."""
    engine = ScriptedEngine(ReplyWriter(chat(), HERMES), _spoken)

    async def both() -> list[Generation]:
        def heard(ids: Any, logprobs: Any) -> None:
            if len(so_far := [*told_ids, *ids]) >= 3:
                ending.append(asyncio.ensure_future(engine.abort("one")))
            told_ids[:] = so_far

        told_ids: list[int] = []
        ending: list[asyncio.Future[None]] = []
        first = Prompt(token_ids([]), [USER], None, "one")
        other = Prompt(token_ids([]), [USER], None, "other")
        sampling = Sampling(8, 1.0, 0)
        return await asyncio.gather(engine.generate(first, sampling, heard), engine.generate(other, sampling))

    aborted, whole = asyncio.run(both())
    assert aborted.finish_reason == "abort"
    assert 3 <= len(aborted.completion_ids) < len(whole.completion_ids) - 1
    assert aborted.completion_ids.tolist() == whole.completion_ids.tolist()[: len(aborted.completion_ids)]
    assert whole.finish_reason == "stop"
    asyncio.run(engine.abort("one"))  # it has ended: nothing happens


def test_pieces_that_fail_are_an_engine_error(chat: Chat) -> None:
    """Whatever the generator does wrong is the engine's failure."""

    async def script(messages: Any, tools: Any) -> AsyncIterator[str]:
        yield "one"
        raise KeyError("no such city")

    with pytest.raises(EngineError, match=r"KeyError.*no such city"):
        _generate(chat(), script)


def _raises(messages: Any, tools: Any) -> str:
    raise KeyError("no such city")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (_raises, "KeyError.*no such city"),
        (lambda m, t: None, "the script failed"),
        (lambda m, t: 5, "the script failed"),
        (lambda m, t: {"role": "assistant", "content": 5}, "cannot be rendered"),
        (lambda m, t: {"role": "assistant", "content": "", "tool_calls": [{}]}, "cannot be rendered"),
        (lambda m, t: "\ud800", "cannot be rendered"),
    ],
)
def test_a_script_that_fails_is_an_engine_error(chat: Chat, script: Any, words: str) -> None:
    """Whatever the script does wrong is the engine's failure, in its own words."""
    with pytest.raises(EngineError, match=words):
        _generate(chat(), script)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if add_generation_prompt %}A:{% endif %}{{ messages|length }}<|im_end|>", "not end such"),
        (
            "{{ messages[0].content }}{% if messages|length > 1 %}{{ messages[1].content }}{% endif %}",
            "not end such",
        ),
        ("{{ messages[0].content }}<|im_end|>", "not end such"),
    ],
)
def test_a_template_that_does_not_extend_is_an_engine_error(chat: Chat, source: str, words: str) -> None:
    """If the template does not put an ended answer behind its prompt, there are no ids to give."""
    tokenizer = replace(chat(), template=compile_template(source))
    with pytest.raises(EngineError, match=words):
        _generate(tokenizer, lambda m, t: "Hi")


def test_a_function_in_a_file_or_module_is_loaded(tmp_path: Path) -> None:
    """file.py:function and module:function."""
    (tmp_path / "s.py").write_text("def answer(messages, tools):\n    return 'from file'\n")
    assert load_script(f"{tmp_path}/s.py:answer", conversation_digest)([], None) == "from file"
    assert load_script("json:dumps", conversation_digest) is json.dumps


@pytest.mark.parametrize(
    ("source", "spec", "words"),
    [
        ("", "answer", "file.py:function, module:function or file.jsonl"),
        ("", "{}:answer", "has no attribute 'answer'"),
        ("answer = 5", "{}:answer", "answer is not callable"),
        ("def answer(:", "{}:answer", "SyntaxError"),
        ("1 / 0", "{}:answer", "ZeroDivisionError"),
        ("", "{}.missing.py:answer", "no file"),
        ("", "no.such.module:answer", "No module named"),
        ("", "{}.missing.jsonl", "No such file"),
    ],
)
def test_a_script_that_cannot_be_loaded_says_why(tmp_path: Path, source: str, spec: str, words: str) -> None:
    """The error names the option as given and the reason."""
    file = tmp_path / "s.py"
    file.write_text(source)
    with pytest.raises(EngineError, match=words) as caught:
        load_script(spec.format(file), conversation_digest)
    assert "--script" in str(caught.value)


def test_a_jsonl_file_answers_by_messages(tmp_path: Path, chat: Chat) -> None:
    """Replies are looked up by what was said, in any serialisation; unknown messages are an error."""
    rows = [
        {"messages": [USER], "reply": {"role": "assistant", "content": "Hi"}},
        {"messages": [USER, USER], "reply": {"role": "assistant", "content": "Hi again"}},
    ]
    file = tmp_path / "s.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = load_script(str(file), conversation_digest)
    parts = {"content": [{"type": "text", "text": "Hello"}], "role": "user", "name": "ann"}
    assert chat().decode(_generate(chat(), script, [parts]).completion_ids) == "Hi"
    assert chat().decode(_generate(chat(), script, [USER, parts]).completion_ids) == "Hi again"
    with pytest.raises(EngineError, match="has no reply to these 3 messages"):
        _generate(chat(), script, [USER, USER, USER])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "",
        "[]",
        "5",
        '{"messages": []}',
        '{"messages": ["a"], "reply": {}}',
        '{"messages": 5, "reply": {}}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """An error in a script file names the file and the line."""
    file = tmp_path / "s.jsonl"
    good = json.dumps({"messages": [USER], "reply": {"role": "assistant", "content": "Hi"}})
    file.write_text(f"{good}\n{good}\n{line}\n{good}\n")
    with pytest.raises(EngineError, match=r"s\.jsonl: line 3: "):
        load_script(str(file), conversation_digest)


def test_options_that_name_no_engine_are_refused(tmp_path: Path, chat: Chat) -> None:
    """The scripted engine wants a script; an unknown engine is answered with those there are."""
    settings, secrets = proxy_parts(model=tmp_path, engine="scripted")
    with pytest.raises(ConfigError, match="needs --script"):
        make_engine(settings, secrets, chat())
    with pytest.raises(ConfigError, match="embedded, sglang, upstream, scripted"):
        make_engine(settings.model_copy(update={"engine": "quantum"}), secrets, chat())


def test_a_failure_is_a_502_and_a_failed_turn(in_process: Callable[..., InProcess], chat: Chat) -> None:
    """The client gets 502 and may try again; the log keeps the failed turn, which is no parent."""
    answers = iter([RuntimeError("teacher is ill"), "Hi", "Bye"])

    def script(messages: Any, tools: Any) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    proxy = in_process(ScriptedEngine(ReplyWriter(chat(), HERMES), script), chat())
    failed = proxy.chat("t", USER)
    assert failed.status_code == 502
    assert failed.json()["error"]["code"] == "engine_failed"
    assert failed.json()["error"]["type"] == "server_error"
    assert "teacher is ill" in failed.json()["error"]["message"]
    assert "x-should-retry" not in failed.headers
    assert proxy.chat("t", USER).json()["choices"][0]["message"]["content"] == "Hi"
    proxy.settled()
    (trajectory,) = fold(proxy.store.events()).values()
    first, second = trajectory.turns.values()
    assert isinstance(first.failed, TurnFailed)
    assert "teacher is ill" in first.failed.error
    assert first.completed is None
    assert second.completed is not None
    assert second.requested.parent_turn_id is None
