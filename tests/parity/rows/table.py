"""All rows."""

from __future__ import annotations

from parity.rows.corrections import CORRECTIONS
from parity.rows.estimators import ESTIMATORS
from parity.rows.normalizers import NORMALIZERS
from parity.rows.others import CRITIC, PAIRS, PREFERENCES, REGULARIZERS
from parity.rows.surrogates import SURROGATES

ROWS = SURROGATES + NORMALIZERS + ESTIMATORS + CORRECTIONS + REGULARIZERS + CRITIC + PREFERENCES
"""Parts of ours."""
FORMULAS = PAIRS
"""Formulas that are not ours yet."""
