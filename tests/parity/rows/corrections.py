"""Corrections: the weights themselves, and the losses that are weighted by them."""

from __future__ import annotations

from functools import partial

from parity import ours
from parity.cases import EXTREME, USUAL
from parity.peers import with_areal, with_openrlhf, with_trl, with_verl
from parity.row import Row

_BOUNDS = {"correction_low": 0.5, "correction_high": 2.0}
_WIDE = {"correction_low": 0.01, "correction_high": 100.0}
_RLHF = {"is_correction_threshold": (0.5, 2.0), "is_correction_level": "token"}
_AREAL = {"level": "token", "metric": "ratio", "lower": 0.5, "upper": 2.0}
_LOSS = partial(ours.loss, old="trainer")

_WEIGHTS = (
    *(
        Row(
            part,
            "verl",
            f"rollout_is {level}" + (" with two bounds" if isinstance(threshold, str) else ""),
            partial(ours.weights, correction=part, **keys),
            partial(with_verl.weights, level=level, threshold=threshold),
            draw,
        )
        for part, level, threshold, keys, draw in (
            ("tis", "token", 2.0, {}, EXTREME),
            ("icepop", "token", "0.5_2.0", _BOUNDS, EXTREME),
            ("sequence_tis", "sequence", 2.0, {}, EXTREME),
            # verl divides by zero where it rejects all samples of a batch.
            ("mis", "sequence", "0.01_100.0", _WIDE, USUAL),
        )
    ),
    *(
        Row(
            part,
            "TRL",
            mode,
            partial(ours.weights, correction=part, **keys),
            partial(with_trl.weights, mode=mode, low=low, high=high),
            double=None,  # it takes the engine's logprobs as float32
        )
        for part, mode, low, high, keys in (
            ("tis", "token_truncate", 0.5, 2.0, _BOUNDS),
            ("icepop", "token_mask", 0.5, 2.0, _BOUNDS),
            ("sequence_tis", "sequence_truncate", None, 2.0, {}),
            ("mis", "sequence_mask", 0.01, 100.0, _WIDE),
        )
    ),
    *(
        Row(
            part,
            "AReaL",
            f"action {action}",
            partial(ours.weights, correction=part, **_BOUNDS),
            partial(with_areal.weights, **_AREAL, action=action),
            double=None,
        )
        for part, action in (("tis", "clamp"), ("icepop", "mask"))
    ),
)

_LOSSES = (
    *(
        Row(
            part,
            "verl",
            f"rollout_is_weights [{loss}, {level}]",
            partial(_LOSS, surrogate=surrogate, correction=part, **keys),
            partial(with_verl.weighted_loss, level=level, threshold=threshold, name=loss),
        )
        for part, level, threshold, keys in (
            ("tis", "token", 2.0, {}),
            ("icepop", "token", "0.5_2.0", _BOUNDS),
            ("sequence_tis", "sequence", 2.0, {}),
        )
        for surrogate, loss in (("ppo_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo"))
    ),
    Row(
        "tis",
        "OpenRLHF",
        "clip",
        partial(_LOSS, correction="tis", **_BOUNDS),
        partial(with_openrlhf.loss, is_correction_mode="clip", **_RLHF),
    ),
    Row(
        "icepop",
        "OpenRLHF",
        "mask",
        partial(_LOSS, correction="icepop", **_BOUNDS),
        partial(with_openrlhf.loss, **_RLHF),
    ),
    Row(
        "sequence_mask_tis",
        "OpenRLHF",
        "mask of level seq",
        partial(_LOSS, correction="sequence_mask_tis", **_BOUNDS),
        partial(with_openrlhf.loss, **_RLHF | {"is_correction_level": "seq"}),
    ),
    Row(
        "icepop",
        "AReaL",
        "action mask [loss]",
        partial(_LOSS, correction="icepop", **_BOUNDS),
        partial(with_areal.loss, rejection=_AREAL | {"action": "mask"}),
        double=None,
    ),
    Row(
        "count_rejected",
        "AReaL",
        "action mask with true",
        partial(_LOSS, correction="icepop", **_BOUNDS),
        partial(with_areal.loss, rejection=_AREAL | {"action": "mask"}),
        double=None,
    ),
    Row(
        "count_rejected",
        "verl",
        "token_k1 with false",
        partial(_LOSS, correction="icepop", **_BOUNDS, count_rejected=False),
        partial(with_verl.rejected_loss, option="token_k1", threshold="0.5_2.0"),
        double=1e-12,
    ),
    Row(
        "count_rejected",
        "verl",
        "token_k1 with false [seq-mean-token-sum]",
        partial(_LOSS, correction="icepop", **_BOUNDS, count_rejected=False, normalizer="sequence_sum"),
        partial(with_verl.rejected_loss, option="token_k1", threshold="0.5_2.0", mode="seq-mean-token-sum"),
        double=1e-12,
    ),
    Row(
        "decoupled_ppo",
        "AReaL",
        "decoupled with action clamp",
        partial(ours.loss, name="decoupled_ppo", correction_low=1e-6),
        partial(with_areal.loss, rejection=_AREAL | {"action": "clamp", "lower": 1e-6, "upper": 5.0}),
        double=None,
    ),
    *(
        Row(
            part,
            "TRL",
            f"{mode} [loss]",
            partial(_LOSS, correction=part, **_BOUNDS),
            partial(with_trl.weighted_loss, mode=mode, low=0.5, high=2.0, loss_type="bnpo"),
            double=None,
        )
        for part, mode in (("tis", "token_truncate"), ("icepop", "token_mask"))
    ),
)

ROWS = _WEIGHTS + _LOSSES
