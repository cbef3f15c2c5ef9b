"""What engines call the weights they serve, so that another run's are never taken for ours. Pure."""

from __future__ import annotations

from typing import Any

FIRST = "default"
"""What SGLang calls the weights it was started with, unless it was told a name."""


def weight_name(run: str, policy: str, version: int) -> str:
    """The name that a sync gives a version. Neither run nor policy holds a slash."""
    return f"{run}/{policy}/{version}"


def policy_version_of(name: Any, run: str | None = None, policy: str | None = None) -> int | None:
    """The policy version, an int64, that a name says; None where it says none, or another line's.

    The weights that an engine was started with are version 0; a bare number is a version too.

    Args:
        run: of the line that is asked for; None: any.
        policy: likewise.
    """
    if name == FIRST:
        return 0
    line, _, text = str(name).rpartition("/")
    named_run, _, named_policy = line.partition("/")
    ours = not line or (run in (None, named_run) and policy in (None, named_policy))
    return int(text) if ours and text.isascii() and text.isdigit() and len(text) < 19 else None
