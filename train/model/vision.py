"""The vision part of a model, as its config.json has it: the tower that makes features of patches, and how
places along three axes turn the queries and keys of its language half. Pure.

Keys are read as transformers 4 and 5 write them: those of the language half in `text_config`, or beside the
others as first files of Qwen2.5-VL have them. Models are those of arXiv:2502.13923 and arXiv:2511.21631.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["qwen2_5_vl", "qwen3_vl"]
QWEN2_5_VL: Kind = "qwen2_5_vl"
QWEN3_VL: Kind = "qwen3_vl"
LANGUAGE: dict[str, str] = {QWEN2_5_VL: "qwen2", QWEN3_VL: "qwen3"}
"""The values of `model_type` of trained models that see images, and the family of their language half."""
GELU = "gelu_pytorch_tanh"
ROPE_BASE = 10000.0
"""Of the rotation in towers."""


@dataclass(frozen=True, slots=True)
class Vision:
    """The values of a config.json that determine the tower, and what it does to the language half.

    Attributes:
        layers, hidden, ffn, heads: of the tower; a feature is as wide as the language half's `hidden`.
        channels, frames, patch: of a patch; `frames` is how often an image is repeated within.
        merge: the side of the square of patches of which one feature is made.
        image_token: the id that stands in a prompt where a feature of an image goes.
        sections: how many frequencies of queries and keys the places in time, rows and columns turn.
        window: side in pixels of the windows in which layers of the tower attend; 0: there are none.
        whole: the layers of the tower that attend without windows, where others have one.
        positions: of the tower's table of positions; 0: it has none.
        deep: the layers of the tower after which further features are made. The first of these are added to
            the output of the language half's first layer, the next to that of its second, and so on.
    """

    kind: Kind
    layers: int
    hidden: int
    ffn: int
    heads: int
    channels: int
    frames: int
    patch: int
    merge: int
    image_token: int
    sections: tuple[int, int, int]
    window: int = 0
    whole: tuple[int, ...] = ()
    positions: int = 0
    deep: tuple[int, ...] = ()

    @property
    def interleaved(self) -> bool:
        """Whether the axes take frequencies in turns; else each has its own stretch of them."""
        return self.kind == QWEN3_VL

    @property
    def columns(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch * self.patch

    @property
    def axes(self) -> tuple[int, ...]:
        """Of each frequency of queries and keys the axis whose place turns it: 0 time, 1 rows, 2 columns.

        Where axes take turns, what rows and columns leave at the end is time's.
        """
        if not self.interleaved:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        _, rows, columns = self.sections
        turns = [(1, rows), (2, columns)]
        taken = {axis + 3 * turn: axis for axis, count in turns for turn in range(count)}
        return tuple(taken.get(at, 0) for at in range(sum(self.sections)))


_DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN2_5_VL: {"patch_size": 14, "intermediate_size": 3420, "hidden_act": "silu"}
    | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    QWEN3_VL: {"patch_size": 16, "intermediate_size": 4304, "hidden_act": GELU}
    | {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
}
_OF_BOTH = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 16}
"""What transformers takes for keys that are not there, as well."""
_SECTIONS = {QWEN2_5_VL: [16, 24, 24], QWEN3_VL: [24, 20, 20]}
_THETA = {QWEN2_5_VL: 1e6, QWEN3_VL: 5e5}
IMAGE_TOKEN = 151655


def vision_of(config: dict[str, Any]) -> Vision | None:
    """The vision part of a config.json; None of a text model's.

    Raises:
        KeyError, TypeError, ValueError: a key is missing, or two do not agree.
    """
    if config["model_type"] not in LANGUAGE:
        return None
    kind, values = config["model_type"], _tower(config)
    text = language_of(config)
    sections = _rope(text).get("mrope_section") or _SECTIONS[kind]
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if len(sections) != 3 or 2 * sum(sections) != head_dim:
        raise ValueError(
            f"mrope_section {sections} of heads of width {head_dim}: together they are half of it"
        )
    if (width := values.get("out_hidden_size", 3584)) != text["hidden_size"]:
        raise ValueError(
            f"out_hidden_size {width} of a language half whose hidden_size is {text['hidden_size']}"
        )
    deep = tuple(values["deepstack_visual_indexes"]) if kind == QWEN3_VL else ()
    if len(deep) > text["num_hidden_layers"]:
        raise ValueError(f"deepstack_visual_indexes {list(deep)} for {text['num_hidden_layers']} layers")
    return Vision(
        kind=kind,
        layers=values["depth"],
        hidden=values["hidden_size"],
        ffn=values["intermediate_size"],
        heads=values["num_heads"],
        channels=values["in_channels"],
        frames=values["temporal_patch_size"],
        patch=values["patch_size"],
        merge=values["spatial_merge_size"],
        image_token=config.get("image_token_id", IMAGE_TOKEN),
        sections=(sections[0], sections[1], sections[2]),
        window=values["window_size"] if kind == QWEN2_5_VL else 0,
        whole=tuple(values["fullatt_block_indexes"]) if kind == QWEN2_5_VL else (),
        positions=values["num_position_embeddings"] if kind == QWEN3_VL else 0,
        deep=deep,
    )


def language_of(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the language half alone; a text model's is its own."""
    kind = config["model_type"]
    if kind not in LANGUAGE:
        return config
    values = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    # Whether the embedding is the output, too, says the whole model's key alone.
    text = {k: v for k, v in (config.get("text_config") or {}).items() if k != "tie_word_embeddings"}
    values = {"rope_theta": _THETA[kind]} | values | text | {"model_type": LANGUAGE[kind]}
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key) or {}
        if kind == QWEN2_5_VL and "mrope" in (rope.get("rope_type"), rope.get("type")):
            values[key] = rope | {"rope_type": "default", "type": "default"}
    return values


def _tower(config: dict[str, Any]) -> dict[str, Any]:
    return _OF_BOTH | _DEFAULTS[config["model_type"]] | (config.get("vision_config") or {})


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return rope


def _other_rotation(config: dict[str, Any]) -> bool:
    rope = _tower(config).get("rope_parameters") or {}
    known = rope.get("rope_type", "axial") in ("axial", "default")
    return not known or rope.get("rope_theta", ROPE_BASE) != ROPE_BASE


def _other_turns(config: dict[str, Any]) -> bool:
    turns = _rope(language_of(config)).get("mrope_interleaved")
    return turns is not None and turns != (config["model_type"] == QWEN3_VL)


REFUSED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "hidden_act of the tower other than silu (qwen2_5_vl) and gelu_pytorch_tanh (qwen3_vl)": lambda c: (
        _tower(c)["hidden_act"] != _DEFAULTS[c["model_type"]]["hidden_act"]
    ),
    "rope_parameters of the tower other than axial with rope_theta 10000": _other_rotation,
    "mrope_interleaved other than true of qwen3_vl and false of qwen2_5_vl": _other_turns,
}
"""Features of models that see images that cannot be trained, with the test that finds them in a config."""
