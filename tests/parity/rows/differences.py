"""Where peers differ from each other, or from a default of ours, under the same words."""

from __future__ import annotations

from functools import partial

from parity import ours
from parity.cases import ALONE, EXTREME, USUAL, WHOLE
from parity.peers import with_areal, with_openrlhf, with_trl, with_verl
from parity.row import Difference

_AREAL = {"level": "token", "metric": "ratio", "lower": 0.5, "upper": 2.0, "action": "mask"}
_RLHF = {"is_correction_threshold": (0.5, 2.0), "is_correction_level": "token"}
_BASELINE = {"estimator": "reinforce_baseline"}
_GAE = {"gamma": 0.9, "lam": 0.8}

DIFFERENCES = (
    Difference(
        "dual_clip",
        "`grpo`",
        "verl vanilla",
        "verl bounds by 3 unless told otherwise, `grpo` does not",
        ours.loss,
        partial(with_verl.loss, clip_ratio_c=3.0),
        EXTREME,
    ),
    Difference(
        "ppo_clip",
        "verl vanilla",
        "AReaL ppo_actor_loss_fn",
        "verl and OpenRLHF clamp log-ratios to +-20, AReaL and TRL do not",
        with_verl.loss,
        with_areal.loss,
        EXTREME,
    ),
    Difference(
        "ppo_clip",
        "OpenRLHF PolicyLoss",
        "TRL bnpo",
        "the same",
        with_openrlhf.loss,
        partial(with_trl.loss, loss_type="bnpo"),
        EXTREME,
    ),
    Difference(
        "gspo",
        "verl gspo",
        "OpenRLHF gspo",
        "verl clamps the mean log-ratio to at most 10",
        partial(with_verl.loss, name="gspo", mode="seq-mean-token-mean"),
        partial(with_openrlhf.loss, policy_loss_type="gspo"),
        EXTREME,
    ),
    Difference(
        "gspo",
        "OpenRLHF gspo",
        "OpenRLHF gspo with a correction",
        "the correction takes ratios to the engine's logprobs and weighs nothing",
        partial(with_openrlhf.loss, policy_loss_type="gspo"),
        partial(with_openrlhf.loss, policy_loss_type="gspo", **_RLHF),
    ),
    Difference(
        "cispo",
        "verl cispo",
        "TRL cispo",
        "with 0.2, verl caps ratios at 1.2 and TRL at 0.2",
        partial(with_verl.loss, name="cispo", clip_ratio_low=1.0),
        partial(with_trl.loss, loss_type="cispo", epsilon_high=0.2),
    ),
    Difference(
        "sequence_mean",
        "`grpo`",
        "TRL grpo",
        "`grpo` averages over tokens, TRL over samples",
        ours.loss,
        partial(with_trl.loss, loss_type="grpo"),
    ),
    Difference(
        "whitening",
        "verl reinforce_plus_plus_baseline",
        "OpenRLHF reinforce_baseline",
        "verl has the unbiased variance, OpenRLHF the biased one",
        partial(with_verl.advantages, name="reinforce_plus_plus_baseline"),
        partial(with_openrlhf.estimated, **_BASELINE),
    ),
    Difference(
        "unbiased",
        "`grpo`",
        "verl grpo",
        "a group of one has advantage 0 here, its reward in verl",
        partial(ours.advantages, name="grpo"),
        partial(with_verl.advantages, name="grpo"),
        ALONE,
    ),
    Difference(
        "leave_one_out",
        "verl rloo",
        "verl rloo_vectorized",
        "a group of one has its reward in the one, 0 in the other",
        partial(with_verl.advantages, name="rloo"),
        partial(with_verl.advantages, name="rloo_vectorized"),
        ALONE,
    ),
    Difference(
        "unbiased",
        "OpenRLHF group_norm",
        "TRL scale_rewards group",
        "1e-9 or 1e-4 is added to the deviation; 1e-6 in verl",
        partial(with_openrlhf.estimated, estimator="group_norm"),
        with_trl.advantages,
    ),
    Difference(
        "discount",
        "verl reinforce_plus_plus",
        "OpenRLHF reinforce",
        "tokens in between that are not trained take a step of discount in OpenRLHF",
        partial(ours.advantages, name="reinforce_plus_plus", discount=0.9, whitening="biased"),
        partial(with_openrlhf.estimated, estimator="reinforce", gamma=0.9),
        USUAL,
    ),
    Difference(
        "gae",
        "verl gae",
        "OpenRLHF gae",
        "the same",
        partial(with_verl.gae, name="returns", **_GAE),
        partial(with_openrlhf.estimated, estimator="gae", name="returns", **_GAE),
    ),
    Difference(
        "k2",
        "verl kl_penalty k2",
        "OpenRLHF kl_estimator k2",
        "OpenRLHF and AReaL bound k1 and k2 by +-10, verl k3 alone",
        partial(with_verl.kl, estimator="k2"),
        partial(with_openrlhf.kl, estimator="k2"),
        EXTREME,
    ),
    Difference(
        "overlong_length",
        "OpenRLHF apply_overlong_penalty",
        "AReaL reward_overlong_penalty",
        "AReaL's penalty grows on beyond the greatest length",
        partial(with_openrlhf.overlong, longest=6, buffer=4),
        partial(with_areal.overlong, longest=6, buffer=4),
        WHOLE,
    ),
    Difference(
        "reward_kl",
        "verl grpo",
        "OpenRLHF dr_grpo",
        "verl takes the baseline after the KL penalty, OpenRLHF before",
        partial(with_verl.advantages, name="grpo", norm_adv_by_std_in_grpo=False, kl=0.2),
        partial(with_openrlhf.estimated, estimator="dr_grpo", kl=0.2),
        WHOLE,
    ),
    Difference(
        "icepop",
        "verl token_k1",
        "AReaL mask",
        "verl does not count rejected tokens, AReaL and OpenRLHF do",
        partial(with_verl.rejected_loss, option="token_k1", threshold="0.5_2.0"),
        partial(with_areal.loss, rejection=_AREAL),
    ),
    Difference(
        "icepop",
        "verl token_k1, 0.5_1.5",
        "AReaL mask, 0.5 to 1.5",
        "verl tests the inverse of the ratio: it keeps 0.667 to 2",
        partial(with_verl.kept, option="token_k1", threshold="0.5_1.5"),
        lambda case: (with_areal.weights(case, **_AREAL | {"upper": 1.5}) > 0).float(),
    ),
    Difference(
        "sequence_mask_tis",
        "OpenRLHF seq mask",
        "AReaL sequence mask",
        "samples that are kept have each token's ratio in OpenRLHF, their geometric mean in AReaL",
        partial(with_openrlhf.loss, **_RLHF | {"is_correction_level": "seq"}),
        partial(with_areal.loss, rejection=_AREAL | {"level": "sequence"}),
    ),
    Difference(
        "ipo",
        "OpenRLHF ipo",
        "TRL ipo",
        "OpenRLHF sums over tokens, TRL and AReaL average",
        partial(with_openrlhf.dpo, ipo=True),
        partial(with_trl.dpo, kind="ipo"),
    ),
)
