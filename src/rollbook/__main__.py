"""`rollbook` and `python -m rollbook`: the command line, which may be interrupted while it is loaded."""

from __future__ import annotations

import sys

READING = ("doctor", "ledger", "recipe", "samples", "show", "sql", "store", "tail")
"""Commands that only read a store and run nobody else's code."""


def main() -> None:
    """Run the command line."""
    try:
        if sys.argv[1:2] and sys.argv[1] in READING:
            _leave_pandas_out()
        from rollbook.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


def _leave_pandas_out() -> None:
    """Keep pyarrow from importing pandas with its first value, which takes a third of a second."""
    import pyarrow as pa

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.scalar(0)
    finally:
        sys.meta_path.remove(finder)


class _NoPandas:
    """A finder, as the import system asks for one, that refuses to import pandas."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> None:
        """Nothing of other modules.

        Raises:
            ImportError: it is pandas.
        """
        if fullname == "pandas":
            raise ImportError(fullname)


if __name__ == "__main__":
    main()
