"""A model directory's tokenizer and chat template, on the core install alone (tokenizers, jinja2).

The template runs in the sandbox and with the extras that Hugging Face templates expect: `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, the `generation` block and loop controls.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from tokenizers import Tokenizer

from rollbook.ingest.engines.model_files import model_file, read_json, read_text
from rollbook.ingest.tokens.sandbox import BoundedSandbox, Unbounded, budget
from rollbook.ingest.tokens.text_length import check_text_length
from rollbook.store.errors import EngineError, ModelError, RequestError, RollbookError
from rollbook.store.events import Json, TokenIds


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def compile_template(source: str) -> jinja2.Template:
    """A chat template, ready to render.

    Raises:
        jinja2.TemplateError: it does not parse.
    """
    environment = BoundedSandbox({"tojson": _tojson})
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


@dataclass(frozen=True, slots=True, eq=False)
class ChatTokenizer:
    """Renders conversations and turns text into ids, for one model directory."""

    tokenizer: Tokenizer
    template: jinja2.Template
    special_tokens: Json
    stop_ids: tuple[int, ...]
    context_length: int
    dict_arguments: bool
    tokenizer_digest: str
    template_digest: str
    template_source: str = ""
    special: Mapping[int, str] = field(default_factory=dict)
    """Control tokens by id."""
    text_as_parts: bool = False
    """The template leaves out text that does not come as a list of parts."""

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
        # OpenAI's newer name for the system role: most templates would leave such a message out.
        roles = _ROLES if "developer" in self.template_source else _ROLES | {"developer": "system"}
        try:
            with budget():
                return self.template.render(
                    messages=[_for_template(m, self, roles) for m in messages],
                    tools=list(tools) if tools else None,
                    add_generation_prompt=generate,
                    **self.special_tokens,
                    **kwargs,
                )
        except Exception as error:  # a template may raise anything
            raise RequestError(
                400, "template_error", f"the chat template refuses the messages: {error}"
            ) from error

    def encode(self, text: str) -> TokenIds:
        """Ids of rendered text, int32. No special tokens are added: the template holds them.

        Raises:
            RequestError: 400, the text holds half of a surrogate pair (JSON escapes can spell one), or is far
                longer than the context.
        """
        try:
            check_text_length(self.tokenizer, text, self.context_length)
            # The "fast" one leaves out offsets, which nobody asks for: a fifth less time, the same ids.
            with panics_as(EngineError, "the tokenizer failed"):
                [encoded] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(400, "not_unicode", f"the messages are not Unicode text: {error}") from error
        return np.asarray(encoded.ids, dtype=np.int32)

    def reply_text(self, ids: Sequence[int] | TokenIds, markers: Collection[str]) -> str:
        """Text of a completion; of the control tokens only those named by `markers` are kept."""
        kept = self.readable(ids, markers)
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def readable(self, ids: Sequence[int] | TokenIds, markers: Collection[str]) -> list[int]:
        """The ids without the control tokens that `markers` does not name."""
        special = self.special
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return [i for i in numbers if i not in special or special[i] in markers]

    def decode(self, ids: Sequence[int] | TokenIds, *, special: bool = False) -> str:
        """Text of ids; special tokens are kept only on request."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)


_ROLES: dict[Any, str] = {"function": "tool"}


def _for_template(message: Json, chat: ChatTokenizer, roles: Mapping[Any, str]) -> Json:
    """The message in the form that templates read: text and call arguments as they want them."""
    shaped = dict(message)
    role = shaped.get("role")
    shaped["role"] = roles.get(role, role)
    content = shaped.get("content")
    if content is None:
        shaped["content"] = ""
    elif isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        shaped["content"] = "".join(str(p.get("text", "")) for p in content)
    if chat.text_as_parts and isinstance(shaped["content"], str):
        shaped["content"] = [{"type": "text", "text": shaped["content"]}]
    if shaped.get("reasoning") and not shaped.get("reasoning_content"):
        shaped["reasoning_content"] = shaped["reasoning"]
    if chat.dict_arguments and shaped.get("tool_calls"):
        shaped["tool_calls"] = [_with_dict_arguments(call) for call in shaped["tool_calls"]]
    return shaped


def _with_dict_arguments(call: Json) -> Json:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _takes_dict_arguments(template: jinja2.Template, special: Json) -> bool:
    """Most templates want call arguments as an object; some concatenate them as a string."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        with budget():
            template.render(messages=messages, tools=None, add_generation_prompt=False, **special)
    except TypeError:
        return False
    except Unbounded:
        raise
    except Exception:  # a template may refuse these messages in any way
        return True
    return True


def _takes_text_as_parts(template: jinja2.Template, special: Json) -> bool:
    """Whether text reaches the prompt as a list of parts only (Idefics, SmolVLM, LLaVA)."""

    def shows(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            with budget():
                return "probe" in template.render(messages=messages, add_generation_prompt=True, **special)
        except Unbounded:
            raise
        except Exception:  # likewise
            return False

    return not shows("probe") and shows([{"type": "text", "text": "probe"}])


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
    tokenizer = _tokenizer(tokenizer_file)
    special = _special_tokens(model, settings)
    config = read_json(model, "config.json")
    template = _template(model, source)
    try:
        dict_arguments, text_as_parts = (
            takes(template, special) for takes in (_takes_dict_arguments, _takes_text_as_parts)
        )
    except Unbounded as error:
        raise ModelError(f"{model}: its chat template is not bounded: {error}") from error
    return ChatTokenizer(
        tokenizer=tokenizer,
        template=template,
        special_tokens=special,
        stop_ids=_stop_ids(model, tokenizer, special, config),
        context_length=_whole_number(model, "max_position_embeddings", config) or 0,
        dict_arguments=dict_arguments,
        tokenizer_digest=hashlib.sha256(tokenizer_file.read_bytes()).hexdigest(),
        template_digest=hashlib.sha256(source.encode()).hexdigest(),
        template_source=source,
        special={i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special},
        text_as_parts=text_as_parts,
    )


@contextlib.contextmanager
def panics_as(kind: type[RollbookError], what: str) -> Iterator[None]:
    """Raise a panic of the tokenizers' Rust, which is no Exception, as an error of ours."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}; copy the model anew") from error


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
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
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
    found = generation.get("eos_token_id")
    if found is None and "eos_token" in special:
        found = tokenizer.token_to_id(special["eos_token"])
    if found is None:
        found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    if found is None or not ids:
        raise ModelError(f"{model}: names no end-of-turn token: set eos_token_id in generation_config.json")
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < 1 << 31:
            raise ModelError(f"{model}: eos_token_id is {one!r}: it must be the id of a token")
    return tuple(ids)
