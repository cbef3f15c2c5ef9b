"""The forward and backward passes of packed samples never wait for their device.

They run on torch's `meta` device, which has no numbers: whatever asks for one there, for which a device would
have to be waited for, fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric

from rollbook.train.algorithms.algorithm import Totals
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.model.model import build_module, layout_here, start_ranks
from rollbook.train.model.packed import OutputPlaces, pack
from rollbook.train.model.shape import read_shape
from rollbook.train.step.step import PolicyLoss

META = torch.device("meta")
LENGTHS = np.array([11, 4, 7])


def _gemma(folder: Path) -> Path:
    """A model with two rotations, and windows that samples are longer than."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 100.0}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 120}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4}
    config = Gemma3TextConfig(**sizes, **heads, layer_types=kinds, rope_parameters=rope)
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def _micro() -> MicroBatch:
    rng, shape = np.random.default_rng(0), (3, 11)
    mask = (np.arange(11) < LENGTHS[:, None]) & (np.arange(11) > 1)
    floats = [rng.uniform(0.5, 1.5, shape).astype(np.float32) for _ in range(6)]
    return MicroBatch(
        rng.integers(0, 100, shape),
        mask,
        -floats[0],
        floats[1],
        floats[2],
        np.zeros(shape, np.int64),
        lengths=LENGTHS,
        old_logprobs=-floats[3],
        reference_logprobs=-floats[4],
        weights=floats[5],
    )


def _on_meta(folder: Path) -> Any:
    start_ranks(torch.device("cpu"), 0)
    shape = read_shape(folder)
    layout = layout_here(shape)
    module = build_module(shape, layout, empty=True)
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):  # what are neither parameters nor buffers stays on the CPU
                setattr(part, name, value.to(META))
    return module


SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"batch_size": 3},
    "grpo": {"groups": 1, "group_size": 3, "kl": 0.1, "entropy": 0.1},
    "gspo": {"groups": 1, "group_size": 3},
    "decoupled_ppo": {"groups": 1, "group_size": 3},
    "ppo": {"groups": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_passes_do_not_wait(tmp_path: Path, family: str, name: str) -> None:
    """From a micro-batch to the gradients, whatever the loss is."""
    folder = fabric.model_folder() if family == "qwen3" else _gemma(tmp_path)
    module, micro = _on_meta(folder), _micro()
    algorithm = fabric.config(fabric.GRPO, algorithm={"name": name} | SETTINGS[name]).algorithm
    packed, places = pack(micro, META), OutputPlaces(module.output_layer, sequence=False)
    with places.only(packed.before_trained):
        outputs = module(packed.tokens, packed.positions, None, packed_seq_params=packed.documents)
    loss, kept = PolicyLoss(algorithm, 0, Totals(17, 3))(outputs[0], micro)
    loss.backward()
    assert (kept.values.shape, kept.losses.shape, loss.device) == ((3, 10), (3, 10), META)
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.device == META for parameter in weights)


def test_waiting_fails() -> None:
    """What the test above rests on."""
    for wait in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.nonzero):
        with pytest.raises(RuntimeError):  # NotImplementedError is one
            wait(torch.zeros(1, device=META))
