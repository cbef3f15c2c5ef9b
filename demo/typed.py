"""How to type a command that runs this very installation, whether its folder is on PATH or not."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def typed_rollbook() -> str:
    """`rollbook`, if a shell finds this installation by it; otherwise the path of its script, or of
    its interpreter."""
    script = _script()
    if script is None:
        return f"{_short(Path(sys.executable))} -m rollbook"
    return "rollbook" if _is_found(script) else _short(script)


def activated_by() -> str | None:
    """The command after which `rollbook` is enough; None if it already is, or if there is no such
    command."""
    script = _script()
    activate = Path(sys.executable).with_name("activate")
    if script is None or _is_found(script) or not activate.exists():
        return None
    return f"`source {_short(activate)}`"


def _script() -> Path | None:
    """The script beside this interpreter."""
    script = Path(sys.executable).with_name("rollbook")
    return script if script.exists() else None


def _is_found(script: Path) -> bool:
    executable = shutil.which("rollbook")
    return executable is not None and Path(executable).resolve() == script.resolve()


def _short(path: Path) -> str:
    """A path, as short as it can be typed here."""
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        return shlex.quote(str(path))
    return shlex.quote(relative if os.sep in relative else f".{os.sep}{relative}")
