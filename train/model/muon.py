"""Muon for the matrices of the hidden layers, beside Adam for all else."""

from __future__ import annotations

from typing import Any

import torch

from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.optimizer_slices import main_of

LAYERS = "decoder.layers."
"""What Megatron's names of hidden layers begin with."""


class MuonBesideAdam:
    """Two optimizers as one: they share their state, and their parameter groups stand one behind the other.

    Muon takes the matrices of hidden layers; embeddings, the output layer or score head, norms and biases
    stay with Adam (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982). Its step is scaled to the root
    mean square of Adam's (section 2.2 there), so both have one learning rate and one weight decay. Matrices
    that Megatron holds as one, such as those of queries, keys and values, are orthogonalized as one.
    """

    def __init__(self, adam: torch.optim.Optimizer, module: torch.nn.Module, wanted: OptimizerConfig) -> None:
        named = module.named_parameters()
        matrices = {main_of(p) for name, p in named if name.startswith(LAYERS) and p.dim() == 2}
        groups: list[dict[str, Any]] = []
        for group in adam.param_groups:
            groups.append(
                {key: value for key, value in group.items() if key not in adam.defaults}
                | {"params": [p for p in group["params"] if p in matrices]}
            )
            group["params"] = [p for p in group["params"] if p not in matrices]
        self._adam = adam
        self._muon = torch.optim.Muon(
            [group for group in groups if group["params"]],
            lr=wanted.lr,
            weight_decay=wanted.weight_decay,
            momentum=wanted.muon_momentum,
            ns_steps=wanted.muon_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        self._muon.state = adam.state

    @property
    def state(self) -> Any:
        """Of all parameters."""
        return self._adam.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Adam's, then Muon's."""
        return [*self._adam.param_groups, *self._muon.param_groups]

    def step(self) -> None:
        """Take a step with the gradients in place."""
        self._adam.step()
        self._muon.step()
