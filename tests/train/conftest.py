"""Tiny models of every architecture, for the tests of Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric


def _model(folder: Path, family: str, **changes: Any) -> None:
    """Write a tiny transformers model with random weights, biases too."""
    import torch
    import transformers

    values = {
        "vocab_size": 125,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    of_text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{of_text}Config")(**(values | changes))
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models: dense tied and untied, with biases, with experts, with windows, with sinks."""
    place = tmp_path_factory.mktemp("spread")
    for tied in (True, False):
        fabric.make_model(place / f"qwen3-{'tied' if tied else 'untied'}", tied=tied)
    _model(place / "qwen2", "Qwen2")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    _model(place / "qwen3_moe", "Qwen3Moe", norm_topk_prob=True, **experts)
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")]
    windows = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 4, "layer_types": kinds}
    _model(place / "gemma3", "Gemma3", query_pre_attn_scalar=24, **windows)
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    oss = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 16}
    _model(place / "gpt_oss", "GptOss", rope_parameters=rope, sliding_window=4, **oss)
    return place
