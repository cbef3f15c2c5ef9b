"""Surrogates: the losses of tokens, under the normalizer that a peer has for each."""

from __future__ import annotations

from functools import partial

from parity import ours
from parity.cases import EXTREME
from parity.peers import with_areal, with_openrlhf, with_trl, with_verl
from parity.row import Row

_ASYMMETRIC = partial(ours.loss, clip_low=0.1, clip_high=0.28)
_DUAL = partial(ours.loss, dual_clip=3.0)
_GSPO = partial(ours.loss, surrogate="gspo", normalizer="sequence_mean")
_GSPO_TIGHT = partial(_GSPO, clip_low=3e-4, clip_high=4e-4)
_CISPO = partial(ours.loss, surrogate="cispo")
_SEQUENCE = "sequence"

_FREE = {"log_ratio_bound": "none", "sequence_log_ratio_bound": "none"}

ROWS = (
    Row("ppo_clip", "verl", "vanilla", ours.loss, with_verl.loss, EXTREME),
    Row(
        "ppo_clip",
        "verl",
        "clip_ratio_low, clip_ratio_high",
        _ASYMMETRIC,
        partial(with_verl.loss, clip_ratio_low=0.1, clip_ratio_high=0.28),
        EXTREME,
    ),
    Row("ppo_clip", "OpenRLHF", "PolicyLoss", ours.loss, with_openrlhf.loss, EXTREME),
    Row(
        "ppo_clip",
        "OpenRLHF",
        "clip_eps_low, clip_eps_high",
        _ASYMMETRIC,
        partial(with_openrlhf.loss, clip_eps_low=0.1, clip_eps_high=0.28),
        EXTREME,
    ),
    Row("ppo_clip", "AReaL", "ppo_actor_loss_fn", ours.loss, with_areal.loss),
    Row(
        "ppo_clip",
        "AReaL",
        "eps_clip_higher",
        _ASYMMETRIC,
        partial(with_areal.loss, low=0.1, eps_clip_higher=0.28),
    ),
    Row("ppo_clip", "TRL", "bnpo", ours.loss, partial(with_trl.loss, loss_type="bnpo")),
    Row(
        "ppo_clip",
        "TRL",
        "epsilon, epsilon_high",
        _ASYMMETRIC,
        partial(with_trl.loss, loss_type="dapo", epsilon_low=0.1, epsilon_high=0.28),
    ),
    Row("dual_clip", "verl", "clip_ratio_c", _DUAL, partial(with_verl.loss, clip_ratio_c=3.0), EXTREME),
    Row("dual_clip", "OpenRLHF", "dual_clip", _DUAL, partial(with_openrlhf.loss, dual_clip=3.0), EXTREME),
    Row("dual_clip", "AReaL", "c_clip", _DUAL, partial(with_areal.loss, c_clip=3.0), EXTREME, 1e-7),
    Row(
        "gspo",
        "verl",
        "gspo",
        _GSPO,
        partial(with_verl.loss, name="gspo", mode="seq-mean-token-mean"),
        double=1e-7,
    ),
    Row(
        "gspo",
        "verl",
        "gspo [the paper's clips]",
        _GSPO_TIGHT,
        partial(
            with_verl.loss,
            name="gspo",
            mode="seq-mean-token-mean",
            clip_ratio_low=3e-4,
            clip_ratio_high=4e-4,
        ),
        EXTREME,
        double=1e-7,
    ),
    Row(
        "gspo",
        "OpenRLHF",
        "gspo",
        _GSPO,
        partial(with_openrlhf.loss, policy_loss_type="gspo"),
        double=1e-7,
    ),
    Row(
        "gspo",
        "AReaL",
        "importance_sampling_level sequence",
        partial(_GSPO, normalizer="token_mean"),
        partial(with_areal.loss, importance_sampling_level=_SEQUENCE),
    ),
    Row(
        "gspo",
        "TRL",
        "importance_sampling_level sequence",
        _GSPO,
        partial(with_trl.loss, loss_type="grpo", importance_sampling_level=_SEQUENCE),
    ),
    Row("cispo", "verl", "cispo", _CISPO, partial(with_verl.loss, name="cispo"), EXTREME),
    Row(
        "cispo",
        "TRL",
        "cispo, whose epsilon_high is 1 + clip_high",
        partial(_CISPO, clip_low=1.0, clip_high=0.5),
        partial(with_trl.loss, loss_type="cispo", epsilon_high=1.5),
        EXTREME,
        1e-7,
    ),
    Row(
        "reinforce",
        "verl",
        "gpg",
        partial(ours.loss, surrogate="reinforce"),
        partial(with_verl.loss, name="gpg"),
        EXTREME,
    ),
    Row(
        "dro",
        "verl",
        "dro",
        partial(ours.loss, surrogate="dro", dro_beta=0.3),
        partial(with_verl.dro, beta=0.3),
        EXTREME,
    ),
    Row("log_ratio_bound", "verl", "20", ours.loss, with_verl.loss, EXTREME),
    Row("log_ratio_bound", "OpenRLHF", "20", ours.loss, with_openrlhf.loss, EXTREME),
    Row("log_ratio_bound", "AReaL", "none", partial(ours.loss, **_FREE), with_areal.loss, EXTREME),
    Row(
        "log_ratio_bound",
        "TRL",
        "none",
        partial(ours.loss, **_FREE),
        partial(with_trl.loss, loss_type="bnpo"),
        EXTREME,
    ),
    Row(
        "log_ratio_bound",
        "AReaL",
        "none [dual clip]",
        partial(_DUAL, **_FREE),
        partial(with_areal.loss, c_clip=3.0),
        EXTREME,
    ),
    Row(
        "sequence_log_ratio_bound",
        "verl",
        "10",
        _GSPO,
        partial(with_verl.loss, name="gspo", mode="seq-mean-token-mean"),
        EXTREME,
        double=1e-7,
    ),
    Row(
        "sequence_log_ratio_bound",
        "OpenRLHF",
        "none",
        partial(_GSPO, **_FREE),
        partial(with_openrlhf.loss, policy_loss_type="gspo"),
        EXTREME,
        double=1e-7,
    ),
    Row(
        "sequence_log_ratio_bound",
        "TRL",
        "none",
        partial(_GSPO, **_FREE),
        partial(with_trl.loss, loss_type="grpo", importance_sampling_level=_SEQUENCE),
        EXTREME,
    ),
    Row(
        "sequence_log_ratio_bound",
        "AReaL",
        "none",
        partial(_GSPO, normalizer="token_mean", **_FREE),
        partial(with_areal.loss, importance_sampling_level=_SEQUENCE),
        EXTREME,
    ),
    Row(
        "entropy",
        "verl",
        "entropy_coeff",
        partial(ours.loss, entropy=0.3),
        partial(with_verl.with_entropy, weight=0.3),
    ),
)
