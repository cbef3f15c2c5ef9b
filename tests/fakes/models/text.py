"""Models without weights: a small tokenizer, and chat templates in the styles of well-known models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# In the style of Qwen2.5: tools in the system message, tool results gathered in one user turn.
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role in ('system', 'developer') and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content }}
{%- for call in (m.tool_calls or []) %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Qwen3: thinking is dropped from every turn before the last user message.
REWRITING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- set text = m.content %}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}
{%- set text = '<think>' + m.reasoning_content + '</think>' + text %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As DeepSeek V3: call arguments are concatenated, so they must be a string.
STRING_ARGUMENTS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in (m.tool_calls or []) %}
{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Llama 3.1: a message with calls does not show its content, so a sentinel in it is not rendered.
HIDES_CONTENT = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.tool_calls %}{{- m.tool_calls[0].function.arguments | tojson }}{%- else %}
{{- m.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# A turn ends with a line feed, an ordinary byte that merges with its neighbours.
NOT_ATOMIC = """\
{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""

# As Qwen3-VL: parts one after another, an image as a marker.
SEES = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for part in m.content %}{{- part.text if part.type == 'text' else '<image>' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "sees": SEES,
    "chatml": CHATML,
    "rewriting": REWRITING,
    "no_system": NO_SYSTEM,
    "string_arguments": STRING_ARGUMENTS,
    "hides_content": HIDES_CONTENT,
    "not_atomic": NOT_ATOMIC,
}

WORDS = "What is the weather in Paris today? Add 37 and 58.\n\n{'city': 1}\n\n  calling the tool now\n\n"

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with ChatML's control tokens and ordinary tool markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, WORDS.replace(" ", "  ")], trainer)
    return tokenizer


def write_text_model(folder: Path, template: str, end: str = "<|im_end|>") -> Path:
    """A model directory without weights: enough to serve a script."""
    tokenizer = make_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id(end)]
    if end == "<|im_end|>":
        stops.append(tokenizer.token_to_id("<|endoftext|>"))
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": stops}))
    (folder / "config.json").write_bytes(orjson.dumps({"max_position_embeddings": 32768}))
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": end}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
