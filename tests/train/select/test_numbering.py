"""Numbers for names, from a list or a column."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.select.sample_ref import NO_GROUP, numbered


@given(st.lists(st.one_of(st.none(), st.text(max_size=2)), max_size=20))
def test_names_are_numbered_as_they_come(names: list[str | None]) -> None:
    """From 0, in the order of first occurrence; none is `NO_GROUP`, and an empty name is a name."""
    order = [name for name in dict.fromkeys(names) if name is not None]
    expected = [NO_GROUP if name is None else order.index(name) for name in names]
    for given_as in (
        names,
        pa.array(names, pa.string()),
        pa.chunked_array([names], pa.string()).combine_chunks(),
    ):
        numbers = numbered(given_as)
        assert (numbers.tolist(), numbers.dtype) == (expected, "int64")
