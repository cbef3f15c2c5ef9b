"""Tiny Qwen3 models, dense and mixture of experts, made on the spot for SGLang to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

EXPERTS, TOP_K, LAYERS, HIDDEN = 8, 2, 3, 64


def make(
    folder: Path, kind: str, seed: int, *, tied: bool, like: Path | None = None, hidden: int = HIDDEN
) -> Path:
    """Write a model directory with random float32 weights.

    Args:
        kind: `dense` or `moe`.
        like: a model directory whose tokenizer and chat template it has; by default those of the demo.
    """
    import torch
    from transformers.utils import logging

    from rollbook.demo.model import make_model

    logging.disable_progress_bar()
    if like is None:
        make_model(folder, 0)  # for its tokenizer: the weights are overwritten
    else:
        folder.mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).write_bytes((like / name).read_bytes())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(seed)
    model = _model(kind, tokenizer, tied, hidden)
    # Weights of the usual size would make every token as likely as any other: nothing could be told apart.
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                weights.normal_(0, 0.15 if "embed" in name or "lm_head" in name else 0.1)
    model.save_pretrained(folder)
    return folder


def _model(kind: str, tokenizer: Tokenizer, tied: bool, hidden: int) -> Any:
    from transformers import (
        GenerationConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    ids = {
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "rope_theta": 1e4,
        **ids,
    }
    model: Any
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        routed = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": hidden}
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**shape, **routed, norm_topk_prob=True, decoder_sparse_step=1)
        )
    model.generation_config = GenerationConfig(**ids)
    return model
