"""The experts of a path's positions, by its turns' records; and records that a model cannot replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.stories import fabric

from rollbook.store import Store
from rollbook.store.events.routed_experts import pack
from rollbook.store.fold.trajectory import fold
from rollbook.store.upkeep.sealer import Sealer
from rollbook.train.batches.materialize import Materializer
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.references import find_references
from rollbook.train.select.routing import FitCheck, Mixture, experts_of, misfit
from rollbook.train.select.samples import Sample, samples_of

MIXTURE = Mixture(layers=2, experts=50, topk=2)


def _ids(first: int, positions: int) -> Any:
    """Ids that say their position: layer 0 sends position p to p and p + 20, layer 1 to p + 1 and p + 21."""
    at = first + np.arange(positions)
    return (at[:, None, None] + np.array([[0, 20], [1, 21]])).astype(np.int32)


def _turns() -> list[Any]:
    """A root of 2 + 3 tokens; a child that has 1 + 2 more, and another that records nothing."""
    root = fabric.T((1, 2), (3, 4, 5), experts=pack(_ids(0, 4), 0))
    child = fabric.T((6,), (7, 8), parent=0, experts=pack(_ids(13, 4), 3))
    return [root, child, fabric.T((9,), (7, 8), parent=0)]


def _samples() -> list[Sample]:
    [trajectory] = fold(fabric.events(fabric.records("t", _turns()))).values()
    return list(samples_of(trajectory))


def test_positions_come_from_their_turns() -> None:
    """Position 3 is in two records: its token was sampled with the root's. The last has none, nor has what
    follows a turn that records nothing."""
    both, alone = (experts_of(sample, MIXTURE) for sample in _samples())
    assert both.dtype == np.int16
    assert both[:, 0, 0].tolist() == [0, 1, 2, 3, 14, 15, 16, -1]
    assert both[:, 1, 1].tolist() == [21, 22, 23, 24, 35, 36, 37, -1]
    assert alone[:, 0, 1].tolist() == [20, 21, 22, 23, -1, -1, -1, -1]


@pytest.mark.parametrize("context", [2, 3, 5, 7])
def test_a_sample_that_is_cut_has_those_of_what_is_left(context: int) -> None:
    """As far as the cut goes, wherever in a turn it falls."""
    for sample in _samples():
        cut = sample.within(context)
        assert np.array_equal(experts_of(cut, MIXTURE), experts_of(sample, MIXTURE)[:context])


GOOD = pack(_ids(0, 4), 0)
TWICE = np.where(np.arange(4)[:, None, None] == 2, 7, _ids(0, 4))


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (GOOD, ""),
        (pack(_ids(0, 4)[:, :1], 0), "layers and experts of a token: 1 of 2, where the model has 2 of 2"),
        (pack(np.repeat(_ids(0, 4), 2, axis=2), 0), "2 of 4, where the model has 2 of 2"),
        (pack(_ids(29, 1), 0), "expert 50, where the model has 50"),
        (pack(TWICE, 0), "one expert twice"),
        (GOOD | {"start": 2}, "4 positions from 2 on, of a turn that ends before 5"),
        (GOOD | {"start": -1}, "4 positions from -1 on"),
        (GOOD | {"data": "AA=="}, "1 bytes are not"),
        (GOOD | {"shape": None}, "no packed expert ids"),
    ],
)
def test_what_a_model_cannot_replay(stored: Any, why: str) -> None:
    """Other layers, other numbers of experts, one that it has not, one twice, other positions, no ids."""
    assert why in misfit(stored, 5, MIXTURE)
    assert bool(misfit(stored, 5, MIXTURE)) is bool(why)


def test_a_turn_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many paths it is on, and however often they are asked for; the first misfit is named."""
    ends: list[int] = []
    real = misfit

    def counted(stored: Any, end: int, mixture: Mixture) -> str:
        ends.append(end)
        return real(stored, end, mixture)

    monkeypatch.setattr("rollbook.train.select.routing.misfit", counted)
    check, few = FitCheck(MIXTURE), FitCheck(replace(MIXTURE, experts=30))
    for _ in range(2):
        assert [check.of_path(sample) for sample in _samples()] == ["", ""]
    assert ends == [5, 8]
    assert [few.of_path(sample) for sample in _samples()] == [
        "turn t.1: expert 37, where the model has 30",
        "",
    ]


@pytest.mark.parametrize("sealed", [False, True])
def test_samples_from_columns_have_what_the_fold_has(store: Store, sealed: bool) -> None:
    """Where routing is asked for; misfits are known before a token is read. Without, nothing is."""
    fabric.append(store, fabric.records("t", _turns()))
    if sealed:
        Sealer(store).run_once()
    head = store.head()
    folded = {s.leaf_turn_id: s.routed for t in store.trajectories().values() for s in samples_of(t)}
    references = find_references(
        store, head, fabric.RUN, RecipeConfig(), mixture=replace(MIXTURE, experts=30)
    )
    assert references.misrouted.tolist() == ["turn t.1: expert 37, where the model has 30", ""]
    for routing in (True, False):
        samples = Materializer(store, head, references, fabric.RUN, routing=routing).samples([0, 1])
        assert {s.leaf_turn_id: s.routed for s in samples} == (folded if routing else {"t.1": {}, "t.2": {}})
    assert find_references(store, head, fabric.RUN, RecipeConfig()).misrouted.tolist() == ["", ""]
