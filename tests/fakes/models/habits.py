"""A tiny Qwen3 with habits: at each turn it says one of a few things, of which each is a token of its own.

What an agent does with a model is seen only where its model does something. A random one never calls a
tool; this one does, whatever it was asked, and what it does varies as a policy's samples do. Its weights are
made, not trained: the next token hangs on the last one, and hardly on the rest of the conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

WIDTH, LAYERS = 96, 2
CERTAIN = 16.0
"""Logit of what it is in the habit of; of anything else it is around 0."""
END, START = "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- text(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- '<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nA call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(m.content) + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + text(m.content) }}
{%- for t in (m.tool_calls or []) %}
{{- '<tool_call>\\n{"name": "' + t.function.name + '", "arguments": ' + (t.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (m.role == 'system' and tools and loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + text(m.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def call(name: str, **arguments: object) -> str:
    """A call of a tool, as its chat template has it."""
    encoded = orjson.dumps(arguments).decode()
    return f'<tool_call>\n{{"name": "{name}", "arguments": {encoded}}}\n</tool_call>'


def make_habits(folder: Path, sayings: Sequence[str], texts: Path, context: int = 16384) -> None:
    """Write a model directory.

    Args:
        sayings: what it says, each as often as the others.
        texts: a folder of Markdown, of whose words the tokenizer learns.
        context: tokens that it takes.
    """
    import torch
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(sayings, texts)
    end = tokenizer.token_to_id(END)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        rope_theta=1e4,
        eos_token_id=end,
        pad_token_id=end,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    says = [tokenizer.token_to_id(saying) for saying in sayings]
    last = tokenizer.encode(f"{START}assistant\n", add_special_tokens=False).ids[-1]
    with torch.no_grad():
        embeddings, direction = torch.randn(config.vocab_size, WIDTH), torch.randn(WIDTH)
        embeddings[says] += 3 * direction  # whatever it said, it ends then
        embeddings = torch.nn.functional.normalize(embeddings, dim=-1) * WIDTH**0.5
        model.get_input_embeddings().weight.copy_(embeddings)
        head = torch.randn(config.vocab_size, WIDTH) / WIDTH
        head[says] = CERTAIN / WIDTH * embeddings[last]
        head[end] = 1.2 * CERTAIN / direction.norm() / WIDTH**0.5 * direction
        model.get_output_embeddings().weight.copy_(head)
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=CHAT_TEMPLATE
    )
    wrapped.save_pretrained(folder)


def _tokenizer(sayings: Sequence[str], texts: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=[END, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(_lines(texts), 2000), trainer)
    tokenizer.add_tokens([AddedToken(saying, normalized=False) for saying in sayings])
    return tokenizer


def _lines(texts: Path) -> Iterator[str]:
    for file in sorted(texts.glob("*.md")):
        yield from file.read_text().splitlines(keepends=True)
