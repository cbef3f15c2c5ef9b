"""`rollbook` and `python -m rollbook`: the command line, which may be interrupted while it is loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from rollbook.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
