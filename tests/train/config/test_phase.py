"""The name of a training: what decides its course changes it, new keys of a later Rollbook do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook.store import Store
from rollbook.store.fold.history import History, fold_history
from rollbook.train.config.config import TrainConfig, parse_config
from rollbook.train.config.phase import family_in, family_names
from rollbook.train.config.recipe import RecipeConfig

PLAIN = {"model": "m", "steps": 1, "algorithm": {"name": "sft"}}
FORM_1 = {
    ("sft", "cut"): "22ab8464a6ab8c37a1493b0b7aebdcafd1e674e1615f9bf3ae2123184ea54c5c",
    ("sft", "tail"): "825258706fc3ad7f9070d88efc7dc763bfd0276d1d6550d507ed4421271bba80",
    ("grpo", "cut"): "95e22b82d89680af0e88fdc9ea6bae05ca68e675f16f9441426222199ce44ddf",
    ("grpo", "tail"): "b904a1043dc986f1c37cdc399d6078380221ba41781658a361ea9d9bfe306cbd",
    ("plain", "cut"): "63a22a947544f6cce0ba79eea8f0d99d74c1f686dfb452a0731832f7bd89ed7d",
    ("plain", "tail"): "af540d139bc5aba71c9ea905dc73888cbbafc03457787f39f9f6f84603de2de8",
}
"""As Rollbook before form 2 wrote them into stores, for these configurations."""
FORM_2 = "eebb0391faa29c7016827380a3e1891e2b6225e079441111b6f04b302870782e"
"""Of the plain configuration, from a cut: it stands in stores and must stay."""


def _named(name: str) -> TrainConfig:
    values = {"sft": fabric.SFT, "grpo": fabric.GRPO, "plain": PLAIN}[name]
    return parse_config({"model": "m"} | values, "test")


def _history(whole: History, *phases: str) -> History:
    """A history of one step in each of these phases."""
    steps = {}
    for number, phase in enumerate(phases):
        step = whole.steps[number]
        steps[number] = replace(step, planned=replace(step.planned, phase=phase))
    return replace(whole, steps=steps)


@pytest.mark.parametrize(("name", "source"), FORM_1)
def test_names_in_stores_of_earlier_commits_are_known(name: str, source: str) -> None:
    """The second name of a configuration is the one that was written before."""
    assert family_names(_named(name), source)[1] == FORM_1[name, source]


def test_the_form_of_names_does_not_change() -> None:
    """A change of it would make every store's training begin anew: it would have to be a form 3."""
    assert family_names(parse_config(PLAIN, "test"), "cut")[0] == FORM_2


def test_what_decides_the_course() -> None:
    """What may change between restarts leaves the name alone; everything else, and the source, do not."""
    base = family_names(fabric.config(fabric.SFT), "cut")
    free = {"steps": 99, "checkpoint_every": 1, "threads": 2, "device": "cpu", "idle_timeout_s": 1.0}
    free |= {"engine_gap_alarm": 1.0, "admission": {"order": "age"}}
    free |= {"sync": {"engines": ["http://x"]}, "model": "elsewhere", "checkpoint": {"overlap": True}}
    for key, value in free.items():
        assert family_names(fabric.config(fabric.SFT, **{key: value}), "cut") == base, key
    bound = {"seed": 4, "micro_batch_size": 2, "recipe": {"splits": ["train"]}, "optimizer": {"lr": 1.0}}
    bound |= {"algorithm": {"name": "sft", "batch_size": 5}, "run": "other", "policy": "critic"}
    names = [family_names(fabric.config(fabric.SFT, **{key: value}), "cut") for key, value in bound.items()]
    names += [base, family_names(fabric.config(fabric.SFT), "tail")]
    assert len({name for both in names for name in both}) == 2 * (len(bound) + 2)


def test_a_default_that_is_written_out_changes_nothing() -> None:
    """A value that equals its default is not said, in a table neither."""
    written = {"seed": 0, "recipe": {"splits": ["train"], "drop_zero_variance": True}}
    written |= {"optimizer": {"lr": 1e-4}, "algorithm": {"name": "sft", "batch_size": 64}}
    assert family_names(parse_config(PLAIN | written, "test"), "cut") == family_names(
        parse_config(PLAIN, "test"), "cut"
    )


class _WiderRecipe(RecipeConfig):
    max_tokens: int | None = None


class _Wider(TrainConfig):
    recipe: _WiderRecipe = _WiderRecipe()
    kl_weight: float = 0.0


@pytest.mark.parametrize("given", [{}, {"recipe": {"splits": ("teacher",)}}])
def test_a_new_key_at_its_default_changes_no_name(given: dict[str, Any]) -> None:
    """A later Rollbook with more keys goes on with the stores of this one."""
    narrow = TrainConfig.model_validate(PLAIN | {"model": "m"} | given, strict=False)
    wider = _Wider.model_validate(PLAIN | {"model": "m"} | given, strict=False)
    assert family_names(wider, "cut") == family_names(narrow, "cut")


@pytest.mark.parametrize("given", [{"kl_weight": 0.1}, {"recipe": {"max_tokens": 5}}])
def test_a_new_key_that_is_used_is_another_training(given: dict[str, Any]) -> None:
    """It has a name of its own, and none that the earlier form could have said."""
    names = family_names(_Wider.model_validate(PLAIN | given, strict=False), "cut")
    assert len(names) == 1
    assert names[0] not in family_names(parse_config(PLAIN, "test"), "cut")


def test_a_store_keeps_the_name_that_it_began_with(trained: Callable[..., Store]) -> None:
    """Steps under the earlier name are gone on after under it; another training begins under today's."""
    config = fabric.config(fabric.SFT)
    now, before = family_names(config, "cut")
    whole = fold_history(trained().events(), fabric.RUN, "actor")
    assert family_in(_history(whole), config, "cut") == now
    assert family_in(_history(whole, before), config, "cut") == before
    assert family_in(_history(whole, "x", f"{before}#2"), config, "cut") == before
    assert family_in(_history(whole, now), config, "cut") == now
    assert family_in(_history(whole, before), config, "tail") == family_names(config, "tail")[0]
