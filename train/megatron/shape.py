"""Reads the shape of a model from its Hugging Face config.json, for the families that can be trained.

Read in the keys of transformers 4 (`rope_theta`, `rope_scaling`, `num_experts`) and of 5
(`rope_parameters`, `num_local_experts`). What the trainer would compute otherwise than transformers
is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rollbook.store.errors import ModelError

VOCAB_DIVISOR = 128
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The values of `model_type` that are trained."""
SCORES = "ForSequenceClassification"
"""How the architectures of models with a head of scores end."""
SCORE_LABELS = ("reward", "log_deviation")
"""What the values of a reward model's head are called in its config, of as many as it has."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in every layer.

    `ffn` is the inner width of one expert; `renormalized` says that the weights of the chosen experts
    are divided by their sum.
    """

    count: int
    per_token: int
    ffn: int
    renormalized: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The values of a config.json that determine the model.

    `ffn` is the inner width of a dense layer, which a model of experts does not use. `scores` is 0 for a
    model that predicts tokens; otherwise the number of values that its head `score` gives each token instead.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    tied: bool
    experts: Experts | None = None
    scores: int = 0

    @property
    def outputs(self) -> int:
        """Values that the model gives each token: one for each of the vocabulary, or its scores."""
        return self.scores or self.vocab

    def work(self, tokens: int) -> int:
        """Floating-point operations of a forward pass over a sample of so many tokens: 2 for every weight
        that each meets, and causal attention between them (Kaplan et al. 2020, arXiv:2001.08361, table 1)."""
        inner = self.heads * self.head_dim
        attention = self.hidden * (2 * inner + 2 * self.kv_heads * self.head_dim)
        experts = self.experts
        width = experts.ffn * experts.per_token if experts else self.ffn
        router = self.hidden * experts.count if experts else 0
        weights = self.layers * (attention + 3 * self.hidden * width + router) + self.hidden * self.outputs
        return 2 * tokens * weights + 2 * self.layers * inner * tokens * tokens

    @property
    def padded_vocab(self) -> int:
        """Rows of Megatron's embedding."""
        return -(-self.vocab // VOCAB_DIVISOR) * VOCAB_DIVISOR

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether every head's query and key is normalized."""
        return self.family in ("qwen3", "qwen3_moe")


def read_shape(model: Path) -> ModelShape:
    """The shape a model directory's config.json describes.

    Raises:
        ModelError: there is none, or it asks for what is not trained.
    """
    file = model / "config.json"
    if not file.exists():
        raise ModelError(f"{model}: holds no config.json, so it is no model directory")
    try:
        config: dict[str, Any] = orjson.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if config.get("model_type") not in FAMILIES:
        raise ModelError(
            f"{model}: architecture {config.get('model_type')!r} cannot be trained; "
            f"this release trains {', '.join(FAMILIES)}"
        )
    try:
        reasons = [reason for reason, holds in _REFUSED.items() if holds(config)]
        if reasons:
            raise ModelError(f"{model}: {'; '.join(reasons)}: not supported by this release's trainer")
        return _shape(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file}: a key is missing or ill-typed: {error!r}") from error


def shape_to_train(model: Path, scores: int) -> ModelShape:
    """The shape in which an algorithm trains a model: with a head of scores in place of the vocabulary's
    logits, where it trains a reward model.

    Args:
        scores: that the algorithm asks for; 0: it trains a policy.

    Raises:
        ModelError: there is no model, it cannot be trained, or its head is another.
    """
    shape = read_shape(model)
    if shape.scores not in (0, scores):
        wanted = f"trains one of {scores}" if scores else "trains a policy, which predicts tokens"
        raise ModelError(f"{model}: is a reward model with a head of {shape.scores}; the algorithm {wanted}")
    return replace(shape, scores=scores)


def _scores(config: dict[str, Any]) -> int:
    """Width of the head of a `ForSequenceClassification` model; 0 of another."""
    if not any(name.endswith(SCORES) for name in config.get("architectures") or ()):
        return 0
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)


def _shape(config: dict[str, Any]) -> ModelShape:
    family, heads = config["model_type"], config["num_attention_heads"]
    if family == "llama":  # files of the first Llama models lack keys that were added later
        config = {"rope_theta": 10000.0} | config
        config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim")
    if head_dim is None:
        if family == "qwen3":  # transformers would take 128, whatever the widths
            raise KeyError("head_dim")
        head_dim = config["hidden_size"] // heads
    kv_heads = config["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    return ModelShape(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config) if family == "qwen3_moe" else None,
        scores=_scores(config),
    )


def _experts(config: dict[str, Any]) -> Experts:
    count = config.get("num_experts") or config["num_local_experts"]
    return Experts(
        count=count,
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        renormalized=bool(config.get("norm_topk_prob", False)),
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _scaled_rope(config: dict[str, Any]) -> bool:
    rope = _rope(config)
    # transformers 4 once wrote `type` for `rope_type`.
    return rope.get("rope_type", rope.get("type", "default")) != "default"


def _partial_rope(config: dict[str, Any]) -> bool:
    factor = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return factor not in (None, 1, 1.0)


def _sliding(config: dict[str, Any]) -> bool:
    kinds = set(config.get("layer_types") or ())
    return bool(config.get("use_sliding_window")) or bool(kinds - {"full_attention"})


def _single_expert(config: dict[str, Any]) -> bool:
    # Renormalized, its weight is 1 whatever the router says: Megatron has no such router.
    return config.get("num_experts_per_tok") == 1 and bool(config.get("norm_topk_prob"))


_REFUSED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "attention_bias": lambda c: bool(c.get("attention_bias")),
    "mlp_bias": lambda c: bool(c.get("mlp_bias")),
    "sliding windows": _sliding,
    "rope scaling (rope_type other than 'default')": _scaled_rope,
    "partial_rotary_factor": _partial_rope,
    "hidden_act other than silu": lambda c: c.get("hidden_act", "silu") != "silu",
    "quantized weights": lambda c: bool(c.get("quantization_config")),
    "decoder_sparse_step other than 1": lambda c: c.get("decoder_sparse_step", 1) != 1,
    "mlp_only_layers": lambda c: bool(c.get("mlp_only_layers")),
    "one renormalized expert per token": _single_expert,
}
"""Features that cannot be trained, with the test that finds them in a config."""
