"""A model directory's tokenizer and chat template, on the core install alone (tokenizers, jinja2).

The template runs in the sandbox and with the extras that Hugging Face templates expect: `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, the `generation` block and loop controls.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from tokenizers import Tokenizer

from rollbook.engines.model_files import model_file, read_json, read_text
from rollbook.ingest.tokens.message_form import in_form
from rollbook.ingest.tokens.sandbox import BoundedSandbox, Unbounded, budget
from rollbook.ingest.tokens.template_traits import TemplateTraits, image_part, probed
from rollbook.ingest.tokens.text_encoder import TextEncoder, panics_as, read_quick
from rollbook.store.errors import EngineError, ModelError, RequestError
from rollbook.store.events import Json, TokenIds

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "generate", "self", *SPECIAL_TOKENS))
"""Names under which a template is given what is not the client's to give."""


class WrittenTool(dict[str, Any]):
    """A tool, and its JSON as templates write it: of one conversation's tools it is written once."""

    __slots__ = ("text",)

    def __init__(self, tool: Json) -> None:
        super().__init__(tool)
        self.text = json.dumps(tool, ensure_ascii=False)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    if type(value) is WrittenTool and not ensure_ascii and indent is None:
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def template_environment() -> jinja2.Environment:
    """What templates are compiled in."""
    environment = BoundedSandbox({"tojson": _tojson})
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def compile_template(source: str) -> jinja2.Template:
    """A chat template, ready to render.

    Raises:
        jinja2.TemplateError: it does not parse.
    """
    template = template_environment().from_string(source)
    # Jinja chains them to its environment's, in Python: each rendering would go through them one by one.
    template.globals = dict(template.globals)
    return template


_GLOBALS = frozenset(template_environment().globals)


def check_template_kwargs(kwargs: Json) -> None:
    """Refuse what a request gives its template under a name that is not free.

    Raises:
        RequestError: 400, naming it.
    """
    for name in kwargs:
        if not name.isidentifier():
            text = f"chat_template_kwargs: {name!r} is no name that a template can read"
        elif name in RESERVED or name in _GLOBALS:
            text = f"chat_template_kwargs.{name}: the proxy gives that to the template itself; leave it out"
        else:
            continue
        raise RequestError(400, "bad_template_kwargs", text)


@dataclass(frozen=True, slots=True, eq=False)
class ChatTokenizer:
    """Renders conversations and turns text into ids, for one model directory."""

    encoder: TextEncoder
    template: jinja2.Template
    special_tokens: Json
    stop_ids: tuple[int, ...]
    context_length: int
    traits: TemplateTraits
    tokenizer_digest: str
    template_digest: str
    template_source: str = ""
    special: Mapping[int, str] = field(default_factory=dict)
    """Control tokens by id."""
    vocabulary: int = 0
    """How many ids the model has; 0: unknown."""
    name: str = "the model"
    """Whose template it is, for what is said of it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Whose ids are right."""
        return self.encoder.tokenizer

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] | None,
        *,
        generate: bool,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model reads it; with `generate`, up to where it is to answer.

        Raises:
            RequestError: 400, the template refuses these messages.
        """
        shaped = [_for_template(message, self.traits) for message in messages]
        try:
            with budget():
                return self.template.render(
                    messages=shaped,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=generate,
                    **self.special_tokens,
                    **kwargs,
                )
        except Exception as error:  # templates are programs: they raise whatever they run into
            text = str(error) or type(error).__name__
            raise RequestError(
                400, "template_error", f"the chat template refuses the messages: {text}"
            ) from error

    def encode(self, text: str) -> TokenIds:
        """Ids of rendered text, int32. No special tokens are added: the template holds them.

        Raises:
            RequestError: 400, the text holds half of a surrogate pair (JSON escapes can spell one), or is far
                longer than the context.
        """
        try:
            with panics_as(EngineError, "the tokenizer failed"):
                return self.encoder.encode(text, self.context_length)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(400, "not_unicode", f"the messages are not Unicode text: {error}") from error

    def reply_text(self, ids: Sequence[int] | TokenIds, markers: Collection[str]) -> str:
        """Text of a completion; of the control tokens only those named by `markers` are kept."""
        kept = self.readable(ids, markers)
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def readable(self, ids: Sequence[int] | TokenIds, markers: Collection[str]) -> list[int]:
        """The ids without the control tokens that `markers` does not name."""
        special = self.special
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return [i for i in numbers if i not in special or special[i] in markers]

    def text_of(self, token_id: int) -> str:
        """Text of one id, also if it is a control token."""
        return self.special.get(token_id) or self.decode([token_id], special=True)

    def decode(self, ids: Sequence[int] | TokenIds, *, special: bool = False) -> str:
        """Text of ids; special tokens are kept only on request."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)


_ROLES = {"function": "tool"}
_UNKNOWN_ROLES = _ROLES | {"developer": "system"}
"""OpenAI's newer name for the system role: most templates would leave such a message out."""


def _for_template(message: Json, traits: TemplateTraits) -> Json:
    """The message as this template reads it.

    Raises:
        RequestError: 400, it has no form, or holds an image that the template does not show.
    """
    shaped = dict(in_form(message))
    role = shaped.get("role")
    shaped["role"] = (_ROLES if traits.developer else _UNKNOWN_ROLES).get(str(role), role)
    content = shaped["content"]
    if isinstance(content, list):
        shaped["content"] = [_part(part, traits) for part in content]
    elif traits.text_as_parts:
        shaped["content"] = [{"type": "text", "text": content}]
    calls = shaped.get("tool_calls")
    if calls and not content and traits.null_beside_calls:
        shaped["content"] = None
    thought = shaped.pop("reasoning_content", None)
    if thought and (traits.thinks_beside_calls or not (calls and content)):
        shaped[traits.reasoning or "reasoning_content"] = thought
    if calls and traits.dict_arguments:
        shaped["tool_calls"] = [_with_dict_arguments(call) for call in calls]
    return shaped


def _part(part: Json, traits: TemplateTraits) -> Json:
    if part["type"] != "image_url":
        return part
    if traits.image_type is None:
        text = "the messages hold an image, and the model's chat template shows none: send text"
        raise RequestError(400, "images_not_served", text)
    return image_part(traits.image_type, part["image_url"]["url"])


def _with_dict_arguments(call: Json) -> Json:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def load_chat_tokenizer(model: Path) -> ChatTokenizer:
    """Read tokenizer.json, the chat template and the stop tokens of a Hugging Face model directory.

    Raises:
        ModelError: a file is missing or cannot be used; the message names it.
    """
    tokenizer_file = model_file(model, "tokenizer.json")
    if tokenizer_file is None:
        text = "save the tokenizer there in its fast form (save_pretrained of transformers)"
        raise ModelError(f"{model}: holds no tokenizer.json, so it cannot be served: {text}")
    settings = read_json(model, "tokenizer_config.json")
    source = _template_source(model, settings)
    encoder = _encoder(tokenizer_file)
    tokenizer = encoder.tokenizer
    special = _special_tokens(model, settings)
    config = read_json(model, "config.json")
    template = _template(model, source)
    try:
        traits = probed(template, source, special)
    except Unbounded as error:
        raise ModelError(f"{model}: its chat template is not bounded: {error}") from error
    return ChatTokenizer(
        encoder=encoder,
        template=template,
        special_tokens=special,
        stop_ids=_stop_ids(model, tokenizer, special, config),
        context_length=_whole_number(model, "max_position_embeddings", config) or 0,
        traits=traits,
        tokenizer_digest=hashlib.sha256(tokenizer_file.read_bytes()).hexdigest(),
        template_digest=hashlib.sha256(source.encode()).hexdigest(),
        template_source=source,
        special={i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special},
        vocabulary=_vocabulary(tokenizer, config),
        name=str(model),
    )


def _encoder(file: Path) -> TextEncoder:
    with ThreadPoolExecutor(1) as pool:  # each takes a second for a large vocabulary
        quick = pool.submit(read_quick, file)
        return TextEncoder.tried(_tokenizer(file), quick.result())


def _tokenizer(file: Path) -> Tokenizer:
    try:
        with panics_as(ModelError, f"{file}: cannot be read"):
            return Tokenizer.from_file(str(file))
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises no narrower one
        raise ModelError(f"{file}: cannot be read: {error}; copy the model anew") from error


def _template(model: Path, source: str) -> jinja2.Template:
    try:
        return compile_template(source)
    except Exception as error:  # beyond TemplateError: what Python says of blocks nested too deep, and so on
        raise ModelError(f"{model}: its chat template does not parse: {error}") from error


def _special_tokens(model: Path, settings: Json) -> dict[str, str]:
    """The special tokens that templates name, by their names."""
    special: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str | None):
            raise ModelError(f"{model}: {name} in tokenizer_config.json is {content!r}: it must be a text")
        if content:
            special[name] = content
    return special


def _whole_number(model: Path, name: str, config: Json) -> int | None:
    value = config.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ModelError(f"{model}: {name} is {value!r}: it must be a whole number")
    return value


def _vocabulary(tokenizer: Tokenizer, config: Json) -> int:
    """The ids that the model has weights for: its own word, as a tokenizer may name fewer."""
    size = config.get("vocab_size")
    if size is None and isinstance(config.get("text_config"), dict):
        size = config["text_config"].get("vocab_size")
    return size if type(size) is int else int(tokenizer.get_vocab_size(with_added_tokens=True))


def _template_source(model: Path, settings: Json) -> str:
    file = model_file(model, "chat_template.jinja")
    source = read_text(file) if file is not None else settings.get("chat_template")
    if not isinstance(source, str):
        raise ModelError(
            f"{model}: holds no chat template (chat_template.jinja, or a string under "
            "chat_template in tokenizer_config.json)"
        )
    return source


def _stop_ids(model: Path, tokenizer: Tokenizer, special: Json, config: Json) -> tuple[int, ...]:
    """Ids that end a turn: generation_config's, then the tokenizer's end token, then the config's."""
    generation = read_json(model, "generation_config.json")
    eos = generation.get("eos_token_id")
    if eos is None and "eos_token" in special:
        eos = tokenizer.token_to_id(special["eos_token"])
    if eos is None:
        eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    if eos is None or not ids:
        raise ModelError(f"{model}: names no end-of-turn token: set eos_token_id in generation_config.json")
    for stop_id in ids:
        if not isinstance(stop_id, int) or isinstance(stop_id, bool) or not 0 <= stop_id < 1 << 31:
            raise ModelError(f"{model}: eos_token_id is {stop_id!r}: it must be the id of a token")
    return tuple(ids)
