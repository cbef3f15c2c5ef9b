"""A tiny Qwen3 made on the spot: random weights, and a tokenizer trained on the task's own words."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollbook.demo.task import TOOLS, conversation, problems

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CHAT_TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- m.content }}
{%- for t in (m.tool_calls or []) %}
{{- '<tool_call>\\n{"name": "' + t.function.name + '", "arguments": ' }}
{{- (t.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_model(folder: Path, seed: int, calls: int = 1, width: int = 96, layers: int = 2) -> None:
    """Write a model directory: config, random float32 weights, tokenizer and chat template.

    Args:
        calls: that the problems take whose words the tokenizer knows.
        width: of its hidden states, a multiple of 24.
    """
    import torch
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the demo shows its own
    tokenizer = _train_tokenizer(_texts(seed, calls))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=8 * width // 3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_theta=1e4,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)


def _texts(seed: int, calls: int) -> Iterable[str]:
    """Rendered conversations, as the tokenizer will meet them."""
    from rollbook.ingest.tokens.chat_template import compile_template

    template = compile_template(CHAT_TEMPLATE)
    rng = random.Random(f"tokenizer-{seed}")
    # Control tokens are atoms: what stands around them is learned apart from them.
    atoms = re.compile("|".join(re.escape(token) for token in SPECIAL + MARKERS))
    for problem in problems(rng, 1500, held_out=False, calls=calls):
        text = template.render(messages=conversation(problem), tools=TOOLS, add_generation_prompt=False)
        yield from (piece for piece in atoms.split(text) if piece)


def _train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE whose merges never cross a line or a digit, so turns split where lines do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=440,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(MARKERS)
    return tokenizer
