"""All rows."""

from __future__ import annotations

from parity.rows.corrections import CORRECTIONS
from parity.rows.estimators import ESTIMATORS
from parity.rows.normalizers import NORMALIZERS
from parity.rows.others import CRITIC, PREFERENCES, REGULARIZERS, REWARD_MODELS
from parity.rows.surrogates import SURROGATES

ROWS = (
    SURROGATES + NORMALIZERS + ESTIMATORS + CORRECTIONS + REGULARIZERS + CRITIC + PREFERENCES + REWARD_MODELS
)
"""Parts of ours."""
