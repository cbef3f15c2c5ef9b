"""`rollbook` and `python -m rollbook`: the command line; an interrupt ends it at once while it is loaded."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def main() -> None:
    """Run the command line."""
    # An exception may be lost in an import, which ignores those of its callbacks.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.meta_path.insert(0, _LatePandas())
    from rollbook.cli.app import main as run

    run()


class _LatePandas:
    """A finder, as the import system asks for one, by which pyarrow is imported without pandas.

    It would import pandas with its first value, which takes a third of a second. Code of a user's own may
    import pandas later, and pyarrow is told then.
    """

    def __init__(self) -> None:
        self._hidden_from: int | None = None  # a thread

    def find_spec(self, fullname: str, path: Any, _target: object = None) -> ModuleSpec | None:
        """Where pyarrow and pandas are, and what is to be done once they are there; nothing of other modules.

        Raises:
            ImportError: pandas is hidden.
        """
        then = {"pyarrow": self._make_first_value, "pandas": _tell_of_pandas}.get(fullname)
        if then is None:
            return None
        if fullname == "pandas" and self._hidden_from == threading.get_ident():
            raise ImportError(fullname)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: Any) -> None:
                execute(module)
                then()

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec

    def _make_first_value(self) -> None:
        import pyarrow as pa

        self._hidden_from = threading.get_ident()
        pa.scalar(0)
        self._hidden_from = None


def _tell_of_pandas() -> None:
    pa = sys.modules.get("pyarrow")
    if pa is None:
        return
    with contextlib.suppress(ImportError):  # too old for pyarrow
        pa.nulls(0).to_pandas()


if __name__ == "__main__":
    main()
