"""KL estimates, the critic's loss, and losses of pairs."""

from __future__ import annotations

from functools import partial

from parity import formulas, ours
from parity.cases import EXTREME, USUAL
from parity.peers import with_areal, with_openrlhf, with_trl, with_verl
from parity.row import Row

_REGULARIZERS = (
    *(
        Row(
            name,
            peer,
            f"{called} {name}",
            partial(ours.kl, estimator=name),
            partial(of, estimator=name),
            # OpenRLHF and AReaL bound all of them by 10, verl and ours k3 alone.
            draw=EXTREME if peer == "verl" or name == "k3" else USUAL,
            double=double,
        )
        for peer, called, of, double in (
            ("verl", "kl_penalty", with_verl.kl, 1e-12),
            ("OpenRLHF", "kl_estimator", with_openrlhf.kl, None),
            ("AReaL", "KLEstimator", with_areal.kl, None),
        )
        for name in ("k1", "k2", "k3")
    ),
    *(
        Row(
            "kl_bound",
            peer,
            f"{called} with {bound} [{name}]",
            partial(ours.kl, estimator=name, bound=bound),
            partial(of, estimator=name),
            EXTREME,
            double,
        )
        for peer, called, of, bound, double in (
            ("verl", "kl_penalty", with_verl.kl, "k3", 1e-12),
            ("OpenRLHF", "kl_estimator", with_openrlhf.kl, "all", None),
            ("AReaL", "KLEstimator", with_areal.kl, "all", None),
        )
        for name in ("k1", "k2", "k3")
    ),
    Row(
        "kl_bound",
        "TRL",
        "beta with none",
        partial(ours.loss, kl=0.3, kl_bound="none", log_ratio_bound="none"),
        partial(with_trl.loss, loss_type="bnpo", beta=0.3),
        EXTREME,
    ),
    *(
        Row(
            "kl_target",
            peer,
            "AdaptiveKLController",
            partial(ours.adapted, kl=0.2, kl_target=3.0, kl_horizon=1_000),
            partial(of, coefficient=0.2, target=3.0, horizon=1_000),
        )
        for peer, of in (("verl", with_verl.adapted), ("OpenRLHF", with_openrlhf.adapted))
    ),
    Row(
        "age_decay",
        "formula",
        "a loop over tokens",
        partial(ours.aged, decay=0.7),
        partial(formulas.aged, decay=0.7),
    ),
    Row("k3", "TRL", "beta", partial(ours.loss, kl=0.3), partial(with_trl.loss, loss_type="bnpo", beta=0.3)),
)

_CRITIC = tuple(
    Row("value_clip", peer, name, partial(ours.value_loss, clip=0.5), partial(of, clip=0.5), EXTREME, double)
    for peer, name, of, double in (
        ("verl", "compute_value_loss", with_verl.value_loss, 1e-12),
        ("OpenRLHF", "ValueLoss", with_openrlhf.value_loss, 1e-12),
        ("AReaL", "ppo_critic_loss_fn", with_areal.value_loss, None),
    )
)

_IPO = {"preference_loss": "ipo"}
_PREFERENCES = (
    *(
        Row("sigmoid", peer, name, ours.pair_loss, of, double=double)
        for peer, name, of, double in (
            ("OpenRLHF", "DPOLoss", with_openrlhf.dpo, 1e-12),
            ("TRL", "sigmoid", with_trl.dpo, 1e-12),
            ("AReaL", "sigmoid", with_areal.dpo, None),
        )
    ),
    Row(
        "label_smoothing",
        "OpenRLHF",
        "label_smoothing",
        partial(ours.pair_loss, label_smoothing=0.2, beta=0.3),
        partial(with_openrlhf.dpo, smoothing=0.2, beta=0.3),
    ),
    Row(
        "length_normalized",
        "TRL",
        "sigmoid_norm",
        partial(ours.pair_loss, length_normalized=True, beta=2.0),
        partial(with_trl.dpo, kind="sigmoid_norm", beta=2.0),
    ),
    Row(
        "ipo",
        "OpenRLHF",
        "ipo [sums]",
        partial(ours.pair_loss, **_IPO),
        partial(with_openrlhf.dpo, ipo=True),
    ),
    *(
        Row(
            "length_normalized",
            peer,
            "ipo",
            partial(ours.pair_loss, length_normalized=True, **_IPO),
            of,
            double=double,
        )
        for peer, of, double in (
            ("TRL", partial(with_trl.dpo, kind="ipo"), 1e-12),
            ("AReaL", partial(with_areal.dpo, ipo=True), None),
        )
    ),
    Row(
        "simpo",
        "TRL",
        "CPOTrainer simpo",
        partial(ours.pair_loss, name="simpo", beta=1.5, target_margin=0.6),
        partial(with_trl.simpo, beta=1.5, gamma=0.6),
        double=1e-12,
    ),
    Row(
        "orpo",
        "TRL",
        "ORPOTrainer",
        partial(ours.pair_loss, name="orpo", odds_weight=0.3),
        partial(with_trl.orpo, weight=0.3),
        double=None,  # TRL takes odds in float32
    ),
    Row(
        "sft_weight",
        "formula",
        "equation 2",
        partial(ours.pair_loss, sft_weight=0.7),
        partial(formulas.rpo, weight=0.7),
    ),
)

_REWARD_MODELS = (
    *(
        Row(
            "margin" if margin else "bradley_terry",
            peer,
            name,
            partial(ours.reward_loss, margin=margin),
            partial(of, margin=margin),
            double=1e-12,
        )
        for peer, name, of in (
            ("OpenRLHF", "PairWiseLoss", with_openrlhf.bradley_terry),
            ("TRL", "RewardTrainer", with_trl.bradley_terry),
        )
        for margin in (False, True)
    ),
    Row("bradley_terry", "OpenRLHF", "LogExpLoss", ours.reward_loss, with_openrlhf.log_exp),
    Row(
        "centring",
        "TRL",
        "center_rewards_coefficient",
        partial(ours.reward_loss, centring=0.3),
        partial(with_trl.bradley_terry, centre=0.3),
        double=1e-12,
    ),
    Row(
        "batch_sum_to_zero",
        "formula",
        "squared mean",
        partial(ours.reward_loss, batch_sum_to_zero=0.7),
        partial(formulas.sum_to_zero, weight=0.7),
        double=1e-12,
    ),
    Row(
        "mean_deviation",
        "formula",
        "logistic noise",
        partial(ours.reward_loss, head="mean_deviation"),
        formulas.uncertain,
    ),
    Row(
        "calibration_temperature",
        "formula",
        "bisection of a derivative",
        ours.temperature,
        formulas.temperature,
        double=1e-7,  # the least of a flat curve
    ),
)

ROWS = _REGULARIZERS + _CRITIC + _PREFERENCES + _REWARD_MODELS
