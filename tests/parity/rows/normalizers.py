"""Normalizers, of three surrogates each."""

from __future__ import annotations

from functools import partial

from parity import ours
from parity.cases import EXTREME
from parity.peers import with_openrlhf, with_trl, with_verl
from parity.row import Row

_LENGTH = 7
_VERL = {
    "token_mean": ("token-mean", 1e-12),
    "sequence_mean": ("seq-mean-token-mean", 1e-7),
    "sequence_sum": ("seq-mean-token-sum", 1e-12),
    "constant": ("seq-mean-token-sum-norm", 1e-12),
}
_TRL = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
_SURROGATES = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}

ROWS = (
    *(
        Row(
            ours_name,
            "verl",
            f"{mode} [{loss}]",
            partial(ours.loss, surrogate=surrogate, normalizer=ours_name, constant_length=_LENGTH),
            partial(
                with_verl.loss, name=loss, mode=mode, length=_LENGTH if ours_name == "constant" else None
            ),
            EXTREME,
            double,
        )
        for ours_name, (mode, double) in _VERL.items()
        for surrogate, loss in _SURROGATES.items()
    ),
    *(
        Row(
            ours_name,
            "TRL",
            loss_type,
            partial(ours.loss, normalizer=ours_name, constant_length=_LENGTH),
            partial(with_trl.loss, loss_type=loss_type),
        )
        for ours_name, loss_type in _TRL.items()
    ),
    *(
        Row(
            name,
            "OpenRLHF",
            f"token_level_loss={by_token}",
            partial(ours.loss, normalizer=name, dual_clip=3.0),
            partial(with_openrlhf.loss, token_level_loss=by_token, dual_clip=3.0),
            EXTREME,
            double,
        )
        for name, by_token, double in (("token_mean", True, 1e-12), ("sequence_mean", False, 1e-7))
    ),
)
