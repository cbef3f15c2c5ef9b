"""Where tensors lie in an engine, by ranks: as SGLang's own loaders put them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.engines.weights.compare import (
    Expected,
    Holding,
    TensorPart,
    describe_holding,
    expected_ranks_digest,
    part_of,
    shard,
)
from rollbook.engines.weights.rank_checksums import RankChecksums, ranks_digest
from rollbook.engines.weights.tensor_checksums import Sha256Checksum
from rollbook.store.errors import EngineError, FormatError
from rollbook.store.events import Json

LOADED: dict[str, list[int]] = orjson.loads((Path(__file__).parent / "sglang_loaders.json").read_bytes())
"""What SGLang 0.5.23's loaders gave each rank of rows numbered from 0 (q, gate), 100 (k, up) and 200 (v).

`qkv HEADS KV_HEADS HEAD_DIM SIZE RANK`, `gate_up SIZE RANK` and `row SIZE RANK` list the numbers held;
`vocab ROWS SIZE RANK` is (rows held, first number, last number) of rows 1.., where a row of zeros is padding.
"""
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
DENSE = {
    "model.embed_tokens.weight": (70, 8),
    f"{ATTENTION}.q_proj.weight": (16, 8),
    f"{ATTENTION}.k_proj.weight": (8, 8),
    f"{ATTENTION}.v_proj.weight": (8, 8),
    f"{ATTENTION}.q_proj.bias": (16,),
    f"{ATTENTION}.k_proj.bias": (8,),
    f"{ATTENTION}.v_proj.bias": (8,),
    f"{ATTENTION}.o_proj.weight": (8, 16),
    f"{ATTENTION}.q_norm.weight": (4,),
    f"{MLP}.gate_proj.weight": (12, 8),
    f"{MLP}.up_proj.weight": (12, 8),
    f"{MLP}.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (70, 8),
}
HELD = {
    "model.embed_tokens.weight": ["model.embed_tokens.weight"],
    f"{ATTENTION}.qkv_proj.weight": [f"{ATTENTION}.{x}_proj.weight" for x in "qkv"],
    f"{ATTENTION}.qkv_proj.bias": [f"{ATTENTION}.{x}_proj.bias" for x in "qkv"],
    f"{ATTENTION}.o_proj.weight": [f"{ATTENTION}.o_proj.weight"],
    f"{ATTENTION}.q_norm.weight": [f"{ATTENTION}.q_norm.weight"],
    f"{MLP}.gate_up_proj.weight": [f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"],
    f"{MLP}.down_proj.weight": [f"{MLP}.down_proj.weight"],
    "model.norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}
PADDED = ("model.embed_tokens.weight", "lm_head.weight")


def _numbered(rows: int, base: int, columns: int | None) -> torch.Tensor:
    numbers = torch.arange(rows) + base
    return numbers if columns is None else numbers[:, None] * torch.ones(columns, dtype=torch.int64)


@pytest.mark.parametrize("key", [key for key in LOADED if not key.startswith("vocab")])
def test_as_sglang_cuts_projections(key: str) -> None:
    """Heads by ranks, key and value heads held by several of them, biases with their rows."""
    kind, *numbers = key.removesuffix(" bias").split()
    *given_shape, size, rank = map(int, numbers)
    bias = "bias" if key.endswith("bias") else "weight"
    columns = None if bias == "bias" else 8
    if kind == "qkv":
        heads, kv_heads, dim = given_shape
        parts = [("q", heads * dim, 0), ("k", kv_heads * dim, 100), ("v", kv_heads * dim, 200)]
        named = [(f"{ATTENTION}.{p}_proj.{bias}", _numbered(rows, b, columns)) for p, rows, b in parts]
    elif kind == "gate_up":
        dim = 2
        named = [(f"{MLP}.{p}_proj.{bias}", _numbered(8, b, columns)) for p, b in (("gate", 0), ("up", 100))]
    else:
        dim = 2
        tensor = torch.arange(8)[None] * torch.ones(5, 1) if bias == "weight" else torch.arange(5)
        named = [(f"{ATTENTION}.o_proj.{bias}", tensor)]
    cut = [shard(name, tensor, rank, size, dim) for name, tensor in named]
    held = torch.cat(
        [part if part.dim() == 1 else (part[0] if kind == "row" else part[:, 0]) for part in cut]
    )
    assert held.int().tolist() == LOADED[key]


@pytest.mark.parametrize("key", [key for key in LOADED if key.startswith("vocab")])
@pytest.mark.parametrize("name", PADDED)
def test_as_sglang_pads_vocabularies(key: str, name: str) -> None:
    """To a multiple of 64, and of 64 times the ranks only where these do not divide the first."""
    rows, size, rank = map(int, key.split()[1:])
    held = shard(name, _numbered(rows, 1, 2), rank, size, 4)[:, 0]
    used = held[held != 0].tolist() or [0]
    assert [len(held), used[0], used[-1]] == LOADED[key]


def test_tensors_are_found_in_merged_and_expert_tensors() -> None:
    """Merged, of experts, of shared experts, alone, nowhere."""
    experts = "model.layers.1.mlp.experts"
    shared = "model.layers.1.mlp.shared_expert"
    held = frozenset(
        {*HELD, f"{experts}.w13_weight", f"{experts}.w2_weight", "model.layers.1.mlp.gate.weight"}
        | {f"{shared}.gate_up_proj.weight", f"{shared}.down_proj.weight"}
    )
    wanted = {
        f"{ATTENTION}.v_proj.bias": TensorPart(f"{ATTENTION}.qkv_proj.bias", 2),
        f"{MLP}.up_proj.weight": TensorPart(f"{MLP}.gate_up_proj.weight", 1),
        f"{experts}.0.gate_proj.weight": TensorPart(f"{experts}.w13_weight", 0),
        f"{experts}.10.up_proj.weight": TensorPart(f"{experts}.w13_weight", 21),
        f"{experts}.10.down_proj.weight": TensorPart(f"{experts}.w2_weight", 10),
        f"{shared}.gate_proj.weight": TensorPart(f"{shared}.gate_up_proj.weight", 0),
        "model.layers.1.mlp.gate.weight": TensorPart("model.layers.1.mlp.gate.weight", 0),
        f"{experts}.gate_up_proj": None,
        "model.layers.9.self_attn.q_proj.weight": None,
        "model.layers.9.mlp.experts.0.up_proj.weight": None,
        "lm_head.bias": None,
    }
    assert {name: part_of(name, held) for name in wanted} == wanted


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in DENSE.items()}


def _engine(tensors: dict[str, torch.Tensor], size: int = 1) -> list[RankChecksums]:
    """What an engine answers that holds these tensors, cut among `size` ranks."""
    ranks = []
    for rank in range(size):
        sums = {}
        for held, parts in HELD.items():
            checksum = Sha256Checksum()
            for name in parts:
                checksum.update(shard(name, tensors[name], rank, size, 4))
            sums[held] = checksum.hexdigest()
        ranks.append(RankChecksums(rank, size, sums))
    return ranks


def _expected(size: int = 1) -> Expected:
    return Expected(_engine(_tensors(), size), Holding("sha256", "float32", 4))


@given(st.permutations(sorted(DENSE)), st.sampled_from([1, 2, 4]))
def test_parts_may_come_in_any_order(names: list[str], size: int) -> None:
    """Parts of a merged tensor may come in any order, in memory that is used again after each."""
    expected, new = _expected(size), _tensors(1)
    for name in names:
        lent = new[name].clone()
        expected.add(name, lent)
        lent.fill_(7)
    expected.check("http://e", _engine(new, size))


def _sent(**changes: torch.Tensor | None) -> Expected:
    expected = _expected()
    for name, tensor in (_tensors(1) | {k.replace("__", "."): v for k, v in changes.items()}).items():
        if tensor is not None:
            expected.add(name, tensor)
    return expected


def _without(name: str) -> Expected:
    expected = _expected()
    for other, tensor in _tensors(1).items():
        if other != name:
            expected.add(other, tensor)
    return expected


def test_what_is_not_sent_is_named() -> None:
    """One of its own, the first and the last part of a merged one."""
    held = _engine(_tensors(1))
    for name, message in {
        "model.norm.weight": "1 tensors were not sent whole, such as model.norm.weight",
        f"{ATTENTION}.q_proj.weight": "not sent whole, such as .*qkv_proj.weight",
        f"{ATTENTION}.v_proj.weight": "1 of 9 tensors are not those sent, such as .*qkv_proj.weight",
    }.items():
        with pytest.raises(EngineError, match=f"engine http://e, rank 0: verification failed: .*{message}"):
            _without(name).check("http://e", held)


def test_a_wrong_byte_is_named() -> None:
    """One bit of one value of one rank."""
    new = _tensors(1)
    expected = _expected(2)
    for name, tensor in new.items():
        expected.add(name, tensor)
    new[f"{MLP}.down_proj.weight"].view(torch.int32)[7, 11] ^= 1
    text = "rank 1: verification failed: 1 of 9 tensors are not those sent, such as .*down_proj.weight"
    with pytest.raises(EngineError, match=text):
        expected.check("http://e", _engine(new, 2))


def test_a_name_that_would_be_skipped() -> None:
    """An engine has no place for fused experts, nor for another model's layers."""
    for name in (f"{MLP}.experts.gate_up_proj", "model.layers.1.self_attn.q_proj.weight"):
        with pytest.raises(EngineError, match=f"no tensor that {name} goes into, .*skip it silently"):
            _expected().add(name, torch.zeros(4, 4))


def test_an_engine_that_holds_more_or_other_ranks() -> None:
    """A tensor of the engine's that nothing was sent for; a rank that was not there."""
    expected, held = _sent(), _engine(_tensors(1))
    more = held[0].tensors | {"model.layers.0.self_attn.sinks": "0" * 16}
    with pytest.raises(EngineError, match=r"1 tensors were not sent whole, such as .*\.sinks"):
        expected.check("http://e", [RankChecksums(0, 1, more)])
    with pytest.raises(EngineError, match="2 ranks answer, 1 did before"):
        expected.check("http://e", [*held, *held])
    fewer: dict[str, Any] = {k: v for k, v in held[0].tensors.items() if k != "model.norm.weight"}
    with pytest.raises(EngineError, match=r"1 of 9 tensors .* such as model\.norm\.weight"):
        expected.check("http://e", [RankChecksums(0, 1, fewer)])


# From the weights alone ---------------------------------------------------------------------------


HOLDING = Holding("sha256", "float32", 4)
FIRST = {
    "checksum": "sha256",
    "dtype": "float32",
    "head_dim": 4,
    "padded": True,
    "tp_size": 2,
    "tp_ranks": [0, 1],
    "merged": ["gate_up_proj", "qkv_proj"],
}


def test_what_is_said_of_how_it_holds_them() -> None:
    """Little, and the same for copies of the ranks."""
    ranks = _engine(_tensors(), 2)
    assert describe_holding(ranks, DENSE, HOLDING) == FIRST
    assert describe_holding([*ranks, *ranks], DENSE, HOLDING) == FIRST
    assert len(orjson.dumps(FIRST)) < 300
    experts = {f"m.experts.{i}.{part}_proj.weight" for i in range(9) for part in ("gate", "up", "down")}
    held = RankChecksums(3, 4, {"m.experts.w13_weight": "0", "m.experts.w2_weight": "1"})
    described = describe_holding([held], experts, Holding("tiled", "bfloat16", 8, padded=False))
    assert described == {
        **{"checksum": "tiled", "dtype": "bfloat16", "head_dim": 8, "padded": False},
        **{"tp_size": 4, "tp_ranks": [3], "merged": ["w13_weight", "w2_weight"]},
    }
    unmerged = [RankChecksums(0, 1, dict.fromkeys(DENSE, "0"))]
    assert (describe_holding(unmerged, DENSE, HOLDING) or {})["merged"] == []


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (DENSE, []),
        ((), [RankChecksums(0, 1, {"a.weight": "0"})]),
        (DENSE, [RankChecksums(0, 1, dict.fromkeys([*HELD, "rope.inv_freq"], "0"))]),
        (DENSE, [RankChecksums(0, 1, dict.fromkeys(list(HELD)[1:], "0"))]),
        (
            ("0.q_proj.weight", "1.q_proj.weight"),
            [RankChecksums(0, 1, {"0.qkv_proj.weight": "0", "1.q_proj.weight": "0"})],
        ),
        (DENSE, [RankChecksums(0, 2, dict.fromkeys(HELD, "0")), RankChecksums(1, 2, {"a.weight": "0"})]),
        (
            DENSE,
            [RankChecksums(0, 1, dict.fromkeys(HELD, "0")), RankChecksums(1, 2, dict.fromkeys(HELD, "0"))],
        ),
    ],
    ids=["no ranks", "no names", "one more", "one less", "some merged", "by layers", "of two sizes"],
)
def test_other_names_than_follow_from_the_models(names: Any, ranks: list[RankChecksums]) -> None:
    """Then it is not known how it holds them."""
    assert describe_holding(ranks, names, HOLDING) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(st.permutations(sorted(DENSE)), st.sampled_from([1, 2, 4]))
def test_checksums_follow_from_the_weights(dtype: str, names: list[str], size: int) -> None:
    """In any order, in memory that is used again after each, in the type that the engine has."""
    new = _tensors(1)
    given_to = {name: tensor.to(getattr(torch, dtype)) for name, tensor in new.items()}
    ranks = _engine(given_to, size)
    held = describe_holding(ranks, names, Holding("sha256", dtype, 4))
    assert held is not None

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            lent = new[name].clone()
            yield name, lent
            lent.fill_(7)

    assert expected_ranks_digest(stream(), held) == ranks_digest(ranks)


@pytest.mark.parametrize("name", sorted(DENSE))
def test_one_ulp_and_one_tensor_less(name: str) -> None:
    """Of any tensor, whichever rank has it: another digest."""
    new, changed = _tensors(1), _tensors(1)
    wanted = ranks_digest(_engine(new, 2))
    assert expected_ranks_digest(new.items(), FIRST) == wanted
    changed[name].view(-1).view(torch.int32)[-1] ^= 1
    assert expected_ranks_digest(changed.items(), FIRST) != wanted
    del changed[name]
    assert expected_ranks_digest(changed.items(), FIRST) != wanted


def test_every_word_counts() -> None:
    """Of how they are held: another kind, type, size of heads, cut, padding or merger is another digest."""
    new = _tensors(1)
    others = [
        *({"checksum": "tiled"}, {"dtype": "bfloat16"}, {"head_dim": 8}, {"padded": False}),
        *({"tp_ranks": [0]}, {"tp_size": 1, "tp_ranks": [0]}, {"merged": ["qkv_proj"]}, {}),
    ]
    assert len({expected_ranks_digest(new.items(), FIRST | other) for other in others}) == len(others)


@pytest.mark.parametrize(
    "odd",
    [
        *({"checksum": "crc32"}, {"dtype": "float8"}, {"merged": ["experts"]}, {"tp_ranks": [2]}),
        *({"head_dim": 0}, {"head_dim": "4"}, {"tp_ranks": None}, {"merged": [[]]}, {"tp_size": "2"}),
    ],
)
def test_what_is_not_known(odd: Json) -> None:
    """It is shown, and never computed with."""
    with pytest.raises(FormatError, match=r"held as \{.*which this release does not know"):
        expected_ranks_digest([], FIRST | odd)
    lacking = {key: value for key, value in FIRST.items() if key not in odd}
    with pytest.raises(FormatError, match="does not know"):
        expected_ranks_digest([], lacking)


def test_weights_of_another_model() -> None:
    """They cannot be cut so: the tensor is named."""
    held = FIRST | {"tp_size": 8, "tp_ranks": list(range(8))}
    with pytest.raises(FormatError, match=r"o_proj\.weight of shape \[2, 2\] is not held by 8 ranks"):
        expected_ranks_digest([(f"{ATTENTION}.o_proj.weight", torch.zeros(2, 2))], held)
