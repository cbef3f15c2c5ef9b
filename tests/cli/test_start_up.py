"""What every command pays before it begins."""

from __future__ import annotations

import subprocess
import sys

LIBRARIES = ("pyarrow", "duckdb", "numpy", "orjson", "sqlalchemy", "torch", "transformers")


def test_the_command_line_imports_no_library_of_its_work() -> None:
    """They take a second and more, and `--help` needs none: each command imports what it needs when it
    runs."""
    program = f"import sys, rollbook.cli.app; print(sorted(set({LIBRARIES}) & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_what_a_recipe_makes_of_a_log_needs_no_torch() -> None:
    """Nor do commands that read a CONFIG without computing: torch takes longer to import than they take."""
    program = "import sys, rollbook.cli.samples; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
