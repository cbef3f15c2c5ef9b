"""Every family in Megatron is what it is in transformers: names, logits, gradients; and it trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.fakes.models.weight_maps import to_huggingface, to_megatron
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.engines.weights.digests import digest_tensors, read_weights, widened
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten
from rollbook.store.fold.history import History
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.checkpoints.checkpoint import write_checkpoint
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.score_head import with_head
from rollbook.train.model.shape import read_shape, shape_to_train
from rollbook.train.model.weight_names import checked, plan, weight_shapes
from rollbook.train.publish.publish import Publisher
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.step.predictions import Predictions, token_logprobs

VOCAB = 125
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_raw",
    "gemma3_text",
    "gemma3_text_scaled",
    "gemma3_text_global_scaled",
    "gpt_oss",
)
"""The router of `qwen3_moe_raw` does not renormalize; `scaled` ones rotate less without a window, and no
layer of the `global` one has one."""
CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma3_text": "Gemma3",
    "gpt_oss": "GptOss",
}

CASES = [f"{family}-{tied}" for family in FAMILIES for tied in ("tied", "untied")]
EACH = pytest.mark.parametrize("case", CASES)


def _reference(family: str, tied: bool) -> Any:
    """A transformers model, every weight of it random, norms, biases and experts too."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "tie_word_embeddings": tied,
    }
    if family.startswith("qwen3"):
        values["head_dim"] = 16
    if family.startswith("qwen3_moe"):
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        values["norm_topk_prob"] = not family.endswith("raw")
    if family == "gpt_oss":
        values = _gpt_oss(values)
    if family.startswith("gemma3"):
        values = _gemma(values, family)
    name = CLASSES[family.removesuffix("_raw").removesuffix("_scaled").removesuffix("_global")]
    of_text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{of_text}Config")(**values)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            around = 1.0 if "norm" in key and name != "Gemma3" else 0.0
            parameter.copy_(around + (0.2 if "norm" in key else 0.1) * torch.randn_like(parameter))
    return model.float().eval()


def _gemma(values: dict[str, Any], family: str) -> dict[str, Any]:
    """Five layers, three of them with a window that samples are longer than, rotated by other angles."""
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")]
    if "global" in family:
        kinds = ["full_attention"] * 5
    rope = {"rope_type": "linear", "factor": 4.0} if family.endswith("scaled") else {"rope_type": "default"}
    rope_parameters = {"full_attention": rope | {"rope_theta": 1e4}}
    rope_parameters["sliding_attention"] = {"rope_type": "default", "rope_theta": 100.0}
    more = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4, "layer_types": kinds}
    more |= {"num_hidden_layers": 5, "rope_parameters": rope_parameters}
    return {key: value for key, value in values.items() if key != "rope_theta"} | more


def _gpt_oss(values: dict[str, Any]) -> dict[str, Any]:
    """Three layers, two of them with a window that samples are longer than; gates that the limit clamps."""
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding")]
    rope = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 48, "rope_theta": 1e4}
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5, "head_dim": 16}
    more |= {"num_hidden_layers": 3, "sliding_window": 4, "layer_types": kinds, "rope_parameters": rope}
    more["intermediate_size"] = 24
    return {key: value for key, value in values.items() if key != "rope_theta"} | more


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folder and transformers model of every case."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folders = {}
    for case in CASES:
        family, tied = case.split("-")
        folder, model = tmp_path_factory.mktemp("models") / case, _reference(family, tied == "tied")
        model.save_pretrained(folder)
        folders[case] = (folder, model)
    return folders


def _policy(folder: Path, **changes: Any) -> TrainablePolicy:
    """A policy of the model, weights in place."""
    policy = TrainablePolicy(
        read_shape(folder), OptimizerConfig(**changes), Build(4, torch.device("cpu"), 0, 1)
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
        np.zeros(shape, np.int64),
    )


def _masked_loss(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    tokens, temperatures = torch.from_numpy(micro.tokens), torch.from_numpy(micro.temperatures)
    loss = -token_logprobs(logits, tokens, temperatures)
    return loss[torch.from_numpy(micro.loss_mask[:, 1:])].mean()


def _run(policy: TrainablePolicy, micro: MicroBatch) -> tuple[torch.Tensor, float]:
    """Logits and loss of one forward and backward pass; the gradients stay in the policy."""

    def loss_of(logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, float]]:
        loss = _masked_loss(logits, batch)
        return loss, (logits.detach().clone(), float(loss))

    (output,) = policy.forward_backward((micro,), loss_of)
    return output


@pytest.mark.more_but("*-tied")
@EACH
def test_weights_survive_the_round_trip(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """Hugging Face to Megatron and back is bit for bit, as is a trip through a live policy."""
    folder, _ = models[case]
    shape, tensors = read_shape(folder), read_weights(folder)
    assert ("lm_head.weight" in tensors) == case.endswith("-untied")
    mapped = to_megatron(tensors, shape)
    assert mapped["embedding.word_embeddings.weight"].shape == (128, 32)
    assert not mapped["embedding.word_embeddings.weight"][VOCAB:].any()
    policy = _policy(folder)
    for back in (to_huggingface(mapped, shape), policy.weights(), dict(policy.stream_weights())):
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert policy.weights_digest().digest == digest_tensors(tensors, tree=True)


@EACH
def test_logits_are_transformers(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """The logits are those of transformers within float32 rounding, over the true vocabulary."""
    folder, reference = models[case]
    micro = _micro()
    logits, _ = _run(_policy(folder), micro)
    with torch.no_grad():
        expected = reference(torch.from_numpy(micro.tokens)).logits
    assert logits.shape == expected.shape == (3, 11, VOCAB)
    assert float(expected.abs().max()) > 1, "logits too small to tell anything"
    assert (
        float((logits - expected).abs().max()) < 5e-6
    )  # sums add up in the order of the processor's instructions


@EACH
def test_gradients_are_transformers(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """The gradient of the supervised loss is that of transformers' autograd, for every tensor."""
    folder, reference = models[case]
    micro, policy = _micro(), _policy(folder)
    _, loss = _run(policy, micro)
    reference.zero_grad()
    expected_loss = _masked_loss(reference(torch.from_numpy(micro.tokens)).logits, micro)
    expected_loss.backward()
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    gradients = to_huggingface(policy.gradients(), policy.shape)
    expected = checked({n: p.grad for n, p in reference.named_parameters()}, policy.shape)
    for name, gradient in gradients.items():
        # A key's bias shifts all scores of a query alike: its gradient is rounding about zero.
        scale = max(float(expected[name].abs().max()), 1e-3)
        error = float((gradient - expected[name]).abs().max()) / scale
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.more_but("qwen3-*", "gpt_oss-tied")
@EACH
def test_weights_are_taken_over(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """In the memory that they are in, with Megatron's marks: another policy has the bits of the first."""
    policy, micro = _policy(models[case][0]), _micro()
    how = Build(4, torch.device("cpu"), 1, 1)
    other = TrainablePolicy(policy.shape, OptimizerConfig(), how, policy.own_weights())
    (mine, loss), (theirs, expected) = _run(other, micro), _run(policy, micro)
    assert torch.equal(mine, theirs)
    assert loss == expected
    assert digest_tensors(other.gradients()) == digest_tensors(policy.gradients())
    modules = [one._parts.module for one in (other, policy)]
    marks = [{name: (p.data_ptr(), {*vars(p)}) for name, p in m.named_parameters()} for m in modules]
    assert marks[0] == marks[1]


@EACH
def test_packed_samples_see_themselves_alone(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """One after the other in a row, they get the logprobs, entropies and gradients that they get padded; only
    what precedes a trained token is computed."""
    lengths = np.array([11, 4, 7])
    micro = _micro()
    mask = micro.loss_mask & (np.arange(11) < lengths[:, None])
    micro, policy = replace(micro, loss_mask=mask), _policy(models[case][0])
    outputs, gradients, shapes = [], [], []

    def loss_of(logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, None]:
        shapes.append(logits.shape)
        predictions, trained = Predictions(logits, batch), torch.from_numpy(mask[:, 1:])
        values = torch.stack([predictions.logprobs()[trained], predictions.entropies()[trained]])
        outputs.append(values.detach())
        return (values * torch.tensor([[-1.0], [0.3]])).sum(), None

    for batch in (micro, replace(micro, lengths=lengths)):
        policy.forward_backward((batch,), loss_of)
        gradients.append({name: g.clone() for name, g in policy.gradients().items()})
    assert shapes == [(3, 11, VOCAB), (mask.sum(), VOCAB)]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)
    for name, gradient in gradients[0].items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((gradient - gradients[1][name]).abs().max()) / scale < 1e-5, name


@pytest.mark.more_but("llama-tied", "qwen2-untied", "qwen3_moe-untied", "gemma3_text-tied", "gpt_oss-untied")
@EACH
def test_a_step_trains(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """A step lowers the loss, changes every tensor, and gives the same weights from the same start."""
    folder, _ = models[case]
    micro, before, digests = _micro(), read_weights(folder), []
    for _ in range(2):
        policy = _policy(folder)
        _, first = _run(policy, micro)
        assert policy.optimizer_step(0.01) > 0
        digests.append(policy.weights_digest().digest)
        moved = {name.rsplit(".", 1)[0] for name in policy.optimizer_state()}
        assert moved == {w.megatron for w in plan(policy.shape)}
        unchanged = [n for n, t in policy.stream_weights() if torch.equal(t, before[n])]
        assert unchanged == []
        assert _run(policy, micro)[1] < first
    assert digests[0] == digests[1]


@pytest.mark.parametrize("case", ["qwen3-tied", "gemma3_text-tied", "gpt_oss-tied"])
def test_recomputed_activations_give_the_same_bits(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """Logits and gradients, padded and packed."""
    folder, micro = models[case][0], _micro()
    packed = replace(micro, lengths=np.array([11, 11, 11]))
    passes: list[list[torch.Tensor]] = []
    for recompute in (False, True):
        how = Build(4, torch.device("cpu"), 0, 1, recompute=recompute)
        policy = TrainablePolicy(read_shape(folder), OptimizerConfig(), how)
        policy.load_weights(read_weights(folder))
        passes.append([])
        for batch in (micro, packed):
            outputs = policy.forward_backward(
                (batch,), lambda logits, _: (logits.square().mean(), logits.detach())
            )
            passes[-1] += [outputs[0].clone(), *(g.clone() for g in policy.gradients().values())]
    assert all(torch.equal(kept, again) for kept, again in zip(*passes, strict=True))


@pytest.mark.more_but("llama-tied", "qwen3_moe-untied", "gemma3_text-tied", "gpt_oss-untied")
@EACH
def test_transformers_loads_a_checkpoint(
    models: dict[str, tuple[Path, Any]], tmp_path: Path, case: str
) -> None:
    """After a step it computes what the policy does; also a checkpoint that begins a reward model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    policy, micro = _policy(models[case][0]), _micro()
    _run(policy, micro)
    policy.optimizer_step(0.01)
    stream = policy.stream_weights()
    record = write_checkpoint(tmp_path, "r", "actor", 1, stream, None, like=models[case][0], phase=None)
    ours, _ = _run(policy, micro)
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / record.path).eval()
        assert float((loaded(torch.from_numpy(micro.tokens)).logits - ours).abs().max()) < 1e-5
    shape = shape_to_train(models[case][0], 1)
    own = with_head(policy.weights(), shape)
    own["score.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(3))
    like, known = models[case][0], {"phase": None, "scores": 1}
    record = write_checkpoint(tmp_path, "r", "reward", 1, own, None, like=like, **known)
    scored = TrainablePolicy(shape, OptimizerConfig(), Build(4, torch.device("cpu"), 0, 1))
    scored.load_weights(own)
    (ours,) = scored.forward((micro,), lambda scores, _: scores.clone())
    with torch.no_grad():
        head = AutoModelForSequenceClassification.from_pretrained(tmp_path / record.path).eval()
        head.config.pad_token_id = VOCAB  # no token is padding: the last one's score is told
        theirs = head(torch.from_numpy(micro.tokens)).logits
    architectures = json.loads((tmp_path / record.path / "config.json").read_text())["architectures"]
    assert architectures == [type(head).__name__]
    assert float((theirs - ours[:, -1]).abs().max()) < 1e-5


@pytest.mark.more_but("gpt_oss-untied-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["gemma3_text-tied", "gpt_oss-untied"])
def test_its_steps_replay(
    recorded: Callable[..., Store], models: dict[str, tuple[Path, Any]], case: str, dtype: str
) -> None:
    """Packed, with a reference: the bits of every recorded step come out again, in a training that goes on
    from a checkpoint, too."""
    log = recorded("stepped")
    algorithm = {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1}
    changes = {"model": str(models[case][0]), "dtype": dtype, "tokens_per_micro_batch": 24}
    changes |= {"micro_batch_size": None, "algorithm": algorithm, "checkpoint_every": 2}
    for steps in (2, 3):
        fabric.train(log, fabric.config(fabric.GRPO, **changes, steps=steps))
    for step in range(3):
        result = replay_step(log, step)
        assert result.bit_for_bit, result.differs_in


def test_splitting_into_micro_batches_keeps_the_gradient(models: dict[str, tuple[Path, Any]]) -> None:
    """Rows in one micro-batch, or each in its own, add up to the same gradient (to rounding)."""
    micro, policy = _micro(), _policy(models["qwen3-tied"][0])

    def loss_of(logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, None]:
        tokens, temperatures = torch.from_numpy(batch.tokens), torch.from_numpy(batch.temperatures)
        loss = -token_logprobs(logits, tokens, temperatures)
        return torch.where(torch.from_numpy(batch.loss_mask[:, 1:]), loss, 0.0).sum() / 7, None

    policy.forward_backward((micro,), loss_of)
    whole = {name: g.clone() for name, g in policy.gradients().items()}
    names = ("tokens", "loss_mask", "rollout_logprobs", "temperatures", "advantages", "versions")
    rows = tuple(MicroBatch(*(getattr(micro, n)[i : i + 1] for n in names)) for i in range(3))
    policy.forward_backward(rows, loss_of)
    for name, gradient in policy.gradients().items():
        assert torch.allclose(gradient, whole[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("case", ["qwen3-tied", "qwen3-untied", "qwen2-untied"])
def test_padded_rows_take_no_part(models: dict[str, tuple[Path, Any]], case: str) -> None:
    """Rows that only pad the vocabulary change neither loss nor gradient, and stay zero in training."""
    policy, micro = _policy(models[case][0], lr=0.1, weight_decay=0.1), _micro()
    logits, loss = _run(policy, micro)
    padded = [
        p for n, p in policy._parts.module.named_parameters() if p.shape[0] == 128 and "layers" not in n
    ]
    assert len(padded) == (1 if case.endswith("-tied") else 2)
    assert all(not p.main_grad[VOCAB:].any() for p in padded)
    policy.optimizer_step(0.1)
    assert all(not p[VOCAB:].any() for p in padded)
    fresh = _policy(models[case][0])
    with torch.no_grad():
        for name, parameter in fresh._parts.module.named_parameters():
            if parameter.shape[0] == 128 and "layers" not in name:
                parameter[VOCAB:] = 1000.0
    assert _run(fresh, micro)[1] == loss
    assert torch.equal(_run(fresh, micro)[0], logits)


# Names --------------------------------------------------------------------------------------------


def test_the_order_of_the_stream(models: dict[str, tuple[Path, Any]]) -> None:
    """Names come in the plan's order: what an engine merges is adjacent, biases after the weights."""
    attention = [f"self_attn.{x}_proj" for x in "qkv"]
    norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    gated = [f"{x}_proj.weight" for x in ("gate", "up", "down")]
    expected = {
        "qwen2-untied": [f"{n}.{kind}" for kind in ("weight", "bias") for n in attention]
        + ["self_attn.o_proj.weight", "post_attention_layernorm.weight"]
        + [f"mlp.{n}" for n in gated],
        "qwen3_moe-tied": [f"{n}.weight" for n in attention]
        + [*norms, "self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate.weight"]
        + [f"mlp.experts.{e}.{n}" for e in range(4) for n in gated],
    }
    for case, inner in expected.items():
        layers = [f"model.layers.{i}.{n}" for i in range(2) for n in ("input_layernorm.weight", *inner)]
        names = [n for n, _ in _policy(models[case][0]).stream_weights()]
        tail = [] if case.endswith("-tied") else ["lm_head.weight"]
        assert names == ["model.embed_tokens.weight", *layers, "model.norm.weight", *tail]
        assert names == list(weight_shapes(read_shape(models[case][0])))


def test_fused_experts_are_read(models: dict[str, tuple[Path, Any]]) -> None:
    """Experts stacked as transformers 5 holds them give the weights of the per-expert names."""
    folder, reference = models["qwen3_moe-untied"]
    fused = {name: p.detach() for name, p in reference.named_parameters()}
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 48, 32)
    shape = read_shape(folder)
    assert digest_tensors(to_megatron(fused, shape)) == digest_tensors(
        to_megatron(read_weights(folder), shape)
    )
    fused["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 24, 32)
    with pytest.raises(
        ModelError, match=r"layers.1.mlp.experts.down_proj is \(4, 24, 32\), not \(4, 32, 24\)"
    ):
        to_megatron(fused, shape)


def test_a_fused_model_is_adopted_by_the_names_of_files(
    models: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Version 0 of a run has the names that engines know, whatever those of the model it starts from."""
    case = "qwen3_moe-untied"
    folder, reference = models[case]
    fused = tmp_path / "fused"
    shutil.copytree(folder, fused)
    for file in fused.glob("*.safetensors"):
        file.unlink()
    tensors = {name: p.detach().clone() for name, p in reference.named_parameters()}
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    log = rb.open(tmp_path / "store", create=True)
    config = fabric.config(fabric.SFT, model=str(fused))
    with log.writer("train") as writer:
        publisher = Publisher(config, log, writer, History(config.run, "actor"))
        publisher.adopt_model()
        publisher.close()
    (written,) = (e.record for e in log.events() if isinstance(e.record, CheckpointWritten))
    stored = read_weights(log.path / written.path)
    assert set(stored) == set(weight_shapes(read_shape(folder)))
    assert digest_tensors(stored) == digest_tensors(widened(read_weights(folder)))


# What does not fit --------------------------------------------------------------------------------


LAYER = "model.layers.1."
EXPERT = LAYER + "mlp.experts.3."


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("model.embed_tokens.weight", 124),
        ("model.embed_tokens.weight", 126),
        ("lm_head.weight", 128),
        ("model.norm.weight", 31),
        (LAYER + "self_attn.q_proj.weight", 16),
        (LAYER + "self_attn.q_norm.weight", 9),
        (LAYER + "mlp.gate_proj.weight", 63),
        (LAYER + "mlp.down_proj.weight", None),
        (LAYER + "self_attn.v_proj.weight", None),
        ("lm_head.weight", None),
        (EXPERT + "gate_proj.weight", 23),
        (EXPERT + "down_proj.weight", None),
    ],
)
def test_weights_that_do_not_fit(models: dict[str, tuple[Path, Any]], name: str, rows: int | None) -> None:
    """A tensor that is missing, or has another shape, is named; nothing is padded or cut to fit."""
    folder, _ = models["qwen3_moe-untied" if "experts" in name else "qwen3-untied"]
    shape, tensors = read_shape(folder), read_weights(folder)
    if rows is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(rows, *tensors[name].shape[1:])
    with pytest.raises(ModelError, match=name):
        to_megatron(tensors, shape)


def test_a_layer_without_its_experts(models: dict[str, tuple[Path, Any]]) -> None:
    """Of files that fuse experts the tensor of the file is named."""
    folder, _ = models["gpt_oss-untied"]
    shape, tensors = read_shape(folder), read_weights(folder)
    name = "model.layers.1.mlp.experts.gate_up_proj_bias"
    with pytest.raises(ModelError, match=rf"{name} is \(4, 24\), not \(4, 48\)"):
        to_megatron(tensors | {name: torch.zeros(4, 24)}, shape)
    del tensors[name]
    with pytest.raises(ModelError, match=f"{name} is missing"):
        to_megatron(tensors, shape)


def test_transposed_weights_do_not_fit(models: dict[str, tuple[Path, Any]]) -> None:
    """As many numbers in another order are no match."""
    folder, _ = models["qwen3-untied"]
    shape, tensors = read_shape(folder), read_weights(folder)
    name = LAYER + "self_attn.q_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    with pytest.raises(ModelError, match=name):
        to_megatron(tensors, shape)
