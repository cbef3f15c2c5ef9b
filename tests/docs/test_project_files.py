"""Files for who joins, and for the place that hosts the repository: each is read, and agrees with the rest.

`make lint` and the hooks before a commit are the same tools; the workflow runs what `.ci/run` runs.
"""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from rollbook.cli.app import app
from rollbook.store.catalog.database import SCHEMA_REVISION
from rollbook.store.interchange.bundle import FORMAT as BUNDLE_FORMAT
from rollbook.store.marker import FORMAT_VERSION

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def _read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_hooks_are_what_lint_runs() -> None:
    """In its order, by the tools of `.venv`, over all files: so neither can pass where the other fails."""
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    [local] = _read(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == commands
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        assert (hook["language"], hook["pass_filenames"]) == ("system", False), hook["id"]


def test_the_workflow_runs_all_suites() -> None:
    """By `.ci/run`, as anybody does by hand, with the oldest Python that is supported."""
    [job] = _read(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    [python] = [
        step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")
    ]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == f">={python}"
    assert job["runs-on"].startswith("ubuntu")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_what_there_is(path: Path) -> None:
    """Each field has an id of its own and a label; each `rollbook` command that a form names is one."""
    form = yaml.safe_load(path.read_text())
    fields = [field for field in form.get("body", ()) if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    command: Any = get_command(app)
    for line in re.findall(r"`rollbook ([^`]+)`", path.read_text()):
        reached = command
        for word in line.split():
            if word in getattr(reached, "commands", {}):
                reached = reached.commands[word]
        options = [option for parameter in reached.params for option in parameter.opts]
        assert [word for word in line.split() if word.startswith("-") and word not in options] == [], line


def test_a_bug_is_reported_with_what_it_takes_to_find_it() -> None:
    """The command, its output and the environment are asked for, and a step's bundle."""
    fields = {field.get("id"): field for field in _read(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    required = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert required == {"command", "output", "expected", "environment"}
    assert "`rollbook --version`" in fields["environment"]["attributes"]["description"]
    assert "`rollbook replay export step" in fields["bundle"]["attributes"]["description"]


def test_editors_format_as_ruff_does() -> None:
    """Lines of Python are of the same length to both."""
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    length = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["line-length"]
    assert parser["*.{py,pyi}"]["max_line_length"] == str(length)
    assert parser["Makefile"]["indent_style"] == "tab"


def test_the_changelog_tells_of_every_command_and_version() -> None:
    """Under the release that is being made, with the versions of what lies on the disk."""
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(.*?)\]", text, re.MULTILINE)
    assert newest
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert newest[1] == release
    command: Any = get_command(app)
    names = [name for name, each in command.commands.items() if not each.hidden]
    prose = " ".join(text.split())
    assert [name for name in names if f"`rollbook {name}`" not in prose] == []
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines() if line[:2] == "| "]
    versions = {re.split(r" [(\[]", what)[0]: version for what, version in rows}
    assert versions["the store"] == str(FORMAT_VERSION)
    assert versions["the catalog"] == SCHEMA_REVISION
    assert versions["bundles of steps"] == str(BUNDLE_FORMAT)


def test_paths_for_contributors_are_there() -> None:
    """Each that the page names, in the layout of now; a folder ends in a slash."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:md|txt))`", text))
    assert len(paths) > 25
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    assert [path for path in paths if (ROOT / path).is_dir() and not path.endswith("/")] == []


def test_contributors_are_told_how_every_generated_page_is_made() -> None:
    """As the head of each says."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = dict(re.findall(r"^\| `(docs/[\w-]+\.md)` \| `(python [\w./]+)` \|$", text, re.MULTILINE))
    pages = {f"docs/{path.name}": path.read_text() for path in (ROOT / "docs").glob("*.md")}
    headers = {name: re.search(r"<!-- Generated: (.*?) > (.*?) -->", page) for name, page in pages.items()}
    assert listed == {head[2]: head[1] for head in headers.values() if head}


def test_contributors_are_told_the_sizes_that_are_held() -> None:
    """Those of tests/test_sizes.py."""
    held = (ROOT / "tests" / "test_sizes.py").read_text()
    sizes = re.search(r"^MODULE_LINES, FUNCTION_LINES, FOLDER_MODULES = (.*)$", held, re.MULTILINE)
    assert sizes
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    match = re.search(r"at most (\d+) lines; a function at most (\d+); a folder at most (\d+) modules", text)
    assert match
    assert ", ".join(match.groups()) == sizes[1]
