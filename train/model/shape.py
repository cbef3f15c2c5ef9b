"""Reads the shape of a model from its Hugging Face config.json, for the families that can be
trained.

The keys of transformers 4 (`rope_theta`, `rope_scaling`, `num_experts`) and of 5
(`rope_parameters`, `num_local_experts`) are read. What the trainer would compute differently
from transformers is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollbook.engines.model_files import check_types, read_json
from rollbook.store.errors import ModelError
from rollbook.train.select.routing import Mixture

VOCAB_DIVISOR = 128
GEMMA3, GPT_OSS = "gemma3_text", "gpt_oss"
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", GEMMA3, GPT_OSS)
"""The values of `model_type` that are trained."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""How a config calls layers without a window and with one."""
GELU = "gelu_pytorch_tanh"
_PATTERNS = {GEMMA3: 6, GPT_OSS: 2}
"""Of families whose layers have windows: after how many comes one without, unless a config says otherwise."""
_SCALED = {GEMMA3: ("default", "linear"), GPT_OSS: ("yarn",)}
"""Of families whose rotation is scaled, how (`rope_type`); of layers with a window only if of all."""
SCORES = "ForSequenceClassification"
"""How the architectures of models with a head of scores end."""
SCORE_LABELS = ("reward", "log_deviation")
"""What the values of a reward model's head are called in its config, of as many as it has."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in every layer.

    `ffn` is the inner width of one expert; `renormalized` says that the weights of the chosen
    experts are divided by their sum. `limit` clamps gates from above and the other half on both
    sides; None: nothing is clamped.
    """

    count: int
    per_token: int
    ffn: int
    renormalized: bool
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers in which a token attends only to the last `size` tokens, itself among them.

    `layers` says for each layer of the model whether it has a window. Queries and keys of these
    are rotated by `rope_theta`, those of the others by the model's; None: all by the model's.
    """

    size: int
    layers: tuple[bool, ...]
    rope_theta: float | None = None


@dataclass(frozen=True, slots=True)
class Yarn:
    """The rotation by YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies that turn more than `fast` times
    in the `original` context stay, those below `slow` turns are divided by `factor`, with a ramp between,
    whose ends are whole numbers if it is `truncated`."""

    factor: float
    original: int
    fast: float
    slow: float
    truncated: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The values of a config.json that determine the model.

    `ffn` is the inner width of a dense layer, which a model of experts does not use. `scores` is
    0 for a model that predicts tokens; otherwise the number of values that its head `score`
    gives each token instead. Positions are divided by `rope_factor` before the rotation, except
    in layers with a window. The products of queries and keys are divided by the root of
    `query_scalar`; None: by that of `head_dim`.
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
    windows: Windows | None = None
    rope_factor: float = 1.0
    query_scalar: float | None = None
    yarn: Yarn | None = None

    @property
    def outputs(self) -> int:
        """The number of values that the model gives each token: the vocabulary's, or its scores."""
        return self.scores or self.vocab

    def work(self, tokens: int) -> int:
        """Floating-point operations of a forward pass over a sample of so many tokens: 2 for every
        weight and token, and causal attention between the tokens (Kaplan et al. 2020,
        arXiv:2001.08361, table 1), none before the window in a layer that has one."""
        inner = self.heads * self.head_dim
        attention = self.hidden * (2 * inner + 2 * self.kv_heads * self.head_dim)
        experts = self.experts
        width = experts.ffn * experts.per_token if experts else self.ffn
        router = self.hidden * experts.count if experts else 0
        weights = self.layers * (attention + 3 * self.hidden * width + router) + self.hidden * self.outputs
        windowed = self.windowed
        within = min(tokens, self.windows.size) if self.windows else tokens
        pairs = (self.layers - windowed) * tokens * tokens + windowed * within * (2 * tokens - within)
        return 2 * tokens * weights + 2 * inner * pairs

    @property
    def mixture(self) -> Mixture | None:
        """Its mixture of experts in the form that recorded routing has; None of a dense model."""
        experts = self.experts
        return None if experts is None else Mixture(self.layers, experts.count, experts.per_token)

    @property
    def windowed(self) -> int:
        """How many layers have a window."""
        return sum(self.windows.layers) if self.windows else 0

    @property
    def padded_vocab(self) -> int:
        """Rows of Megatron's embedding."""
        return -(-self.vocab // VOCAB_DIVISOR) * VOCAB_DIVISOR

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.family in ("qwen2", GPT_OSS)

    @property
    def two_rotations(self) -> bool:
        """Whether layers with a window rotate queries and keys with another base than the others."""
        return self.windows is not None and self.windows.rope_theta is not None

    @property
    def biases(self) -> bool:
        """Whether all other linear layers have a bias, too: the attention's output, router and
        experts."""
        return self.family == GPT_OSS

    @property
    def sinks(self) -> bool:
        """Whether every head has a sink: a score in the softmax of each query that adds nothing to
        the output."""
        return self.family == GPT_OSS

    @property
    def fused_experts(self) -> bool:
        """Whether files hold the experts of a layer as one tensor."""
        return self.family == GPT_OSS

    @property
    def qk_norm(self) -> bool:
        """Whether every head's query and key is normalized."""
        return self.family in ("qwen3", "qwen3_moe", GEMMA3)

    @property
    def output_norms(self) -> bool:
        """Whether the outputs of attention and of the feed-forward layer are normalized before they
        are added."""
        return self.family == GEMMA3

    @property
    def zero_centred_norms(self) -> bool:
        """Whether norms multiply by 1 + their weight; else by the weight."""
        return self.family == GEMMA3

    @property
    def scaled_embedding(self) -> bool:
        """Whether the layers' input is the embedding times the root of `hidden`."""
        return self.family == GEMMA3

    @property
    def gelu(self) -> bool:
        """Whether gates pass through GELU, by its approximation with tanh; else through SiLU."""
        return self.family == GEMMA3


def read_shape(model: Path) -> ModelShape:
    """The shape a model directory's config.json describes.

    Raises:
        ModelError: there is none, or it asks for what is not trained.
    """
    file = model / "config.json"
    if not file.exists():
        raise ModelError(f"{model}: holds no config.json, so it is no model directory")
    config = read_json(model, file.name)
    if config.get("model_type") not in FAMILIES:
        raise ModelError(
            f"{model}: architecture {config.get('model_type')!r} cannot be trained; "
            f"this release trains {', '.join(FAMILIES)}"
        )
    check_types(file, config)
    try:
        reasons = [reason for reason, holds in _REFUSED.items() if holds(config)]
        if reasons:
            raise ModelError(f"{model}: {'; '.join(reasons)}: not supported by this release's trainer")
        return _shape(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file}: a key is missing or ill-typed: {error!r}") from error


def shape_to_train(model: Path, scores: int) -> ModelShape:
    """The shape in which an algorithm trains a model: for a reward model with a head of scores in
    place of the vocabulary's logits.

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
    """The width of the head of a `ForSequenceClassification` model; 0 for any other model."""
    if not any(name.endswith(SCORES) for name in config.get("architectures") or ()):
        return 0
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)


def _shape(config: dict[str, Any]) -> ModelShape:
    family, heads = config["model_type"], config["num_attention_heads"]
    if family == "llama":  # files of the first Llama models lack keys that were added later
        config = {"rope_theta": 10000.0} | config
        config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    rope, of_windows = _rotations(config)
    head_dim = config.get("head_dim")
    if head_dim is None:
        if family in ("qwen3", GEMMA3, GPT_OSS):  # transformers would take a number, whatever the widths
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
        tied=bool(config.get("tie_word_embeddings", family == GEMMA3)),
        experts=_experts(config) if family in ("qwen3_moe", GPT_OSS) else None,
        scores=_scores(config),
        windows=_windows(config, of_windows.get("rope_theta")) if family in _PATTERNS else None,
        rope_factor=float(rope["factor"]) if _rope_type(rope) == "linear" else 1.0,
        query_scalar=float(config.get("query_pre_attn_scalar", 256)) if family == GEMMA3 else None,
        yarn=_yarn(rope) if family == GPT_OSS else None,
    )


def _experts(config: dict[str, Any]) -> Experts:
    count = config.get("num_experts") or config["num_local_experts"]
    alike = config["model_type"] == GPT_OSS
    return Experts(
        count=count,
        per_token=config["num_experts_per_tok"],
        ffn=config["intermediate_size" if alike else "moe_intermediate_size"],
        renormalized=alike or bool(config.get("norm_topk_prob", False)),
        limit=float(config.get("swiglu_limit", 7.0)) if alike else None,
    )


def _yarn(rope: dict[str, Any]) -> Yarn:
    return Yarn(
        factor=float(rope["factor"]),
        original=rope["original_max_position_embeddings"],
        fast=float(rope.get("beta_fast") or 32),
        slow=float(rope.get("beta_slow") or 1),
        truncated=bool(rope.get("truncate", True)),
    )


def _windows(config: dict[str, Any], rope_theta: float | None) -> Windows | None:
    """The layers with a window, named one by one or, in files of transformers 4, by their pattern."""
    layers = config["num_hidden_layers"]
    every = config.get("sliding_window_pattern", _PATTERNS[config["model_type"]])
    kinds = config.get("layer_types") or [
        FULL if number % every == 0 else SLIDING for number in range(1, layers + 1)
    ]
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        raise ValueError(f"layer_types {kinds} of {layers} layers")
    if SLIDING not in kinds:
        return None
    if (size := int(config["sliding_window"])) < 1:
        raise ValueError(f"sliding_window {size}")
    theta = None if rope_theta is None else float(rope_theta)
    return Windows(size, tuple(kind == SLIDING for kind in kinds), theta)


def _rotations(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotation settings of queries and keys; and those of layers with a window, if they differ."""
    rope = config.get("rope_parameters") or {}
    if config["model_type"] != GEMMA3:
        return rope or config.get("rope_scaling") or {}, {}
    if set(rope) - {FULL, SLIDING}:  # transformers would not look at these
        raise ValueError(f"rope_parameters by kind of layer, not {sorted(rope)}")
    full = {"rope_theta": config.get("rope_theta", 1e6)} | (rope.get(FULL) or {})
    sliding = {"rope_theta": config.get("rope_local_base_freq", 1e4)} | (rope.get(SLIDING) or {})
    return full | (config.get("rope_scaling") or {}), sliding


def _rope_type(rope: dict[str, Any]) -> str:
    # transformers 4 once wrote `type` for `rope_type`.
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    return kind


def _scaled_rope(config: dict[str, Any]) -> bool:
    rope, of_windows = _rotations(config)
    known = _SCALED.get(config["model_type"], ("default",))
    # How much YaRN scales the products of queries and keys is computed, not read.
    explicit = any(rope.get(key) is not None for key in ("attention_factor", "mscale", "mscale_all_dim"))
    return _rope_type(rope) not in known or _rope_type(of_windows) != "default" or explicit


def _partial_rope(config: dict[str, Any]) -> bool:
    factors = [rope.get("partial_rotary_factor") for rope in _rotations(config)]
    return any(f not in (None, 1, 1.0) for f in (*factors, config.get("partial_rotary_factor")))


def _sliding(config: dict[str, Any]) -> bool:
    if config["model_type"] in _PATTERNS:
        return False
    kinds = set(config.get("layer_types") or ())
    return bool(config.get("use_sliding_window")) or bool(kinds - {FULL})


def _biased(config: dict[str, Any]) -> bool:
    return bool(config["model_type"] == GPT_OSS)


def _activation(config: dict[str, Any]) -> bool:
    if config["model_type"] == GEMMA3:
        return bool(config.get("hidden_activation", GELU) != GELU)
    return bool(config.get("hidden_act", "silu") != "silu")


def _softcapping(config: dict[str, Any]) -> bool:
    return any(config.get(f"{place}_logit_softcapping") is not None for place in ("attn", "final"))


def _single_expert(config: dict[str, Any]) -> bool:
    # Renormalized, its weight is 1 whatever the router says: Megatron has no such router.
    return config.get("num_experts_per_tok") == 1 and bool(config.get("norm_topk_prob") or _biased(config))


_REFUSED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "attention_bias": lambda c: bool(c.get("attention_bias", _biased(c))) != _biased(c),
    "mlp_bias": lambda c: bool(c.get("mlp_bias")),
    "sliding windows": _sliding,
    "rope scaling (rope_type other than 'default'; of Gemma 3's global layers also 'linear'; of gpt-oss "
    "other than 'yarn', scaled by its factor alone)": _scaled_rope,
    "partial_rotary_factor": _partial_rope,
    "hidden_act other than silu, or hidden_activation of Gemma 3 other than gelu_pytorch_tanh": _activation,
    "softcapping of logits": _softcapping,
    "swiglu_alpha other than 1.702": lambda c: c.get("swiglu_alpha", 1.702) != 1.702,
    "use_bidirectional_attention": lambda c: bool(c.get("use_bidirectional_attention")),
    "quantized weights": lambda c: bool(c.get("quantization_config")),
    "decoder_sparse_step other than 1": lambda c: c.get("decoder_sparse_step", 1) != 1,
    "mlp_only_layers": lambda c: bool(c.get("mlp_only_layers")),
    "one renormalized expert per token": _single_expert,
}
"""Features that cannot be trained, with the test that finds them in a config."""
