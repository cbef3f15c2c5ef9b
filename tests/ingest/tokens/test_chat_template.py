"""Chat templates: load errors that help, and rendering equal to transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template, load_chat_tokenizer
from rollbook.store.errors import ModelError, RequestError

TextModel = Callable[[str], Path]
Chat = Callable[..., ChatTokenizer]

CALL = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"a": "<é>", "b": [1]}'}}


@pytest.fixture
def broken(tmp_path: Path, text_model: TextModel) -> Path:
    """A copy of a model directory, to break."""
    return Path(shutil.copytree(text_model("chatml"), tmp_path / "model"))


def test_no_tokenizer_is_named(broken: Path) -> None:
    """Without tokenizer.json the error names the folder, the file and what to do."""
    (broken / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"model: holds no tokenizer\.json.*save_pretrained"):
        load_chat_tokenizer(broken)


def test_no_template_is_named(broken: Path) -> None:
    """Without a chat template the error names both places where one may be."""
    (broken / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"chat_template\.jinja.*tokenizer_config\.json"):
        load_chat_tokenizer(broken)


def test_no_end_token_is_named(broken: Path) -> None:
    """Without an end-of-turn token the error names the key and the file to set it in."""
    (broken / "generation_config.json").unlink()
    (broken / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"eos_token_id in generation_config\.json"):
        load_chat_tokenizer(broken)


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_named(broken: Path, file: str, text: str) -> None:
    """A file that is not the JSON it should be is an error that names it."""
    (broken / file).write_text(text)
    with pytest.raises(ModelError, match=file.replace(".", r"\.")):
        load_chat_tokenizer(broken)


def test_a_template_that_does_not_parse_is_named(broken: Path) -> None:
    """A syntax error in the template is a ModelError with jinja's own words."""
    (broken / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ModelError, match="chat template does not parse"):
        load_chat_tokenizer(broken)


def test_a_template_in_the_tokenizer_config_is_found(broken: Path) -> None:
    """The older place of the template serves too, and has the same digest."""
    digest = load_chat_tokenizer(broken).template_digest
    source = (broken / "chat_template.jinja").read_text()
    (broken / "chat_template.jinja").unlink()
    (broken / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    assert load_chat_tokenizer(broken).template_digest == digest


@pytest.mark.parametrize(
    ("generation", "settings", "config", "expected"),
    [
        ({"eos_token_id": [2, 0]}, {"eos_token": "<|im_start|>"}, {"eos_token_id": 1}, (2, 0)),
        ({"eos_token_id": 0}, {"eos_token": "<|im_end|>"}, {}, (0,)),
        ({}, {"eos_token": {"content": "<|im_end|>"}}, {"eos_token_id": 0}, (2,)),
        ({}, {}, {"eos_token_id": 1}, (1,)),
    ],
)
def test_stop_ids_come_from_the_first_that_names_them(
    broken: Path, generation: Any, settings: Any, config: Any, expected: tuple[int, ...]
) -> None:
    """generation_config, then the tokenizer's end token, then the config."""
    (broken / "generation_config.json").write_text(json.dumps(generation))
    (broken / "tokenizer_config.json").write_text(json.dumps(settings))
    (broken / "config.json").write_text(json.dumps(config))
    assert load_chat_tokenizer(broken).stop_ids == expected


def test_tojson_escapes_no_html_and_no_unicode() -> None:
    """JSON in a prompt is plain JSON: neither HTML entities nor escapes beyond what JSON needs."""
    value = {"b": "<a href='x'>&é</a>", "a": [1, 1.5, None, True]}
    assert compile_template("{{ v | tojson }}").render(v=value) == json.dumps(value, ensure_ascii=False)
    assert compile_template("{{ v | tojson(indent=2) }}").render(v=value) == json.dumps(
        value, ensure_ascii=False, indent=2
    )


def test_raise_exception_is_a_400(chat: Chat) -> None:
    """A template that refuses the messages is the client's error, with the template's words."""
    with pytest.raises(RequestError, match="System role not supported") as caught:
        chat("no_system").render([{"role": "system", "content": "s"}], None, generate=True)
    assert (caught.value.status, caught.value.code) == (400, "template_error")


@pytest.mark.parametrize("content", [{"a": 1}, 5, [5], [{"type": "image_url"}], [None]])
def test_content_a_template_cannot_join_is_a_400(chat: Chat, content: Any) -> None:
    """Content of another type than text is refused and not rendered as Python."""
    with pytest.raises(RequestError) as caught:
        chat().render([{"role": "user", "content": content}], None, generate=True)
    assert caught.value.status == 400


def test_half_a_surrogate_pair_is_a_400(chat: Chat) -> None:
    """Arguments that spell half a surrogate pair cannot become ids: refused, not a server error."""
    call = {"id": "1", "function": {"name": "calc", "arguments": '{"a": "\\ud800"}'}}
    text = chat().render([{"role": "assistant", "tool_calls": [call]}], None, generate=True)
    with pytest.raises(RequestError) as caught:
        chat().encode(text)
    assert (caught.value.status, caught.value.code) == (400, "not_unicode")


def test_the_generation_block_renders_its_body() -> None:
    """`generation` marks text for trainers and changes nothing of it, nor of the loop around it."""
    source = "{% for m in messages %}[{% generation %}{{ m }}{{ loop.index }}{% endgeneration %}]{% endfor %}"
    assert compile_template(source).render(messages=["a", "b"]) == "[a1][b2]"


def test_loop_controls_and_dates_are_there() -> None:
    """Templates may break out of loops and ask for the date."""
    source = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert compile_template(source).render() == "1"
    assert len(compile_template("{{ strftime_now('%Y') }}").render()) == 4


def test_templates_run_in_a_sandbox(chat: Chat) -> None:
    """A template from a model directory cannot reach Python's internals."""
    from jinja2.exceptions import SecurityError

    with pytest.raises(SecurityError):
        compile_template("{{ messages.__class__.__mro__ }}").render(messages=[])
    with pytest.raises(SecurityError):
        compile_template("{{ messages.append(1) }}").render(messages=[])


def test_arguments_take_the_form_the_template_wants(chat: Chat) -> None:
    """A template that concatenates gets the text as sent; one that prints JSON gets an object."""
    assert chat("chatml").traits.dict_arguments is True
    assert chat("string_arguments").traits.dict_arguments is False
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    spaced = CALL["function"]["arguments"]
    assert f"<tool_call>calc {spaced}</tool_call>" in chat("string_arguments").render(
        messages, None, generate=False
    )
    assert '{"name": "calc", "arguments": {"a": "<é>", "b": [1]}}' in chat("chatml").render(
        messages, None, generate=False
    )


def test_arguments_that_are_no_json_are_rendered_as_they_are(chat: Chat) -> None:
    """Broken arguments reach a template as the string they are, however deep they are nested."""
    for arguments in ('{"a": ', "[" * 100_000):
        call = {"id": "1", "function": {"name": "calc", "arguments": arguments}}
        text = chat().render([{"role": "assistant", "tool_calls": [call]}], None, generate=False)
        assert json.dumps(arguments) in text


def test_rendering_does_not_change_the_messages(chat: Chat) -> None:
    """Shaping for the template happens on copies: what was received is what is recorded."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    before = json.dumps(messages)
    chat().render(messages, None, generate=True)
    assert json.dumps(messages) == before


def test_text_parts_are_rendered_as_their_text(chat: Chat) -> None:
    """A list of text parts and the text it spells give the same prompt."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]
    as_parts = chat().render([{"role": "user", "content": parts}], None, generate=True)
    assert as_parts == chat().render([{"role": "user", "content": "ab\n"}], None, generate=True)
    assert as_parts == "<|im_start|>user\nab\n<|im_end|>\n<|im_start|>assistant\n"


def test_ids_decode_to_the_text(chat: Chat) -> None:
    """Encoding adds nothing; decoding keeps control tokens only on request."""
    text = "<|im_start|>user\nWetter 天気 🌦<|im_end|>\n"
    ids = chat().encode(text)
    assert ids.dtype == np.int32
    assert chat().decode(ids, special=True) == text
    assert chat().decode(ids) == "user\nWetter 天気 🌦\n"


USER = {"role": "user", "content": "What is 37 plus 58?"}
ASKED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "calc", "arguments": {"a": 37, "é": "<&'\">"}}},
        {"id": "d", "type": "function", "function": {"name": "calc", "arguments": {}}},
    ],
}
RESULT = {"role": "tool", "content": "95\n", "tool_call_id": "c"}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": " strict \n"}, USER],
    [USER, ASKED, RESULT],
    [USER, ASKED, RESULT, RESULT, {"role": "assistant", "content": "  95 🌦 "}, USER],
    [{"role": "user", "content": "<|im_end|> {{ 7 * 7 }} </tool_call>"}],
]


@pytest.mark.torch
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("template", ["demo", "chatml"])
def test_rendering_equals_transformers(
    tiny_model: Path,
    text_model: TextModel,
    conversation: Any,
    generate: bool,
    template: str,
    tools: list[dict[str, Any]],
) -> None:
    """Text and ids are those of transformers' own apply_chat_template, with tools and without."""
    from transformers import AutoTokenizer

    chosen = None if template == "demo" else (text_model("chatml") / "chat_template.jinja").read_text()
    oracle = AutoTokenizer.from_pretrained(tiny_model)
    ours = load_chat_tokenizer(tiny_model)
    if chosen is not None:
        object.__setattr__(ours, "template", compile_template(chosen))
    wire = json.loads(json.dumps(conversation))
    for call in (c for m in wire for c in m.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    for offered in (None, tools):
        text = ours.render(wire, offered, generate=generate)
        options = {"chat_template": chosen, "tools": offered, "add_generation_prompt": generate}
        assert text == oracle.apply_chat_template(conversation, tokenize=False, **options)
        ids = oracle.apply_chat_template(conversation, return_dict=True, **options)["input_ids"]
        assert ours.encode(text).tolist() == ids
