"""Tiny mixtures of experts, and what transformers makes of them if tokens are sent to given experts."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.store.events.routed_experts import ExpertIds

VOCAB, LAYERS, EXPERTS, TOPK = 100, 2, 8, 3
FAMILIES = ("qwen3_moe", "gpt_oss")


@functools.cache
def mixture(family: str) -> tuple[Path, Any]:
    """Folder and transformers model, made once: float32, every weight random."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(5)
    model = _model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(around + 0.2 * torch.randn_like(parameter))
    folder = Path(_scratch().name) / family
    model.float().eval().save_pretrained(folder)
    return folder, model


@functools.cache
def _scratch() -> Any:
    return tempfile.TemporaryDirectory(prefix="rollbook-mixtures-")


def _model(family: str) -> Any:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "num_experts_per_tok": TOPK,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        own = {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values | own))
    own = {"num_local_experts": EXPERTS, "intermediate_size": 24}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**values | own))


def routers(model: Any) -> list[Any]:
    """The router of each layer."""
    return [getattr(layer.mlp, "gate", None) or layer.mlp.router for layer in model.model.layers]


@contextlib.contextmanager
def forced(model: Any, experts: ExpertIds | None) -> Iterator[list[torch.Tensor]]:
    """Within, tokens go to these experts [T, layers, topk]; those of -1, or all without any, to the router's
    choice. What each layer chose, [T, topk], is collected in what is yielded.

    Weights are the softmax over the chosen experts' logits, as both families have them.
    """
    chosen: list[torch.Tensor] = []

    def choose(at: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> Any:
            logits, _, own = output
            ids = own
            if experts is not None:
                recorded = torch.from_numpy(experts[:, at].astype(np.int64))
                ids = torch.where(recorded < 0, own, recorded)
            chosen.append(ids)
            return logits, torch.softmax(logits.gather(1, ids), -1), ids

        return hook

    hooks = [router.register_forward_hook(choose(at)) for at, router in enumerate(routers(model))]
    try:
        yield chosen
    finally:
        for handle in hooks:
            handle.remove()


def own_choice(model: Any, ids: Sequence[int]) -> ExpertIds:
    """What the routers choose for the tokens, int16 [T, layers, topk]."""
    with forced(model, None) as chosen, torch.no_grad():
        model(torch.tensor([list(ids)]))
    return torch.stack(chosen, 1).numpy().astype(np.int16)


def logprobs(
    model: Any, ids: Sequence[int], experts: ExpertIds | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """Logprob of each token after the first, float32 [T - 1], if tokens go to these experts."""
    whole = torch.tensor([list(ids)])
    with forced(model, experts):
        logits = model(whole).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, whole[0, 1:, None])[:, 0]


def other_choice(ids: Sequence[int], seed: int = 0) -> ExpertIds:
    """Random experts for the tokens, none twice at a place: int16 [T, layers, topk]."""
    rng = np.random.default_rng(seed)
    scores = rng.random((len(ids), LAYERS, EXPERTS))
    return np.argsort(scores, -1)[..., :TOPK].astype(np.int16)
