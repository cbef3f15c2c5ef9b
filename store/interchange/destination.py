"""The target of an export: written under a temporary name until it is complete, never over existing
data.

An empty folder at the target counts as absent.

Long exports and imports report their progress, for a progress bar.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rollbook.store.errors import InterchangeError, RollbookError
from rollbook.store.ids import new_id


@contextmanager
def destination(out: Path, *, folder: bool, option: str = "--to") -> Iterator[Path]:
    """A temporary path beside `out` to write a file or folder at; it becomes `out` when the block ends.

    When the block raises, nothing is left behind.

    Args:
        option: of the command that names `out`, for messages.

    Raises:
        InterchangeError: something is at `out`, or it cannot be written there.
    """
    _refuse_existing(out, folder, option)
    temporary = out.with_name(f".{out.name}.{new_id()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")) if folder else [temporary]:
            _flush(path)
        _refuse_existing(out, folder, option)
        temporary.rename(out)
    except OSError as error:
        if isinstance(error, RollbookError):
            raise  # of the store that is read
        raise InterchangeError(f"cannot write {out}: {error}; name another place with {option}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        elif temporary.exists():
            temporary.unlink()


def _refuse_existing(out: Path, folder: bool, option: str) -> None:
    if folder and out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if os.path.lexists(out):
        raise InterchangeError(
            f"{out} exists: an export never overwrites; remove it or name another {option}"
        )


def _flush(path: Path) -> None:
    """Bring a file's bytes to the disk: after a power cut, a name without them would look whole."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


Progress = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]
"""From what is being done, and of how many units: a context with a function that counts units done."""


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], Any]]:
    """A progress callback that shows nothing."""
    return nullcontext(lambda count: None)
