"""What every command pays before it begins."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = ("pyarrow", "duckdb", "numpy", "orjson", "sqlalchemy", "torch", "transformers")


def test_the_command_line_imports_no_library_of_its_work() -> None:
    """They take a second and more, and `--help` needs none: each command imports what it needs when it
    runs."""
    program = f"import sys, rollbook.cli.app; print(sorted(set({LIBRARIES}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


IMPORTED = """
import sys
from rollbook.__main__ import main
try:
    main()
except SystemExit:
    ours = {name.removeprefix("rollbook.cli.") for name in sys.modules if name.startswith("rollbook.cli.")}
    print("\\nIMPORTED", *sorted(ours - set("app errors groups options terminal".split())))
    print("PYDANTIC", "pydantic" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "imported"),
    [("", ""), ("sql", "sql"), ("replay", "replay replay.group"), ("keys", "keys"), ("stoer", "")],
)
def test_help_imports_no_other_command(words: str, imported: str) -> None:
    """Nor pydantic, with which typer reads the values of options."""
    command = [sys.executable, "-c", IMPORTED, *words.split(), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-2:] == [f"IMPORTED {imported}".rstrip(), "PYDANTIC False"]


RECIPE = """
import sys
from pathlib import Path
from rollbook.cli.samples import print_recipe
print_recipe(Path(sys.argv[1]), Path(sys.argv[2]), "head", None, as_json=True)
sys.exit("torch" in sys.modules)
"""


def test_what_a_recipe_makes_of_a_log_needs_no_torch(root: Path, tmp_path: Path) -> None:
    """Nor do commands that read a CONFIG without computing: torch takes longer to import than they take."""
    config = tmp_path / "c.toml"
    config.write_text('model = "m"\nsteps = 1\nrun = "demo"\n[algorithm]\nname = "sft"\n')
    log = shutil.copytree(root / "tests" / "data" / "trained-1", tmp_path / "store")
    result = subprocess.run([sys.executable, "-c", RECIPE, log, config], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["kept"]


REPLAY = """
import sys
from rollbook.__main__ import main
try:
    main()
finally:
    print("\\nTORCH", "torch" in sys.modules, "megatron.core" in sys.modules)
"""


def test_what_is_replayed_by_the_log_alone_needs_no_torch(root: Path, tmp_path: Path) -> None:
    """A step up to its advantages, each stage of which is compared."""
    log = shutil.copytree(root / "tests" / "data" / "trained-1", tmp_path / "store")
    words = ["replay", "step", "1", "--no-model", "--to", "advantages", "--json", "--store", str(log)]
    result = subprocess.run([sys.executable, "-c", REPLAY, *words], capture_output=True, text=True)
    told, _, imported = result.stdout.rpartition("\n\nTORCH ")
    assert (result.returncode, result.stderr, imported) == (0, "", "False False\n")
    stages = json.loads(told)["stages"]
    assert {name: stages[name]["verdict"] for name in ("selection", "samples", "rewards", "advantages")} == (
        dict.fromkeys(("selection", "samples", "rewards", "advantages"), "equal")
    )
