"""TRL's losses, advantages and ratios on a case: methods of its trainers, on objects that have what they
read."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from parity.cases import Case
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer


def _accelerator() -> SimpleNamespace:
    def same(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    return SimpleNamespace(
        device="cpu", num_processes=1, process_index=0, gather=same, gather_for_metrics=same, reduce=same
    )


def _metrics() -> dict[str, Any]:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


class _Trainer:
    """What `_compute_loss` reads of a GRPO trainer, and nothing else."""

    def __init__(self, case: Case, **keys: Any) -> None:
        self._case = case
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.use_vllm = self.vllm_importance_sampling_correction = False
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.importance_sampling_level = "token"
        self.epsilon_low = self.epsilon_high = 0.2
        self.beta, self.loss_type, self.max_completion_length = 0.0, "dapo", 7
        self.current_gradient_accumulation_steps = 1
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
        self.accelerator, self._metrics = _accelerator(), _metrics()
        for name, value in keys.items():
            setattr(self, name, value)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        return self._case.logprobs, torch.zeros_like(self._case.logprobs), None


def loss(case: Case, ratios: torch.Tensor | None = None, **keys: Any) -> torch.Tensor:
    """The loss of a `loss_type`; `ratios` weigh the tokens."""
    ids = torch.zeros_like(case.mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": case.mask.long(),
        "advantages": case.advantages[:, 0],
        "old_per_token_logps": case.old,
        "ref_per_token_logps": case.reference,
        "num_items_in_batch": case.mask.sum(),
    }
    if ratios is not None:
        inputs["importance_sampling_ratio"] = ratios
        keys |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
    return GRPOTrainer._compute_loss(_Trainer(case, **keys), None, inputs)


def weighted_loss(case: Case, mode: str, low: float | None, high: float, **keys: Any) -> torch.Tensor:
    """The loss with its weights of an engine's mismatch."""
    return loss(case, ratios=weights(case, mode, low, high), **keys)


class _Generating:
    """What `_generate_and_score_completions` reads: completions are those of the case, and made at once."""

    def __init__(self, case: Case, **keys: Any) -> None:
        self._case, count = case, len(case.mask)
        self.accelerator, self._metrics = _accelerator(), _metrics()
        self.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
        self.environment_factories = self.environments = self.pad_to_multiple_of = self.reward_clip_range = (
            None
        )
        self.tools: list[Any] = []
        self._tokenizer = SimpleNamespace(pad_token_id=0)
        self.mask_truncated_completions = self.normalize_advantages = self.log_multimodal = False
        self.args = SimpleNamespace(
            per_device_train_batch_size=count,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            gradient_checkpointing_kwargs=None,
        )
        self.use_vllm = self.vllm_importance_sampling_correction = False
        self.num_iterations, self.beta, self.num_generations = 1, 0.0, case.group_size
        self.multi_objective_aggregation, self.scale_rewards = "sum_then_normalize", "group"
        self.reward_weights, self.reward_func_names = torch.ones(1), ["reward"]
        self._pending_extra_logs: dict[str, Any] = {}
        self._pending_metrics: dict[str, Any] = {}
        self._logs: Any = defaultdict(list) | {"rewards": defaultdict(list)}
        for name, value in keys.items():
            setattr(self, name, value)

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        rows, columns = self._case.mask.shape
        prompt, ids, texts = [[1]] * rows, [[2] * columns] * rows, ["text"] * rows
        sampled = self._case.rollout.tolist()
        if not hasattr(self, "is_grpo"):
            return prompt, ids, texts
        return prompt, ids, self._case.mask.int().tolist(), texts, sampled, {}, None, None

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        return self._case.old, None, None

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return self._case.rewards[:, None]


def _scored(case: Case, kind: Any, **keys: Any) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = kind._generate_and_score_completions(
        _Generating(case, **keys), [{"prompt": ""}] * len(case.mask)
    )
    return outputs


def advantages(case: Case, scale: str = "group") -> torch.Tensor:
    """GRPO's, of `scale_rewards`; 0 outside the mask."""
    values = _scored(case, GRPOTrainer, is_grpo=True, scale_rewards=scale)["advantages"]
    return torch.where(case.mask, values[:, None], 0.0)


def rloo(case: Case) -> torch.Tensor:
    """RLOO's advantages, 0 outside the mask."""
    return torch.where(case.mask, _scored(case, RLOOTrainer)["advantages"][:, None], 0.0)


def weights(case: Case, mode: str, low: float | None, high: float) -> torch.Tensor:
    """The ratios of a `vllm_importance_sampling_mode`, 0 outside the mask."""
    ratios = _scored(
        case,
        GRPOTrainer,
        is_grpo=True,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )["importance_sampling_ratio"]
    return torch.where(case.mask, ratios.expand(case.mask.shape), 0.0)


def _pairs(values: torch.Tensor) -> torch.Tensor:
    return values[: len(values) // 2 * 2]


def dpo(case: Case, kind: str = "sigmoid", beta: float = 0.1) -> torch.Tensor:
    """A loss of pairs, `loss_type` DPO's: each sample of the first half against one of the second.

    The first column of what the trainer sees is a prompt's, of which there is no loss.
    """
    masked = [torch.where(case.mask, logprobs, 0.0) for logprobs in (case.logprobs, case.reference)]
    policy, reference = (
        SimpleNamespace(
            log_probs=_pairs(logprobs),
            entropy=_pairs(logprobs),
            mean_logits=_pairs(logprobs),
            is_top1=_pairs(logprobs) > 0,
        )
        for logprobs in masked
    )
    mask = torch.nn.functional.pad(_pairs(case.mask).long(), (1, 0))
    model = torch.nn.Identity()
    model.is_gradient_checkpointing = False
    trainer = SimpleNamespace(
        model=model,
        ref_model=lambda **_: reference,
        accelerator=_accelerator(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _metrics=_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    return DPOTrainer._compute_loss(trainer, lambda **_: policy, inputs, False)


def _means(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean logprobs of the samples of the first half, and of the second."""
    sums = (case.logprobs * case.mask).sum(-1) / case.mask.sum(-1)
    chosen, rejected = _pairs(sums).chunk(2)
    return chosen, rejected


def simpo(case: Case, beta: float, gamma: float) -> torch.Tensor:
    """`loss_type` SimPO of the trainer of CPO, of mean logprobs."""
    trainer = SimpleNamespace(
        alpha=0.0,
        beta=beta,
        simpo_gamma=gamma,
        label_smoothing=0.0,
        loss_type="simpo",
        accelerator=_accelerator(),
    )
    return CPOTrainer.cpo_loss(trainer, *_means(case))[0].mean()


def orpo(case: Case, weight: float) -> torch.Tensor:
    """ORPO's loss. The cross-entropy, which the trainer has of all chosen tokens of a batch, is each sample's
    mean, as in the paper."""
    chosen, rejected = _means(case)
    trainer = SimpleNamespace(
        concatenated_forward=lambda *_: (chosen, rejected, chosen, rejected, -chosen.mean()),
        aux_loss_enabled=False,
        beta=weight,
        accelerator=_accelerator(),
    )
    trainer.odds_ratio_loss = partial(ORPOTrainer.odds_ratio_loss, trainer)
    loss, _ = ORPOTrainer.get_batch_loss_metrics(trainer, None, {})
    return loss


def bradley_terry(case: Case, *, margin: bool = False, centre: float | None = None) -> torch.Tensor:
    """A reward model's loss of pairs, whose rewards are the first values and margins the first returns."""
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=centre),
        accelerator=_accelerator(),
        _metrics=_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    rewards = _pairs(case.values[:, :1])
    inputs = {"attention_mask": torch.ones(len(rewards), 1)}
    if margin:
        inputs["margin"] = case.returns[: len(rewards) // 2, 0].abs()
    return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), inputs)
