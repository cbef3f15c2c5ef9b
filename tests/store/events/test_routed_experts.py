"""Expert ids come back as they were packed, and take as many bits as they need."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollbook.store.events.routed_experts import pack, unpack


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 9)),
    bits=st.integers(1, 15),
    start=st.integers(0, 10**6),
    data=st.data(),
)
@settings(max_examples=150)
def test_what_is_packed_comes_back(shape: Any, bits: int, start: int, data: Any) -> None:
    """Any ids of any shape, in the fewest bits that hold the largest of them."""
    ids = data.draw(arrays.arrays(np.int32, shape, elements=st.integers(0, 2**bits - 1)))
    stored = pack(ids, start)
    back = unpack(stored)
    assert (back.dtype, back.shape, stored["start"]) == (np.int16, shape, start)
    assert np.array_equal(back, ids)
    needed = max(int(ids.max(initial=0)).bit_length(), 1)
    assert stored["bits"] == needed
    packed = base64.b64decode(stored["data"])
    assert len(packed) == -(-ids.size * needed // 8)
    spelled = "".join(f"{i:0{needed}b}" for i in ids.reshape(-1))
    assert "".join(f"{byte:08b}" for byte in packed)[: len(spelled)] == spelled


def test_the_bytes_of_an_example() -> None:
    """Three bits each, highest first: 5 3 / 0 7 are 101 011 000 111, and four zeros."""
    stored = pack(np.array([[[5, 3]], [[0, 7]]]), 9)
    assert stored == {
        "start": 9,
        "shape": [2, 1, 2],
        "bits": 3,
        "data": base64.b64encode(b"\xac\x70").decode(),
    }


def test_a_token_of_a_large_model_takes_336_bytes() -> None:
    """48 layers, 8 of 128 experts: 7 bits an id, where int32 takes 1,536 bytes."""
    ids = np.random.default_rng(0).integers(0, 128, (100, 48, 8), np.int32)
    assert ids.nbytes == 100 * 1536
    assert len(base64.b64decode(pack(ids, 0)["data"])) == 100 * 336


@pytest.mark.parametrize(
    ("ids", "what"),
    [(np.zeros((2, 2)), "2 dimensions"), (-np.ones((1, 1, 1)), "-1"), (np.full((1, 1, 1), 2**15), "32768")],
)
def test_what_cannot_be_packed(ids: Any, what: str) -> None:
    """Other dimensions, and ids that are none."""
    with pytest.raises(ValueError, match=what):
        pack(ids.astype(np.int32), 0)


GOOD = pack(np.array([[[5, 3]], [[0, 7]]]), 0)


@pytest.mark.parametrize(
    "stored",
    [
        {},
        GOOD | {"data": "rA=="},
        GOOD | {"data": "!!!!"},
        GOOD | {"bits": 16},
        GOOD | {"shape": [2, 2]},
        GOOD | {"shape": None},
        GOOD | {"shape": [2.0, 1, 2]},
        GOOD | {"shape": [-2, -1, 2]},
    ],
)
def test_what_is_not_packed(stored: Any) -> None:
    """Nothing, too few bytes, no base64, another shape: a ValueError, never other ids."""
    with pytest.raises(ValueError, match=r"packed|bytes|base64"):
        unpack(stored)
