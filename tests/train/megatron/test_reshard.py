"""Weights leave one tensor at a time, whole from one rank or from many, and never as a second copy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_maps import to_megatron

from rollbook.ingest.engines.weights.digests import read_weights
from rollbook.store.errors import ModelError
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.megatron.backend import TrainablePolicy
from rollbook.train.megatron.reshard import RankLayout, check_layout, one_rank, rank_weights
from rollbook.train.megatron.shape import ModelShape, read_shape
from rollbook.train.megatron.weight_names import plan

PROGRAM = Path(__file__).parent / "ranks.py"
ROOT = Path(__file__).parents[3]


def _model(folder: Path, family: str, **changes: Any) -> None:
    """Write a tiny transformers model with random weights, biases too."""
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
    config = getattr(transformers, f"{family}Config")(**(values | changes))
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(fabric: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models: dense tied and untied, with biases, with experts."""
    place = tmp_path_factory.mktemp("spread")
    for tied in (True, False):
        fabric.make_model(place / f"qwen3-{'tied' if tied else 'untied'}", tied=tied)
    _model(place / "qwen2", "Qwen2")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    _model(place / "qwen3_moe", "Qwen3Moe", norm_topk_prob=True, **experts)
    return place


@pytest.fixture(scope="session")
def found(folders: Path) -> list[dict[str, Any]]:
    """What four processes over gloo say, a record per model, layout and copy of the model."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests' / 'fakes'}",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folders)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


MODELS = ("qwen2", "qwen3-tied", "qwen3-untied", "qwen3_moe")
LAYOUTS = {"tensor 2": [2, 1, 1], "pipeline 2": [1, 2, 1], "tensor 2, pipeline 2": [2, 2, 2]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_give_the_model_back(found: list[dict[str, Any]], model: str, layout: str) -> None:
    """Spread over Megatron's ranks it computes the same; streamed back it is bit for bit the files'.

    Every copy of the model (there are two where two ranks hold one) streams all names in the plan's order,
    and the first rank holds no more than twice the largest Megatron tensor besides its own part.
    """
    sizes = LAYOUTS[layout]
    records = [r for r in found if (r["model"], r["sizes"]) == (model, sizes)]
    assert len(records) == 4 // (sizes[0] * sizes[1])
    for record in records:
        assert record["wrong"] == []
        assert record["in_order"]
        assert record["gap"] < 4e-6
        assert 0 < record["peak"] <= 2 * record["largest"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_lacks_a_tensor(found: list[dict[str, Any]], layout: str) -> None:
    """Every rank, not only the first, is told what cannot be gathered and of whom, before one is sent."""
    tensor, stages, _ = LAYOUTS[layout]
    said = (
        f"model.layers.{stages - 1}.self_attn.o_proj.weight cannot be gathered: tensor-parallel rank "
        f"{tensor - 1} of stage {stages - 1} does not hold decoder.layers.0.self_attention.linear_proj.weight"
    )
    records = [r for r in found if r["sizes"] == LAYOUTS[layout]]
    for record in records:
        assert len(record["refusals"]) == tensor * stages
        assert all(told.startswith(said) for told in record["refusals"])


# One rank -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def live_bytes() -> Any:
    """The class that counts the bytes of living tensors."""
    spec = importlib.util.spec_from_file_location("rollbook_test_ranks", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LiveBytes


@pytest.mark.parametrize("model", ["qwen3-untied", "qwen3_moe"])
def test_streaming_holds_no_second_copy(folders: Path, live_bytes: Any, model: str) -> None:
    """While weights stream, no more is alive than the copies of one packed tensor's parts."""
    folder = folders / model
    policy = TrainablePolicy(
        read_shape(folder), OptimizerConfig(), steps=1, device=torch.device("cpu"), seed=0, threads=1
    )
    policy.load_weights(read_weights(folder))
    packed = [t.nbytes for n, t in to_megatron(read_weights(folder), policy.shape).items() if "qkv" in n]
    with live_bytes() as streamed:
        total = sum(tensor.nbytes for _, tensor in policy.stream_weights())
    with live_bytes() as whole:
        held = policy.weights()
    assert 0 < streamed.peak <= packed[0] < total / 8
    assert whole.peak >= sum(packed), "the count sees copies that are kept"
    assert sum(t.nbytes for t in held.values()) == total


# Slices -------------------------------------------------------------------------------------------


def test_a_stage_has_its_own_layers(folders: Path) -> None:
    """Layers are counted from 0 in every stage; a tied model's embedding is in the first and the last."""
    shape, weights = read_shape(folders / "qwen3-tied"), read_weights(folders / "qwen3-tied")
    shape = replace(shape, layers=3)
    weights |= {n.replace("layers.1.", "layers.2."): t + 1 for n, t in weights.items() if "layers.1." in n}
    first, last = (dict(rank_weights(weights, shape, RankLayout((1, 2), stage))) for stage in (0, 1))
    whole = to_megatron(weights, shape)
    inner = [n.removeprefix("decoder.layers.0.") for n in whole if n.startswith("decoder.layers.0.")]
    embedding = "embedding.word_embeddings.weight"
    assert list(first) == [embedding, *(f"decoder.layers.0.{n}" for n in inner)]
    assert set(last) == {f"decoder.layers.{i}.{n}" for i in (0, 1) for n in inner} | {
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert all(torch.equal(last[f"decoder.layers.1.{n}"], whole[f"decoder.layers.2.{n}"]) for n in inner)
    assert torch.equal(last["output_layer.weight"], whole[embedding])


def test_tensor_ranks_have_their_groups(folders: Path) -> None:
    """A rank has the queries, keys and values of its own groups, its rows of gate and of up, its columns."""
    shape, weights = read_shape(folders / "qwen2"), read_weights(folders / "qwen2")
    ranks = [dict(rank_weights(weights, shape, RankLayout((2,), 0, 2, r))) for r in (0, 1)]
    layer, inner = "model.layers.1.", "decoder.layers.1."
    q, k, v = (weights[f"{layer}self_attn.{x}_proj.bias"] for x in "qkv")
    gate, up = (weights[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    for rank, held in enumerate(ranks):
        queries, one, half = slice(16 * rank, 16 * rank + 16), slice(8 * rank, 8 * rank + 8), 32 * rank
        expected = {
            "self_attention.linear_qkv.bias": torch.cat([q[queries], k[one], v[one]]),
            "mlp.linear_fc1.weight": torch.cat([gate[half : half + 32], up[half : half + 32]]),
            "self_attention.linear_proj.weight": weights[f"{layer}self_attn.o_proj.weight"][:, queries],
        }
        for name, tensor in expected.items():
            assert torch.equal(held[inner + name], tensor), (rank, name)
    rows = weights["lm_head.weight"]
    assert torch.equal(ranks[0]["output_layer.weight"], rows[:64])
    assert torch.equal(ranks[1]["output_layer.weight"][:61], rows[64:])
    assert not ranks[1]["output_layer.weight"][61:].any()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (RankLayout((2,), tensor=4), "2 key-value heads cannot be split over 4 tensor-parallel ranks"),
        (RankLayout((1, 2)), r"2 layers cannot be \[1, 2\] per pipeline stage"),
        (RankLayout((2, 0)), "2 layers cannot be"),
        (RankLayout((2,), tensor=2, expert_tensor=3), "split over 3"),
    ],
)
def test_uneven_splits_are_refused(folders: Path, layout: RankLayout, reason: str) -> None:
    """A layout that would need padding is a ModelError that names the number and the ranks."""
    shape = read_shape(folders / "qwen3_moe")
    with pytest.raises(ModelError, match=reason):
        dict(rank_weights(read_weights(folders / "qwen3_moe"), shape, layout))


def test_what_must_divide(folders: Path) -> None:
    """Rows of the vocabulary and the inner width are counted too; one rank takes any shape."""
    dense = ModelShape("qwen3", 2, 30, 63, 6, 6, 5, 120, 48, 1e-6, 1e4, False)
    check_layout(dense, one_rank(dense))
    for ranks, what in ((2, "63 intermediate_size"), (3, "128 rows of the padded vocabulary")):
        with pytest.raises(ModelError, match=f"{what} cannot be split over {ranks}"):
            check_layout(dense, RankLayout((2,), tensor=ranks))
    moe = read_shape(folders / "qwen3_moe")
    assert moe.experts is not None
    odd = replace(moe, experts=replace(moe.experts, ffn=23))
    check_layout(odd, RankLayout((2,), tensor=2, expert_tensor=1))
    with pytest.raises(ModelError, match="experts of width 23"):
        check_layout(odd, RankLayout((2,), tensor=2, expert_tensor=2))
    assert {w.kind for w in plan(moe) if w.expert} == {"gate_up", "row"}
