"""Estimators: advantages and returns from rewards."""

from __future__ import annotations

from functools import partial

from parity import formulas, ours
from parity.cases import ALONE, RAGGED, WHOLE, Draw
from parity.peers import with_areal, with_openrlhf, with_trl, with_verl
from parity.row import Row

_GROUP_MEAN = partial(ours.advantages, deviation="none")
_RLOO = partial(ours.advantages, name="rloo")
_BIASED = {"whitening": "biased"}
_AREAL_MEAN = {"mean_level": "group", "std_level": None}
_GAE = {"discount": 0.9, "gae_decay": 0.8}
_THEIR_GAE = {"gamma": 0.9, "lam": 0.8}

_OF_GROUPS = (
    *(
        Row(
            "group_mean",
            "verl",
            name,
            _GROUP_MEAN,
            partial(with_verl.advantages, name=name, norm_adv_by_std_in_grpo=False),
            RAGGED,
            double,
        )
        for name, double in (("grpo", 1e-12), ("grpo_vectorized", None))
    ),
    Row(
        "group_mean",
        "OpenRLHF",
        "dr_grpo",
        _GROUP_MEAN,
        partial(with_openrlhf.estimated, estimator="dr_grpo"),
        double=None,
    ),
    Row("group_mean", "TRL", "scale_rewards none", _GROUP_MEAN, partial(with_trl.advantages, scale="none")),
    Row(
        "group_mean",
        "AReaL",
        "mean_level group",
        _GROUP_MEAN,
        partial(with_areal.normalized, **_AREAL_MEAN),
        double=None,
    ),
    *(
        Row(
            "unbiased",
            "verl",
            name,
            partial(ours.advantages, name=own),
            partial(with_verl.advantages, name=name),
            RAGGED,
            double,
        )
        for name, own, double in (("grpo", "grpo", 1e-12), ("grpo_vectorized", "policy_gradient", None))
    ),
    Row(
        "unbiased",
        "OpenRLHF",
        "group_norm with 1e-9",
        partial(ours.advantages, std_epsilon=1e-9),
        partial(with_openrlhf.estimated, estimator="group_norm"),
        double=None,
    ),
    Row(
        "unbiased",
        "TRL",
        "scale_rewards group with 1e-4",
        partial(ours.advantages, std_epsilon=1e-4),
        with_trl.advantages,
        double=None,
    ),
    *(
        Row(
            part,
            "AReaL",
            f"std_unbiased={unbiased}",
            partial(ours.advantages, deviation=part),
            partial(with_areal.normalized, mean_level="group", std_level="group", std_unbiased=unbiased),
            double=None,
        )
        for part, unbiased in (("unbiased", True), ("biased", False))
    ),
    *(
        Row("leave_one_out", "verl", name, _RLOO, partial(with_verl.advantages, name=name), draw)
        for name, draw in (("rloo", RAGGED), ("rloo_vectorized", ALONE))
    ),
    Row(
        "leave_one_out",
        "OpenRLHF",
        "rloo",
        _RLOO,
        partial(with_openrlhf.estimated, estimator="rloo"),
        double=None,
    ),
    Row("leave_one_out", "TRL", "RLOOTrainer", _RLOO, with_trl.rloo),
    Row(
        "leave_one_out",
        "AReaL",
        "mean_leave1out",
        _RLOO,
        partial(with_areal.normalized, **_AREAL_MEAN, mean_leave1out=True),
        double=None,
    ),
)

_OF_GROUPS += (
    Row(
        "none",
        "AReaL",
        "without reward_norm",
        partial(ours.advantages, baseline="none", deviation="none"),
        partial(with_areal.estimated, name="advantages", critic=False),
        double=None,
    ),
    *(
        Row(
            "group_of_one",
            "verl",
            f"{name} with reward [{own}]",
            partial(ours.advantages, name=own, group_of_one="reward"),
            partial(with_verl.advantages, name=name, **theirs),
            ALONE,
            double,
        )
        for name, own, theirs, double in (
            ("grpo", "grpo", {}, 1e-7),  # its deviation of one is 1 in float32, to which it adds 1e-6
            ("grpo", "policy_gradient", {}, 1e-7),
            ("grpo", "dr_grpo", {"norm_adv_by_std_in_grpo": False}, 1e-12),
            ("rloo", "rloo", {}, 1e-12),
        )
    ),
    Row(
        "group_of_one",
        "verl",
        "rloo_vectorized with zero",
        _RLOO,
        partial(with_verl.advantages, name="rloo_vectorized"),
        ALONE,
    ),
    *(
        Row(
            "reward_kl_order",
            "verl",
            f"{name} with before_baseline [{own}]",
            partial(ours.advantages, name=own, reward_kl=0.2, reward_kl_order="before_baseline"),
            partial(with_verl.advantages, name=name, kl=0.2, **theirs),
            RAGGED,
            # The float32 log-ratios that they are given are subtracted in float64 here.
            double=None,
        )
        for name, own, theirs in (
            ("grpo", "grpo", {}),
            ("grpo", "dr_grpo", {"norm_adv_by_std_in_grpo": False}),
            ("rloo", "rloo", {}),
        )
    ),
    Row(
        "reward_kl_order",
        "OpenRLHF",
        "dr_grpo with after_baseline",
        partial(ours.advantages, name="dr_grpo", reward_kl=0.2),
        partial(with_openrlhf.estimated, estimator="dr_grpo", kl=0.2),
        WHOLE,
        double=None,
    ),
)

_OF_TURNS = (
    *(
        Row(
            "turn_rewards",
            "verl",
            f"token_level_rewards [{discount:g}]",
            partial(ours.advantages, name="reinforce_plus_plus", turn_rewards=True, discount=discount),
            partial(with_verl.advantages, name="reinforce_plus_plus", turns=True, gamma=discount),
            double=1e-7,
        )
        for discount in (1.0, 0.9)
    ),
    Row(
        "discount_unit",
        "formula",
        "a loop over turns",
        partial(
            ours.advantages,
            baseline="none",
            deviation="none",
            turn_rewards=True,
            discount=0.9,
            discount_unit="turn",
        ),
        partial(formulas.turn_returns, discount=0.9),
    ),
)

_OF_TOKENS = (
    *(
        Row(
            "discount",
            "verl",
            f"gamma [{discount:g}]",
            partial(ours.advantages, name="reinforce_plus_plus", discount=discount),
            partial(with_verl.advantages, name="reinforce_plus_plus", gamma=discount),
            double=1e-7,
        )
        for discount in (1.0, 0.9)
    ),
    Row(
        "discount",
        "OpenRLHF",
        "gamma of reinforce",
        partial(ours.advantages, name="reinforce_plus_plus", discount=0.9, **_BIASED),
        partial(with_openrlhf.estimated, estimator="reinforce", gamma=0.9),
        WHOLE,
        double=None,
    ),
    Row(
        "discount",
        "AReaL",
        "discount without a critic",
        partial(ours.advantages, baseline="none", deviation="none", discount=0.9),
        partial(with_areal.estimated, name="advantages", gamma=0.9, critic=False),
        double=None,
    ),
    Row(
        "reward_kl",
        "verl",
        "k1 in the reward",
        partial(ours.advantages, name="reinforce_plus_plus", reward_kl=0.2),
        partial(with_verl.advantages, name="reinforce_plus_plus", kl=0.2),
        double=1e-7,
    ),
    Row(
        "reward_kl",
        "OpenRLHF",
        "compute_reward",
        partial(ours.advantages, name="reinforce_plus_plus_baseline", reward_kl=0.2, **_BIASED),
        partial(with_openrlhf.estimated, estimator="reinforce_baseline", kl=0.2),
        WHOLE,
        double=None,
    ),
    Row(
        "kl_bound",
        "OpenRLHF",
        "compute_reward with all",
        partial(
            ours.advantages, name="reinforce_plus_plus_baseline", reward_kl=0.2, kl_bound="all", **_BIASED
        ),
        partial(with_openrlhf.estimated, estimator="reinforce_baseline", kl=0.2),
        Draw(spread=12.0, holes=False),
        double=None,
    ),
    Row(
        "reward_kl",
        "AReaL",
        "kl_ctl",
        partial(ours.advantages, baseline="none", deviation="none", reward_kl=0.2),
        partial(with_areal.estimated, name="advantages", kl=0.2, critic=False),
        double=None,
    ),
    *(
        Row(
            "gae",
            peer,
            f"gae [{name}]",
            partial(own, name="ppo", **_GAE, **keys),
            partial(of, name=name, **_THEIR_GAE),
            draw,
            double,
        )
        for peer, of, draw, doubles in (
            ("verl", with_verl.gae, RAGGED, (1e-7, 1e-12)),
            ("OpenRLHF", partial(with_openrlhf.estimated, estimator="gae"), WHOLE, (None, 1e-12)),
            ("AReaL", with_areal.estimated, RAGGED, (None, None)),
        )
        for name, own, double, keys in (
            (
                "advantages",
                ours.advantages,
                doubles[0],
                {"verl": {}, "OpenRLHF": _BIASED, "AReaL": {"whitening": "none"}}[peer],
            ),
            ("returns", ours.returns, doubles[1], {}),
        )
    ),
)

_WHITENING = (
    Row(
        "whitening",
        "verl",
        "masked_whiten",
        partial(ours.whitened, how="unbiased"),
        with_verl.whitened,
        double=1e-7,
    ),
    *(
        Row(
            "whitening",
            "AReaL",
            f"adv_norm [{how}]",
            partial(ours.whitened, how=how),
            partial(with_areal.whitened, unbiased=how == "unbiased"),
            double=None,
        )
        for how in ("unbiased", "biased")
    ),
    Row(
        "whitening",
        "AReaL",
        "adv_norm [mean]",
        partial(ours.whitened, how="mean"),
        partial(with_areal.whitened, unbiased=True, level=None),
        double=None,
    ),
    Row(
        "whitening",
        "verl",
        "reinforce_plus_plus_baseline",
        partial(ours.advantages, name="reinforce_plus_plus_baseline"),
        partial(with_verl.advantages, name="reinforce_plus_plus_baseline"),
        RAGGED,
        double=1e-7,
    ),
    Row(
        "whitening",
        "OpenRLHF",
        "reinforce_baseline",
        partial(ours.advantages, name="reinforce_plus_plus_baseline", **_BIASED),
        partial(with_openrlhf.estimated, estimator="reinforce_baseline"),
        double=None,
    ),
)

_SHAPING = (
    Row(
        "reward_normalization",
        "AReaL",
        "reward_norm",
        partial(ours.shaped, reward_normalization="batch"),
        with_areal.rewards_normalized,
        double=None,
    ),
    Row(
        "reward_clip",
        "AReaL",
        "reward_clip",
        partial(ours.shaped, reward_clip=[-1.5, 1.5]),
        partial(with_areal.estimated, name="advantages", critic=False, clip=1.5),
        double=None,
    ),
    Row(
        "reward_clip",
        "OpenRLHF",
        "clip_range",
        partial(ours.advantages, name="reinforce_plus_plus", reward_clip=[0.5, 2.5], **_BIASED),
        partial(with_openrlhf.estimated, estimator="reinforce", clip=(0.5, 2.5)),
        double=None,
    ),
    Row(
        "overlong_length",
        "OpenRLHF",
        "apply_overlong_penalty",
        partial(ours.shaped, overlong_length=6, overlong_buffer=4, overlong_factor=0.5),
        partial(with_openrlhf.overlong, longest=6, buffer=4, factor=0.5),
        WHOLE,
    ),
    Row(
        "overlong_length",
        "AReaL",
        "reward_overlong_penalty",
        partial(ours.shaped, overlong_length=12, overlong_buffer=8, overlong_factor=0.5),
        partial(with_areal.overlong, longest=12, buffer=8, factor=0.5),
        WHOLE,
    ),
    *(
        Row(
            "truncated_reward",
            "OpenRLHF",
            f"stop_properly_penalty_coef [{coefficient:g}]",
            partial(ours.shaped, truncated_reward=coefficient),
            partial(with_openrlhf.stopped_properly, coefficient=coefficient),
        )
        for coefficient in (0.5, -1.0)
    ),
)

ROWS = _OF_GROUPS + _OF_TOKENS + _OF_TURNS + _WHITENING + _SHAPING
