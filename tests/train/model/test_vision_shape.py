"""What is read of the config.json of a model that sees images, in each form, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.fakes.models.sighted import CLASSES, IMAGE, KINDS, sighted_folder

from rollbook.store.errors import ModelError
from rollbook.train.model.memory import parameters
from rollbook.train.model.reshard import RankLayout, check_layout
from rollbook.train.model.shape import read_shape, shape_to_train
from rollbook.train.model.vision import Vision

EACH = pytest.mark.parametrize("kind", KINDS)
EXPECTED = {
    "qwen2_5_vl": Vision(
        *("qwen2_5_vl", 2, 32, 48, 2, 3, 2, 14, 2, IMAGE, (2, 3, 3)),
        window=56,
        whole=(1,),
    ),
    "qwen3_vl": Vision("qwen3_vl", 3, 32, 48, 2, 3, 2, 16, 2, IMAGE, (4, 2, 2), positions=64, deep=(0, 1)),
}


def _config(kind: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((sighted_folder(kind) / "config.json").read_text())
    return config


def _written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@EACH
def test_shape_of_a_config(kind: str) -> None:
    """The tower's values, and the language half's in the family that it is of."""
    shape = read_shape(sighted_folder(kind))
    assert shape.vision == EXPECTED[kind]
    assert (shape.family, shape.layers, shape.hidden, shape.head_dim) == (
        {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}[kind],
        3,
        64,
        16,
    )
    assert (shape.tied, shape.qkv_bias) == (kind == "qwen3_vl", kind == "qwen2_5_vl")
    assert parameters(shape) == sum(
        parameter.numel()
        for parameter in transformers.AutoModelForImageTextToText.from_pretrained(
            sighted_folder(kind)
        ).parameters()
    )


@EACH
def test_older_forms_are_the_same(tmp_path: Path, kind: str) -> None:
    """Keys of transformers 4, and the flat file of the first Qwen2.5-VL."""
    config, shape = _config(kind), read_shape(sighted_folder(kind))
    rope = config["text_config"].pop("rope_parameters")
    theta = rope.pop("rope_theta")
    config["text_config"] |= {"rope_theta": theta, "rope_scaling": rope}
    assert read_shape(_written(tmp_path, config)) == shape
    if kind == "qwen2_5_vl":
        text = config.pop("text_config")
        flat = config | text | {"model_type": kind}
        flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        assert read_shape(_written(tmp_path, flat)) == shape
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert theirs.text_config.hidden_size == shape.hidden
        assert theirs.text_config.rope_parameters["mrope_section"] == [2, 3, 3]


@EACH
def test_keys_that_are_not_there_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Of the tower and of places, where a file says nothing of them."""
    theirs = getattr(transformers, f"{CLASSES[kind]}Config")()
    tower, text = theirs.vision_config, theirs.text_config
    config = _config(kind)
    config["text_config"] |= {"hidden_size": tower.out_hidden_size, "head_dim": 128}
    del config["text_config"]["rope_parameters"], config["image_token_id"]
    config["text_config"]["num_hidden_layers"] = 3
    config["vision_config"] = {"depth": 32, "hidden_size": 1280}
    shape = read_shape(_written(tmp_path, config))
    vision = shape.vision
    assert vision is not None
    assert (vision.ffn, vision.heads, vision.channels) == (
        tower.intermediate_size,
        tower.num_heads,
        tower.in_channels,
    )
    assert (vision.patch, vision.frames, vision.merge) == (
        tower.patch_size,
        tower.temporal_patch_size,
        tower.spatial_merge_size,
    )
    assert vision.window == getattr(tower, "window_size", 0)
    assert vision.whole == tuple(getattr(tower, "fullatt_block_indexes", ()))
    assert vision.positions == getattr(tower, "num_position_embeddings", 0)
    assert vision.deep == tuple(getattr(tower, "deepstack_visual_indexes", ()))
    assert vision.image_token == theirs.image_token_id
    assert shape.rope_theta == text.default_theta


def test_axes_of_frequencies() -> None:
    """In stretches, or in turns of which time has what the others leave; as published models have them."""
    second = replace(EXPECTED["qwen2_5_vl"], sections=(16, 24, 24))
    assert second.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    third = replace(EXPECTED["qwen3_vl"], sections=(24, 20, 20))
    assert third.axes == (0, 1, 2) * 20 + (0,) * 4


def _text(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["text_config"].update(changes)


def _rope(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["text_config"]["rope_parameters"].update(changes)


def _tower(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["vision_config"].update(changes)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (
            "qwen3_vl",
            lambda config: config.update(model_type="qwen3_vl_moe"),
            "'qwen3_vl_moe' cannot be trained",
        ),
        ("qwen2_5_vl", _tower(hidden_act="gelu"), "hidden_act of the tower"),
        ("qwen3_vl", _tower(hidden_act="gelu"), "hidden_act of the tower"),
        (
            "qwen3_vl",
            _tower(rope_parameters={"rope_type": "axial", "rope_theta": 1e5}),
            "of the tower other than",
        ),
        ("qwen3_vl", _tower(rope_parameters={"rope_type": "linear"}), "of the tower other than"),
        ("qwen3_vl", _rope(mrope_interleaved=False), "mrope_interleaved"),
        ("qwen2_5_vl", _rope(mrope_interleaved=True), "mrope_interleaved"),
        ("qwen2_5_vl", _rope(rope_type="yarn"), "rope scaling"),
        ("qwen2_5_vl", _text(use_sliding_window=True), "sliding windows"),
        ("qwen3_vl", _text(attention_bias=True), "attention_bias"),
        ("qwen3_vl", lambda config: config.update(quantization_config={"bits": 4}), "quantized weights"),
        ("qwen3_vl", _rope(mrope_section=[4, 2, 3]), "mrope_section .* half of it"),
        ("qwen3_vl", _rope(mrope_section=[4, "2", 2]), "mrope_section is .* a list of whole numbers"),
        ("qwen3_vl", _tower(out_hidden_size=128), "out_hidden_size 128 .* is 64"),
        (
            "qwen3_vl",
            _tower(deepstack_visual_indexes=[0, 1, 2, 2]),
            "deepstack_visual_indexes .* for 3 layers",
        ),
        ("qwen3_vl", _tower(depth=0), "vision_config.depth is 0"),
        ("qwen2_5_vl", _tower(patch_size=[14, 14]), "vision_config.patch_size is"),
        ("qwen2_5_vl", lambda config: config.update(vision_config=3), "vision_config is 3"),
        ("qwen2_5_vl", lambda config: config["vision_config"].pop("depth"), "'depth'"),
        ("qwen2_5_vl", lambda config: config.pop("vision_config"), "out_hidden_size 3584 .* is 64"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    """By the key that asks for it."""
    config = _config(kind)
    change(config)
    with pytest.raises(ModelError, match=reason):
        read_shape(_written(tmp_path, config))


def test_reward_models_do_not_see_images() -> None:
    """Transformers has none that could be written."""
    with pytest.raises(ModelError, match="sees images, and transformers has no reward model that does"):
        shape_to_train(sighted_folder("qwen3_vl"), 1)


def test_deep_features_stay_in_the_first_stage() -> None:
    """A stage of fewer layers than take features is refused."""
    shape = read_shape(sighted_folder("qwen3_vl"))
    with pytest.raises(ModelError, match="their features go to the first 2 layers"):
        check_layout(shape, RankLayout((1, 1, 1)))
    check_layout(shape, RankLayout((3,)))
