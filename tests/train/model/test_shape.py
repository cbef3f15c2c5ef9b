"""What is read of a config.json, in the keys of transformers 4 and 5, and what is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.engines.model_files import CONFIG_KEYS
from rollbook.store.errors import ModelError
from rollbook.train.model.shape import Experts, ModelShape, Windows, Yarn, read_shape


def _written(folder: Path, **changes: Any) -> Path:
    """A folder with only a config.json, of a Qwen3 but for the changes; `...` leaves a key out."""
    values: dict[str, Any] = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 100,
        "max_position_embeddings": 48,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    values = {k: v for k, v in (values | changes).items() if v is not ...}
    (folder / "config.json").write_bytes(orjson.dumps(values))
    return folder


def test_shape_of_a_config(tmp_path: Path) -> None:
    """Every field of the shape comes from its key, the base of the rotation from either place."""
    shape = read_shape(_written(tmp_path))
    assert shape == ModelShape("qwen3", 2, 32, 64, 4, 2, 8, 100, 48, 1e-6, 1e4, False)
    assert (shape.padded_vocab, shape.qk_norm, shape.qkv_bias) == (128, True, False)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert read_shape(_written(tmp_path, rope_theta=..., rope_parameters=rope)).rope_theta == 5e5
    assert read_shape(_written(tmp_path, tie_word_embeddings=True)).tied


MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}


def test_shape_of_experts(tmp_path: Path) -> None:
    """Experts are read under the key of transformers 4 and of 5; their sum is not one unless it says so."""
    shape = read_shape(_written(tmp_path, **MOE, decoder_sparse_step=1, mlp_only_layers=[]))
    assert shape.experts == Experts(8, 3, 24, False)
    assert (shape.qk_norm, shape.qkv_bias) == (True, False)
    five = MOE | {"num_experts": ..., "num_local_experts": 8, "norm_topk_prob": True}
    assert read_shape(_written(tmp_path, **five)).experts == Experts(8, 3, 24, True)
    assert read_shape(_written(tmp_path)).experts is None


GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
    "rope_local_base_freq": 1e3,
    "rope_theta": 1e6,
}


def test_shape_of_windows(tmp_path: Path) -> None:
    """Kinds of layers, both rotations and the scale of scores, in the keys of transformers 4 and of 5; what
    is left out has the defaults of Gemma 3."""
    shape = read_shape(_written(tmp_path, **GEMMA))
    windows = Windows(512, (True, True, False, True), 1e3)
    assert (shape.windows, shape.rope_theta, shape.rope_factor, shape.query_scalar) == (
        windows,
        1e6,
        1.0,
        256.0,
    )
    assert (shape.tied, shape.qk_norm, shape.output_norms, shape.gelu, shape.windowed) == (True,) * 4 + (3,)
    scaled = GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": False}
    shape = read_shape(_written(tmp_path, **scaled, query_pre_attn_scalar=168))
    assert (shape.rope_theta, shape.rope_factor, shape.query_scalar, shape.tied) == (1e6, 8.0, 168.0, False)
    ropes = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 100.0}}
    kinds = ["full_attention", "sliding_attention"]
    five = GEMMA | {"rope_parameters": ropes, "layer_types": kinds, "num_hidden_layers": 2}
    shape = read_shape(_written(tmp_path, **five))
    assert (shape.windows, shape.rope_theta) == (Windows(512, (False, True), 100.0), 1e5)
    bare = read_shape(
        _written(tmp_path, **GEMMA | {"sliding_window_pattern": ..., "rope_local_base_freq": ...})
    )
    assert bare.windows == Windows(512, (True,) * 4, 1e4)
    assert read_shape(_written(tmp_path, **GEMMA | {"sliding_window_pattern": 1})).windows is None
    assert not read_shape(_written(tmp_path)).windowed


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 128,
    "rope_theta": ...,
    "rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
}


def test_shape_of_sinks(tmp_path: Path) -> None:
    """Every second layer has a window unless it is said, all are rotated alike; experts are as wide as the
    model says, and their gates clamped."""
    shape = read_shape(_written(tmp_path, **OSS))
    assert shape.windows == Windows(128, (True, False))
    assert shape.experts == Experts(8, 3, 64, True, 7.0)
    assert shape.yarn == Yarn(32.0, 4096, 16.0, 2.0, truncated=False)
    assert (shape.sinks, shape.biases, shape.qkv_bias, shape.fused_experts) == (True,) * 4
    assert not shape.two_rotations
    four = OSS | {"rope_theta": 1e4, "rope_parameters": ..., "rope_scaling": YARN, "swiglu_limit": 5.0}
    shape = read_shape(_written(tmp_path, **four))
    assert shape.yarn == Yarn(32.0, 4096, 32.0, 1.0, truncated=True)
    assert shape.experts is not None
    assert (shape.experts.limit, shape.rope_theta) == (5.0, 1e4)


def test_work_of_windows() -> None:
    """Of long samples layers with a window take less, and in proportion to the length; of short ones as
    much as others."""
    plain = ModelShape("llama", 2, 32, 64, 4, 2, 8, 100, 4096, 1e-6, 1e4, False)
    both = replace(plain, windows=Windows(16, (True, False), 1e4))
    assert both.work(16) == plain.work(16)
    attended = 16 * 17 // 2 + 16 * (1000 - 16)  # by counting pairs one by one
    assert plain.work(1000) - both.work(1000) == pytest.approx(
        4 * 32 * (1000 * 1001 // 2 - attended), rel=0.01
    )


def test_what_older_files_leave_out(tmp_path: Path) -> None:
    """Head size follows from the widths, a Llama's key-value heads and rotation base have old defaults."""
    bare = {"model_type": "llama", "head_dim": ..., "num_key_value_heads": ..., "rope_theta": ...}
    shape = read_shape(_written(tmp_path, **bare, hidden_size=48))
    assert (shape.head_dim, shape.kv_heads, shape.rope_theta) == (12, 4, 10000.0)
    assert (shape.qk_norm, shape.qkv_bias) == (False, False)
    assert read_shape(_written(tmp_path, model_type="llama", head_dim=None)).head_dim == 8
    qwen2 = read_shape(_written(tmp_path, model_type="qwen2", head_dim=...))
    assert (qwen2.head_dim, qwen2.qk_norm, qwen2.qkv_bias) == (8, False, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "mamba"},
            "'mamba' cannot be trained; this release trains llama, .*, gemma3_text, gpt_oss$",
        ),
        ({"model_type": ...}, "None cannot be trained"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, "one renormalized expert"),
        (MOE | {"num_experts": ...}, "num_local_experts"),
        ({"head_dim": ...}, "head_dim"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"model_type": "qwen2", "rope_theta": ...}, "rope_theta"),
        ({"rope_theta": "large"}, "ill-typed"),
        (OSS | {"attention_bias": False}, "attention_bias"),
        (OSS | {"quantization_config": {"quant_method": "mxfp4"}}, "quantized"),
        (OSS | {"rope_parameters": {"rope_type": "default"}}, "rope scaling"),
        (OSS | {"rope_parameters": YARN | {"attention_factor": 1.2}}, "scaled by its factor alone"),
        (OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        (OSS | {"num_experts_per_tok": 1}, "one renormalized expert"),
        (OSS | {"hidden_act": "gelu"}, "hidden_act"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "softcapping"),
        (GEMMA | {"attn_logit_softcapping": 50.0}, "softcapping"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA | {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope scaling"),
        (GEMMA | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "rope scaling"),
        (GEMMA | {"rope_parameters": {"rope_type": "default"}}, "by kind of layer"),
        (GEMMA | {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary"),
        (GEMMA | {"layer_types": ["full_attention"]}, "of 4 layers"),
        (GEMMA | {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        (GEMMA | {"sliding_window": None}, "ill-typed"),
        (GEMMA | {"sliding_window": 0}, "sliding_window 0"),
        (GEMMA | {"head_dim": ...}, "head_dim"),
        (GEMMA | {"model_type": "gemma3"}, "'gemma3' cannot be trained"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, changes: Any, reason: str) -> None:
    """What this trainer would compute otherwise than transformers is a ModelError that says why."""
    with pytest.raises(ModelError, match=reason):
        read_shape(_written(tmp_path, **changes))


WRONG: tuple[Any, ...] = ("32", "", 1.5, -1, True, [1], {"a": 1}, float(1 << 40))


@pytest.mark.parametrize("of", [{}, MOE, GEMMA, OSS, {"model_type": "llama"}, {"model_type": "qwen2"}])
def test_a_value_of_another_type_is_named(tmp_path: Path, of: Any) -> None:
    """With its file and its key, whatever it is in place of what it should be: a ModelError, or a shape."""
    file = _written(tmp_path, **of) / "config.json"
    config = orjson.loads(file.read_bytes())
    for key in {*config, *CONFIG_KEYS} - {"model_type"}:
        for value in WRONG:
            file.write_text(json.dumps(config | {key: value}))
            if key not in CONFIG_KEYS or CONFIG_KEYS[key][1](value):
                with contextlib.suppress(ModelError):
                    read_shape(tmp_path)
                continue
            with pytest.raises(ModelError) as raised:
                read_shape(tmp_path)
            assert f"{file}: {key} is {value!r}, which is ill-typed: it must be " in str(raised.value)


def test_a_value_of_another_type_in_an_object(tmp_path: Path) -> None:
    """Its key is named with those it lies in."""
    rope = {"full_attention": {"rope_type": "default", "rope_theta": "1e6"}}
    with pytest.raises(ModelError, match=r"config.json: rope_parameters.full_attention.rope_theta is '1e6'"):
        read_shape(_written(tmp_path, **GEMMA, rope_parameters=rope))


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    """No config.json, or one that is no JSON, names the place."""
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_shape(tmp_path)
