"""What tests of sealed stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollbook.store.sealed import projections


@pytest.fixture(scope="module")
def some_tokens_are_outliers() -> Iterator[None]:
    """The story's tokens are likely ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projections, "OUTLIER_BELOW", -1.5)
        yield
