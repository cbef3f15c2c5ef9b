"""The small files of a model directory, which may have come from anywhere: read within bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from rollbook.store.errors import ModelError
from rollbook.store.events import Json
from rollbook.store.fold.versions import Origin

MANIFEST = "rollbook.json"
"""What a checkpoint, or a model that was exported, says of itself."""

PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
"""The files of a low-rank adapter."""

LARGEST = {
    "tokenizer.json": 512 << 20,
    "model.safetensors.index.json": 256 << 20,
    MANIFEST: 64 << 20,
}
"""Bytes of a file at most, by its name; of any other OTHERS."""
OTHERS = 16 << 20
INDEX = "model.safetensors.index.json"
SHARDS = "shard-*-of-*.safetensors"
"""The files of a checkpoint of which each rank of a training wrote one."""


def model_file(model: Path, name: str) -> Path | None:
    """A file of a model directory; None if it is not there.

    Links may lead elsewhere within the directory, and, in Hugging Face's cache, to where that keeps files.

    Raises:
        ModelError: it is no plain file, is too large, or lies elsewhere.
    """
    file = model / name
    size = _checked(model, file)
    if size is None:
        return None
    if size > LARGEST.get(name, OTHERS):
        raise ModelError(f"{file}: holds {size} bytes, more than any such file: copy the model anew")
    return file


def require_folder(model: Path, named_by: str) -> None:
    """Check that there is a model directory at all.

    Args:
        named_by: the option or key that names it, for the message.

    Raises:
        ModelError: there is none.
    """
    if not model.is_dir():
        what = "is no folder" if model.exists() else "is not there"
        raise ModelError(
            f"the model {model} {what}: let {named_by} name a Hugging Face model directory, or a model at "
            "the hub, such as Qwen/Qwen3-0.6B"
        )


def weight_files(model: Path) -> list[Path]:
    """The safetensors files of a model directory, as its index names them or all there are, in order.

    Raises:
        ModelError: one is no plain file, lies elsewhere, or is missing; or ranks wrote pieces of tensors.
    """
    index = read_json(model, INDEX).get("weight_map", {})
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ModelError(f"{model / INDEX}: its weight_map names no files: copy the model anew")
    names = sorted(set(index.values())) or sorted(file.name for file in model.glob("model*.safetensors"))
    if not names and is_sharded(model):
        raise ModelError(
            f"{model}: a checkpoint in which each rank wrote its own pieces of tensors (checkpoint.sharded), "
            "which is no model directory: `rollbook export model` makes one of it"
        )
    for name in names:
        if Path(name).name != name:
            raise ModelError(
                f"{model / INDEX}: names {name!r}, which is no file beside it: copy the model anew"
            )
        if _checked(model, model / name) is None:
            raise ModelError(f"{model / name}: is missing: copy the model anew")
    return [model / name for name in names]


def is_sharded(model: Path) -> bool:
    """Whether it is a checkpoint of which each rank of a training wrote its own pieces of tensors."""
    return any(model.glob(SHARDS))


def _checked(model: Path, file: Path) -> int | None:
    """The size of a plain file of the model's; None if it is not there.

    Raises:
        ModelError: it is no such file.
    """
    try:
        if not file.exists() and not file.is_symlink():
            return None
        real = file.resolve(strict=True)
        size, plain = real.stat().st_size, real.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # of a circle of links, of a name with a zero byte
        raise ModelError(f"{file}: cannot be read: {error}; copy the model anew") from error
    if not plain:
        raise ModelError(f"{file}: is no plain file; copy the model anew")
    if not any(real.is_relative_to(home) for home in _homes(model)):
        raise ModelError(f"{file}: is a link to {real}, out of the model's directory: copy the file there")
    return size


def _homes(model: Path) -> list[Path]:
    """Where files of a model may lie: its directory, and the cache's folder of that model.

    Hugging Face's cache has `models--NAME/snapshots/REVISION/`, with links into `models--NAME/blobs/`.
    """
    homes = [model.resolve()]
    for path in (model.absolute(), model.resolve()):
        if path.parent.name == "snapshots":
            homes.append(path.parent.parent.resolve())
    return homes


def read_text(file: Path) -> str:
    """A file as text.

    Raises:
        ModelError: it cannot be read, or is no UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}; copy the model anew") from error


def read_json(model: Path, name: str) -> Json:
    """A file of a model directory as a JSON object; an empty one if it is not there.

    Raises:
        ModelError: it is none, or cannot be read.
    """
    file = model_file(model, name)
    if file is None:
        return {}
    try:
        value = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelError(f"{file}: is not JSON ({error}); copy the model anew") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return value


_Kind = tuple[str, Callable[[Any], bool]]
_WHOLE: _Kind = ("a whole number above 0", lambda value: type(value) is int and value > 0)
_FROM_0: _Kind = ("a whole number", lambda value: type(value) is int and value >= 0)
_NUMBER: _Kind = ("a number", lambda value: type(value) in (int, float))
_TRUTH: _Kind = ("true or false", lambda value: type(value) is bool)
_TEXT: _Kind = ("a text", lambda value: type(value) is str)
_NAMES: _Kind = ("a list of texts", lambda value: type(value) is list and all(type(v) is str for v in value))
_OBJECT: _Kind = ("an object", lambda value: type(value) is dict)
CONFIG_KEYS: dict[str, _Kind] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"), _WHOLE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _WHOLE),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), _WHOLE),
    **dict.fromkeys(("moe_intermediate_size", "num_labels", "decoder_sparse_step"), _WHOLE),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), _FROM_0),
    **dict.fromkeys(("sliding_window", "sliding_window_pattern"), _FROM_0),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_local_base_freq", "factor"), _NUMBER),
    **dict.fromkeys(("beta_fast", "beta_slow", "partial_rotary_factor"), _NUMBER),
    **dict.fromkeys(("query_pre_attn_scalar", "swiglu_limit", "swiglu_alpha"), _NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob", "use_sliding_window", "truncate"), _TRUTH),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bidirectional_attention"), _TRUTH),
    **dict.fromkeys(("hidden_act", "hidden_activation", "rope_type", "type"), _TEXT),
    **dict.fromkeys(("layer_types", "architectures"), _NAMES),
    **dict.fromkeys(
        ("rope_parameters", "rope_scaling", "id2label", "full_attention", "sliding_attention"), _OBJECT
    ),
}
"""What keys of a config.json must be, where they are there and not null, in the families that are trained."""


def check_types(file: Path, config: dict[str, Any], within: str = "") -> None:
    """Check that the values of a config.json have the right types, also in its rope objects.

    Raises:
        ModelError: something has not; the file, the key and its value are named.
    """
    for key, value in config.items():
        if value is None or key not in CONFIG_KEYS:
            continue
        wanted, holds = CONFIG_KEYS[key]
        if not holds(value):
            raise ModelError(
                f"{file}: {within}{key} is {value!r}, which is ill-typed: it must be {wanted}; "
                "copy the model anew"
            )
        if wanted == _OBJECT[0] and key != "id2label":
            check_types(file, value, f"{within}{key}.")


def origin_of(model: Path) -> Origin | None:
    """The version that a checkpoint, or an exported model, claims to be; None for any other model.

    Raises:
        ModelError: its manifest is damaged.
    """
    if model_file(model, MANIFEST) is None:
        return None
    manifest = read_json(model, MANIFEST)
    try:
        named = str(manifest.get("run", "")), str(manifest.get("policy", ""))
        return Origin(*named, int(manifest["policy_version"]), str(manifest["weights_digest"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{model / MANIFEST}: damaged: {error!r}") from error


def check_unchanged(model: Path, origin: Origin | None, digest: str) -> None:
    """Check that a model's weights match its manifest.

    Args:
        digest: of its weights.

    Raises:
        ModelError: they do not; both digests are named.
    """
    if origin is not None and digest != origin.digest:
        raise ModelError(
            f"{model}: its weights were changed after they were written: their digest is {digest[:16]}, and "
            f"its {MANIFEST} names {origin.digest[:16]}. Export or copy it anew; or take its {MANIFEST} "
            "away, and it is a model of no run"
        )
