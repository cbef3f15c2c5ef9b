"""How pictures are drawn: to files, without a screen."""

from __future__ import annotations

from typing import Any

from rollbook.store.errors import ConfigError


def pyplot() -> Any:
    """Matplotlib's pyplot.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("pictures are drawn with matplotlib: pip install 'rollbook[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found
