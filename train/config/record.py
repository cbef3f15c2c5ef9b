"""`[record]` of a CONFIG: what steps record beside the digests of their stages."""

from __future__ import annotations

from typing import Literal

from rollbook.train.table import Table

Vector = Literal["logprobs", "losses", "proximal_logprobs", "reference_logprobs", "values", "value_losses"]


class RecordConfig(Table):
    """What steps record beside the digests of their stages; no key changes a bit of what is trained."""

    vectors: tuple[Vector, ...] = ()
    """Stages whose numbers are kept, a float32 for each trained token: a replay that differs then says which
    token, by how much, and where bits cannot be promised whether it is within a tolerance. With `logprobs`,
    and what else the loss needs, losses can be computed again without a model."""
