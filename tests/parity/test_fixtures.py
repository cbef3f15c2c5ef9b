"""Numbers worked out by hand, in float64: ours and every peer's code give them, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from parity import ours
from parity.cases import written_case
from parity.peers import with_areal, with_openrlhf, with_trl, with_verl
from parity.row import Fixture, Of, evaluated

_LN = math.log


_RATIOS = {"logprobs": [[_LN(0.5), 0.0, _LN(1.5)]], "old": [[0.0, 0.0, 0.0]]}
_THREE = {"correction_low": 0.5, "correction_high": 2.0}
_AREAL = {"level": "token", "metric": "ratio", "lower": 0.5, "upper": 2.0}
_MISMATCH = written_case(old=[[_LN(0.25), _LN(1.5), _LN(4.0)]], rollout=[[0.0, 0.0, 0.0]])
_SUMS = written_case(
    mask=[[1, 1, 1], [1, 0, 0]], advantages=[[-1.0, -2.0, -3.0], [-5.0, 0.0, 0.0]], rewards=[0.0, 0.0]
)
_GROUP = written_case(advantages=[[0.0], [0.0], [0.0]], rewards=[1.0, 2.0, 4.0])
_CRITIC = written_case(advantages=[[0.0] * 3], old_values=[[0.5, 0.6, 0.7]], rewards=[1.0])
_GAE = {"gamma": 0.9, "lam": 0.8}
_SD = math.sqrt(7 / 3)
_ALL_SD = math.sqrt(61 / 5 - 2.2**2)
_RETURNS = (0.81, 0.9, 1.0)
_MEAN = sum(_RETURNS) / 3
_SQUARES = sum((one - _MEAN) ** 2 for one in _RETURNS)
_PAIR = written_case(
    logprobs=[[-0.5, -0.5], [-1.0, -1.0]],
    reference=[[-0.75, -0.75], [-0.75, -0.75]],
    values=[[1.0, 0.0], [0.0, 0.0]],
    returns=[[0.5, 0.0], [0.0, 0.0]],
)


def _of_tokens(name: str, peers: Mapping[str, Of], **keys: Any) -> dict[str, Of]:
    return {"ours": partial(ours.advantages, name=name, **keys), **peers}


FIXTURES = (
    # Losses -0.5, 1, -2.4: the ratio 1.5 is clipped to 1.2, and gives no gradient.
    Fixture(
        "ppo_clip",
        written_case(**_RATIOS, advantages=[[1.0, -1.0, 2.0]]),
        -1.9 / 3,
        {
            "ours": ours.loss,
            "verl": with_verl.loss,
            "OpenRLHF": with_openrlhf.loss,
            "AReaL": with_areal.loss,
        },
        [[-0.5 / 3, 1 / 3, 0.0]],
    ),
    # Without the dual clip the loss is 5 and so is its gradient.
    Fixture(
        "dual_clip",
        written_case(logprobs=[[_LN(5.0)]], old=[[0.0]], advantages=[[-1.0]]),
        3.0,
        {
            "ours": partial(ours.loss, dual_clip=3.0),
            "verl": partial(with_verl.loss, clip_ratio_c=3.0),
            "OpenRLHF": partial(with_openrlhf.loss, dual_clip=3.0),
            "AReaL": partial(with_areal.loss, c_clip=3.0),
        },
        [[0.0]],
    ),
    # Ratios 2 and 1, whose geometric mean is the root of 2.
    Fixture(
        "gspo",
        written_case(logprobs=[[_LN(2.0), 0.0]], old=[[0.0, 0.0]], advantages=[[-1.0, -1.0]]),
        math.sqrt(2),
        {
            "ours": partial(ours.loss, surrogate="gspo", normalizer="sequence_mean"),
            "verl": partial(with_verl.loss, name="gspo", mode="seq-mean-token-mean"),
            "OpenRLHF": partial(with_openrlhf.loss, policy_loss_type="gspo"),
            "AReaL": partial(with_areal.loss, importance_sampling_level="sequence"),
            "TRL": partial(with_trl.loss, loss_type="grpo", importance_sampling_level="sequence"),
        },
        [[math.sqrt(0.5), math.sqrt(0.5)]],
        1e-7,
    ),
    # The ratio 2 is capped at 1.28, and the token keeps its gradient.
    Fixture(
        "cispo",
        written_case(logprobs=[[-1.0]], old=[[-1.0 - _LN(2.0)]], advantages=[[1.0]]),
        1.28,
        {
            "ours": partial(ours.loss, surrogate="cispo", clip_high=0.28),
            "verl": partial(with_verl.loss, name="cispo", clip_ratio_high=0.28),
            "TRL": partial(with_trl.loss, loss_type="cispo", epsilon_high=1.28),
        },
        [[-1.28]],
    ),
    # 0.5 + 0.15 * 0.25
    Fixture(
        "dro",
        written_case(logprobs=[[-1.0]], old=[[-1.5]], advantages=[[0.5]]),
        0.5375,
        {"ours": partial(ours.loss, surrogate="dro", dro_beta=0.3), "verl": partial(with_verl.dro, beta=0.3)},
        [[-0.35]],
    ),
    *(
        Fixture(
            name,
            _SUMS,
            value,
            {
                "ours": partial(ours.loss, normalizer=name, constant_length=7),
                "verl": partial(with_verl.loss, mode=mode, length=7 if name == "constant" else None),
            },
            within=1e-7,
        )
        for name, mode, value in (
            ("token_mean", "token-mean", 11 / 4),
            ("sequence_mean", "seq-mean-token-mean", 3.5),
            ("sequence_sum", "seq-mean-token-sum", 5.5),
            ("constant", "seq-mean-token-sum-norm", 5.5 / 7),
        )
    ),
    Fixture(
        "grpo",
        _GROUP,
        [[-4 / 3 / _SD], [-1 / 3 / _SD], [5 / 3 / _SD]],
        _of_tokens(
            "grpo",
            {
                "verl": partial(with_verl.advantages, name="grpo"),
                "OpenRLHF": partial(with_openrlhf.estimated, estimator="group_norm"),
            },
        ),
        within=1e-6,
    ),
    Fixture(
        "dr_grpo",
        _GROUP,
        [[-4 / 3], [-1 / 3], [5 / 3]],
        _of_tokens(
            "dr_grpo",
            {
                "OpenRLHF": partial(with_openrlhf.estimated, estimator="dr_grpo"),
                "TRL": partial(with_trl.advantages, scale="none"),
            },
        ),
        within=1e-6,
    ),
    # Two rewards before had the mean 2 and the variance 16; all five have the mean (4 + 7) / 5 and the
    # variance (2 * (16 + 4) + 1 + 4 + 16) / 5 - 2.2^2.
    Fixture(
        "reward_normalization [running]",
        _GROUP,
        [[-1.2 / _ALL_SD], [-0.2 / _ALL_SD], [1.8 / _ALL_SD]],
        {"ours": partial(ours.shaped, reward_normalization="running", reward_moments=[2, 2.0, 16.0])},
        within=1e-8,
    ),
    # 1 - 3, 2 - 2.5, 4 - 1.5
    Fixture(
        "rloo",
        _GROUP,
        [[-2.0], [-0.5], [2.5]],
        _of_tokens(
            "rloo",
            {
                "verl": partial(with_verl.advantages, name="rloo"),
                "OpenRLHF": partial(with_openrlhf.estimated, estimator="rloo"),
                "TRL": with_trl.rloo,
            },
        ),
        within=1e-6,
    ),
    # Temporal differences 0.04, 0.03, 0.3; advantages 0.21712, 0.246, 0.3.
    Fixture(
        "gae",
        _CRITIC,
        [[0.71712, 0.846, 1.0]],
        {
            "ours": partial(ours.returns, name="ppo", discount=0.9, gae_decay=0.8),
            "verl": partial(with_verl.gae, name="returns", **_GAE),
            "OpenRLHF": partial(with_openrlhf.estimated, estimator="gae", name="returns", **_GAE),
            "AReaL": partial(with_areal.estimated, name="returns", **_GAE),
        },
        within=1e-6,
    ),
    Fixture(
        "reinforce_plus_plus, unbiased variance",
        _CRITIC,
        [[(one - _MEAN) / math.sqrt(_SQUARES / 2) for one in _RETURNS]],
        _of_tokens(
            "reinforce_plus_plus",
            {"verl": partial(with_verl.advantages, name="reinforce_plus_plus", gamma=0.9)},
            discount=0.9,
        ),
        within=2e-6,
    ),
    Fixture(
        "reinforce_plus_plus, biased variance",
        _CRITIC,
        [[(one - _MEAN) / math.sqrt(_SQUARES / 3) for one in _RETURNS]],
        _of_tokens(
            "reinforce_plus_plus",
            {"OpenRLHF": partial(with_openrlhf.estimated, estimator="reinforce", gamma=0.9)},
            discount=0.9,
            whitening="biased",
        ),
        within=2e-6,
    ),
    *(
        Fixture(
            name,
            written_case(logprobs=[[-1.0]], reference=[[-1.5]]),
            value,
            {"ours": partial(ours.kl, estimator=name), "verl": partial(with_verl.kl, estimator=name)}
            | {"OpenRLHF": partial(with_openrlhf.kl, estimator=name)},
            [[slope]],
            1e-6,
        )
        for name, value, slope in (
            ("k1", 0.5, 1.0),
            ("k2", 0.125, 0.5),
            ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        )
    ),
    # Ratios 0.25, 1.5, 4, whose product is 1.5 and whose geometric mean 1.145.
    *(
        Fixture(
            name,
            _MISMATCH,
            [value],
            {"ours": partial(ours.weights, correction=name, **_THREE)} | peers,
            within=1e-6,
        )
        for name, value, peers in (
            ("tis", [0.5, 1.5, 2.0], {"AReaL": partial(with_areal.weights, **_AREAL, action="clamp")}),
            (
                "icepop",
                [0.0, 1.5, 0.0],
                {
                    "verl": partial(with_verl.weights, level="token", threshold="0.5_2.0"),
                    "AReaL": partial(with_areal.weights, **_AREAL, action="mask"),
                    "TRL": partial(with_trl.weights, mode="token_mask", low=0.5, high=2.0),
                },
            ),
            (
                "sequence_tis",
                [1.5, 1.5, 1.5],
                {"verl": partial(with_verl.weights, level="sequence", threshold=2.0)},
            ),
            ("mis", [1.5] * 3, {"TRL": partial(with_trl.weights, mode="sequence_mask", low=0.5, high=2.0)}),
            ("sequence_mask_tis", [0.25, 1.5, 4.0], {}),
        )
    ),
    # The value 1 is clipped to 0.5, whose error 1.5 is the greater one.
    Fixture(
        "value_clip",
        written_case(values=[[1.0]], old_values=[[0.0]], returns=[[2.0]]),
        1.125,
        {
            "ours": partial(ours.value_loss, clip=0.5),
            "verl": partial(with_verl.value_loss, clip=0.5),
            "OpenRLHF": partial(with_openrlhf.value_loss, clip=0.5),
        },
    ),
    # The chosen sample's log-ratio is 0.5, the rejected one's -0.5.
    Fixture(
        "dpo",
        _PAIR,
        _LN(1 + math.exp(-0.1)),
        {
            "ours": ours.pair_loss,
            "OpenRLHF": with_openrlhf.dpo,
            "TRL": with_trl.dpo,
            "AReaL": with_areal.dpo,
        },
        [[-0.1 / (1 + math.exp(0.1))] * 2, [0.1 / (1 + math.exp(0.1))] * 2],
        1e-6,
    ),
    Fixture(
        "ipo, of sums",
        _PAIR,
        16.0,
        {
            "ours": partial(ours.pair_loss, preference_loss="ipo"),
            "OpenRLHF": partial(with_openrlhf.dpo, ipo=True),
        },
        [[-8.0, -8.0], [8.0, 8.0]],
    ),
    Fixture(
        "ipo, of means",
        _PAIR,
        4.5**2,
        {
            "ours": partial(ours.pair_loss, preference_loss="ipo", length_normalized=True),
            "TRL": partial(with_trl.dpo, kind="ipo"),
            "AReaL": partial(with_areal.dpo, ipo=True),
        },
        [[-4.5, -4.5], [4.5, 4.5]],
        1e-6,
    ),
    *(
        Fixture(
            f"bradley_terry, margin={margin}",
            _PAIR,
            _LN(1 + math.exp(-logit)),
            {
                "ours": partial(ours.reward_loss, margin=margin),
                "OpenRLHF": partial(with_openrlhf.bradley_terry, margin=margin),
                "TRL": partial(with_trl.bradley_terry, margin=margin),
            },
        )
        for margin, logit in ((False, 1.0), (True, 0.5))
    ),
)


def test_by_hand(fixture: Fixture, whose: str) -> None:
    """The value, and its gradient with respect to the logprobs."""
    value, gradients = evaluated(fixture.functions[whose], fixture.case)
    expected = torch.tensor(fixture.value, dtype=torch.float64)
    assert value.double().shape == expected.shape
    assert float((value - expected).abs().max()) <= fixture.within
    if fixture.gradient is not None:
        expected = torch.tensor(fixture.gradient, dtype=torch.float64)
        assert float((gradients[0] - expected).abs().max()) <= fixture.within
