"""Qwen3 in Megatron is Qwen3 in transformers: names, logits, gradients, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from rollbook.ingest.engines.weights import read_weights
from rollbook.store.errors import ModelError
from rollbook.train.backend import TrainablePolicy
from rollbook.train.batch import MicroBatch
from rollbook.train.config import OptimizerConfig
from rollbook.train.losses import sft_loss, token_logprobs
from rollbook.train.qwen3 import Qwen3Shape, read_shape, to_huggingface, to_megatron

TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@pytest.fixture(scope="session")
def models(fabric: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, Any]]:
    """A tied and an untied model: folder and transformers model."""
    made = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("models") / f"tied-{tied}"
        made[tied] = (folder, fabric.make_model(folder, tied=tied, seed=7))
    return made


def _policy(folder: Path, **changes: Any) -> TrainablePolicy:
    """A policy of the model, weights in place."""
    policy = TrainablePolicy(
        read_shape(folder),
        OptimizerConfig(**changes),
        steps=4,
        device=torch.device("cpu"),
        seed=0,
        threads=1,
    )
    policy.load_weights(read_weights(folder))
    return policy


def _micro(rows: int = 3, length: int = 11) -> MicroBatch:
    """Random tokens, each row padded at another place, the mask random."""
    rng = np.random.default_rng(0)
    shape = (rows, length)
    mask = rng.random(shape) < 0.7
    mask[:, 0] = False
    temperatures = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return MicroBatch(
        rng.integers(0, 100, shape),
        mask,
        np.zeros(shape, np.float32),
        temperatures,
        np.ones(shape, np.float32),
    )


def _masked_loss(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    tokens, temperatures = torch.from_numpy(micro.tokens), torch.from_numpy(micro.temperatures)
    loss = sft_loss(token_logprobs(logits, tokens, temperatures))
    return loss[torch.from_numpy(micro.loss_mask[:, 1:])].mean()


def _run(policy: TrainablePolicy, micro: MicroBatch) -> tuple[torch.Tensor, float]:
    """Logits and loss of one forward and backward pass; the gradients stay in the policy."""
    seen: list[Any] = []

    def loss_of(logits: torch.Tensor, one: MicroBatch) -> torch.Tensor:
        loss = _masked_loss(logits, one)
        seen.extend((logits.detach().clone(), float(loss)))
        return loss

    policy.forward_backward((micro,), loss_of)
    return seen[0], seen[1]


@TIED
def test_weights_survive_the_round_trip(models: Any, tied: bool) -> None:
    """Hugging Face to Megatron and back is bit for bit, as is a trip through a live policy."""
    folder, _ = models[tied]
    shape, tensors = read_shape(folder), read_weights(folder)
    assert ("lm_head.weight" in tensors) != tied
    mapped = to_megatron(tensors, shape)
    assert mapped["embedding.word_embeddings.weight"].shape == (128, 32)
    assert not mapped["embedding.word_embeddings.weight"][100:].any()
    for back in (to_huggingface(mapped, shape), _policy(folder).weights()):
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@TIED
def test_logits_are_transformers(models: Any, tied: bool) -> None:
    """The logits are those of transformers within float32 rounding, over the true vocabulary."""
    folder, reference = models[tied]
    micro = _micro()
    logits, _ = _run(_policy(folder), micro)
    with torch.no_grad():
        expected = reference(torch.from_numpy(micro.tokens)).logits
    assert logits.shape == expected.shape == (3, 11, 100)
    scale = float(expected.abs().max())
    assert scale > 1, "logits too small to tell anything"
    assert float((logits - expected).abs().max()) < 2e-6 * max(1.0, scale)


@TIED
def test_gradients_are_transformers(models: Any, tied: bool) -> None:
    """The gradient of the supervised loss is that of transformers' autograd, for every tensor."""
    folder, reference = models[tied]
    micro, policy = _micro(), _policy(folder)
    _, loss = _run(policy, micro)
    reference.zero_grad()
    expected_loss = _masked_loss(reference(torch.from_numpy(micro.tokens)).logits, micro)
    expected_loss.backward()
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    found = to_huggingface(policy.gradients(), policy.shape)
    expected = {n: p.grad for n, p in reference.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max() / gradient.abs().max())
        assert error < 1e-5, f"{name}: {error}"


def test_splitting_into_micro_batches_keeps_the_gradient(models: Any) -> None:
    """Rows in one micro-batch, or each in its own, add up to the same gradient (to rounding)."""
    micro, policy = _micro(), _policy(models[True][0])

    def loss_of(logits: torch.Tensor, one: MicroBatch) -> torch.Tensor:
        tokens, temperatures = torch.from_numpy(one.tokens), torch.from_numpy(one.temperatures)
        loss = sft_loss(token_logprobs(logits, tokens, temperatures))
        return torch.where(torch.from_numpy(one.loss_mask[:, 1:]), loss, 0.0).sum() / 7

    policy.forward_backward((micro,), loss_of)
    whole = {name: g.clone() for name, g in policy.gradients().items()}
    names = ("tokens", "loss_mask", "old_logprobs", "temperatures", "advantages")
    rows = tuple(MicroBatch(*(getattr(micro, n)[i : i + 1] for n in names)) for i in range(3))
    policy.forward_backward(rows, loss_of)
    for name, gradient in policy.gradients().items():
        assert torch.allclose(gradient, whole[name], rtol=1e-4, atol=1e-5), name


@TIED
def test_padded_rows_take_no_part(models: Any, tied: bool) -> None:
    """Rows that only pad the vocabulary change neither loss nor gradient, and stay zero in training."""
    policy, micro = _policy(models[tied][0], lr=0.1, weight_decay=0.1), _micro()
    logits, loss = _run(policy, micro)
    padded = [
        p for n, p in policy._parts.module.named_parameters() if p.shape[0] == 128 and "layers" not in n
    ]
    assert len(padded) == (1 if tied else 2)
    assert all(not p.main_grad[100:].any() for p in padded)
    policy.optimizer_step(0.1)
    assert all(not p[100:].any() for p in padded)
    fresh = _policy(models[tied][0])
    with torch.no_grad():
        for name, parameter in fresh._parts.module.named_parameters():
            if parameter.shape[0] == 128 and "layers" not in name:
                parameter[100:] = 1000.0
    assert _run(fresh, micro)[1] == loss
    assert torch.equal(_run(fresh, micro)[0], logits)


# What is refused ----------------------------------------------------------------------------------


def _written(folder: Path, **changes: Any) -> Path:
    """A folder with only a config.json, changed."""
    values: dict[str, Any] = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    values = {k: v for k, v in (values | changes).items() if v is not ...}
    (folder / "config.json").write_bytes(orjson.dumps(values))
    return folder


def test_shape_of_a_config(tmp_path: Path) -> None:
    """Every field of the shape comes from its key, the base of the rotation from either place."""
    shape = read_shape(_written(tmp_path))
    assert shape == Qwen3Shape(2, 32, 64, 4, 2, 8, 100, 64, 1e-6, 1e4, False)
    assert shape.padded_vocab == 128
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert read_shape(_written(tmp_path, rope_parameters=rope)).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama"}, "'llama' cannot be trained"),
        ({"model_type": ...}, "None cannot be trained"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling"),
        ({"head_dim": ...}, "head_dim"),
        ({"rope_theta": "large"}, "ill-typed"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, changes: Any, reason: str) -> None:
    """What this trainer would compute otherwise than transformers is a ModelError that says why."""
    with pytest.raises(ModelError, match=reason):
        read_shape(_written(tmp_path, **changes))


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    """No config.json, or one that is no JSON, names the place."""
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_shape(tmp_path)


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("model.embed_tokens.weight", 99),
        ("model.embed_tokens.weight", 101),
        ("lm_head.weight", 128),
        ("model.norm.weight", 31),
        (LAYER + "self_attn.q_proj.weight", 16),
        (LAYER + "self_attn.q_norm.weight", 9),
        (LAYER + "mlp.gate_proj.weight", 63),
        (LAYER + "mlp.down_proj.weight", None),
        (LAYER + "self_attn.v_proj.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_weights_that_do_not_fit(models: Any, name: str, rows: int | None) -> None:
    """A tensor that is missing, or has another shape, is named; nothing is padded or cut to fit."""
    folder, _ = models[False]
    shape, tensors = read_shape(folder), read_weights(folder)
    if rows is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(rows, *tensors[name].shape[1:])
    with pytest.raises(ModelError, match=name):
        to_megatron(tensors, shape)


def test_transposed_weights_do_not_fit(models: Any) -> None:
    """As many numbers in another order are no match."""
    folder, _ = models[False]
    shape, tensors = read_shape(folder), read_weights(folder)
    name = LAYER + "self_attn.k_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    with pytest.raises(ModelError, match=name):
        to_megatron(tensors, shape)
