"""A test stands where the code that it is about stands: folders of tests are rooms of the product."""

from __future__ import annotations

from pathlib import Path

AT_ROOT = {"demo", "ingest", "replay", "store", "train"}
"""Folders of the product that stand at the root; the others are in `src/rollbook`."""
OTHERS = {"data", "deploy", "docs", "examples", "fakes", "fixtures"} | {
    "bench",
    "clients",
    "hostile",
    "parity",
    "sglang",
}
"""What tests share, what is about pages and examples, and the suites of their own."""
IN_NO_ROOM = {"store/contract", "store/golden"}
"""What is about a whole layer."""


def _strays(tests: Path) -> list[str]:
    """Folders of tests that are no room."""
    found = []
    for folder in sorted(tests.rglob("*/")):
        name = folder.relative_to(tests)
        if folder.name == "__pycache__" or name.parts[0] in OTHERS or f"{name}" in IN_NO_ROOM:
            continue
        above = tests.parent if name.parts[0] in AT_ROOT else tests.parent / "src/rollbook"
        if not (above / name).is_dir():
            found.append(f"{name}")
    return found


def test_folders_of_tests_are_rooms_of_the_product(root: Path) -> None:
    """Each is, but for a few."""
    assert _strays(root / "tests") == []


def test_a_folder_that_is_no_room_is_found(tmp_path: Path) -> None:
    """At the root and in `src/rollbook`; what is about a whole layer is no stray."""
    for name in ("store/wal", "src/rollbook/edge", "tests/store/wal", "tests/edge", "tests/store/golden"):
        (tmp_path / name).mkdir(parents=True)
    assert _strays(tmp_path / "tests") == []
    for name in ("tests/store/gone", "tests/edge/http", "tests/halls"):
        (tmp_path / name).mkdir()
    assert _strays(tmp_path / "tests") == ["edge/http", "halls", "store/gone"]
