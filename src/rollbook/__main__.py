"""`rollbook` and `python -m rollbook`: the command line; an interrupt ends it at once while it is loaded."""

from __future__ import annotations

import contextlib
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

WITHOUT_ARROW = ("keys",)
"""Commands that read and write no log."""


def main() -> None:
    """Run the command line."""
    # An exception may be lost in an import, which ignores those of its callbacks.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    name = "".join(sys.argv[1:2])
    if name and not name.startswith("-") and name not in WITHOUT_ARROW:
        _leave_pandas_out()
    from rollbook.cli.app import main as run

    run()


def _leave_pandas_out() -> None:
    """Keep pyarrow from importing pandas with its first value, which takes a third of a second."""
    import pyarrow as pa

    finder = _LatePandas()
    sys.meta_path.insert(0, finder)
    pa.scalar(0)
    finder.hides = False


class _LatePandas:
    """A finder, as the import system asks for one, that hides pandas from pyarrow.

    Code of a user's own may import it later, and pyarrow is told then.
    """

    hides = True

    def find_spec(self, fullname: str, path: Any, _target: object = None) -> ModuleSpec | None:
        """Where pandas is; nothing of other modules.

        Raises:
            ImportError: it is hidden.
        """
        if fullname != "pandas":
            return None
        if self.hides:
            raise ImportError(fullname)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: Any) -> None:
                import pyarrow as pa

                execute(module)
                with contextlib.suppress(ImportError):  # too old for pyarrow
                    pa.nulls(0).to_pandas()

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    main()
