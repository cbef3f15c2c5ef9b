"""What the documents show works: commands parse, SQL runs, Python compiles and, where it says so, runs.

A Python block whose first line is `# runs` is run in a folder that holds a store named `demo-store`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.ingest.settings import parse_settings
from rollbook.online.config import load_whole
from rollbook.rollouts.config import parse_rollouts
from rollbook.service.config import ServiceConfig
from rollbook.store import Store
from rollbook.store.config import is_whole
from rollbook.store.settings import StoreSettings
from rollbook.store.sql.sandbox import Connection
from rollbook.train.config.config import parse_config
from rollbook.train.config.recipe import RecipeConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("store", "ingest", "train", "replay")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OPERATORS = {"&", "&&", "|", "||", ";", ";;", ">", ">>", "<"}
RUNS = "# runs\n"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document; `line` is where its code starts."""

    path: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """The fenced blocks of a document that name a language."""
    text = path.read_text()
    return [Block(path, text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in FENCE.finditer(text)]


def documents() -> list[Path]:
    """The root's pages, those of docs/ and its folders, and each layer's README, as far as they are there."""
    paths = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    paths += [ROOT / folder / "README.md" for folder in FOLDERS]
    return [path for path in paths if path.exists()]


def blocks(language: str) -> list[Block]:
    """Every block of a language in the documents."""
    return [block for path in documents() for block in blocks_of(path) if block.language == language]


def commands(code: str) -> Iterator[list[str]]:
    """The words of each `rollbook` command in shell code, without `rollbook` itself."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word in OPERATORS:
                if command[:1] == ["rollbook"]:
                    yield command[1:]
                command = []
            elif command or not (word == "$" or re.fullmatch(r"[A-Z_]+=.*", word)):
                command.append(word)


def parse(words: list[str]) -> dict[str, Any]:
    """The parameters that a command line gives its command; nothing is run.

    Raises:
        KeyError: there is no such command.
        Exception: typer's usage error: no such option, or a value that does not fit.
    """
    command: Any = typer.main.get_command(app)
    name = "rollbook"
    while words and (words := getattr(command, "named", list)(words))[0] in getattr(command, "commands", {}):
        name, *words = words
        command = command.commands[name]
    if hasattr(command, "commands"):
        raise KeyError(f"{name} {' '.join(words)}")
    params: dict[str, Any] = command.make_context(name, list(words)).params
    return params


def test_the_layers_have_their_documents() -> None:
    """Each layer has a README of at most 75 lines with its promises and limits; rooms it names are there."""
    for folder in FOLDERS:
        text = (ROOT / folder / "README.md").read_text()
        assert text.count("\n") <= 75, folder
        assert all(f"\n## {part}\n" in text for part in ("Example", "Promises", "Limits")), folder
        rooms = set(re.findall(r"`([a-z_]+)/`", text))
        assert [room for room in sorted(rooms) if not (ROOT / folder / room).is_dir()] == [], folder


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_every_command_parses(
    block: Block, one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `rollbook` command has a sub-command, options and values that exist; its SQL runs."""
    monkeypatch.chdir(tmp_path)  # a query may write files, if its command says so
    for words in commands(block.code):
        params = parse(words)
        if params.get("query"):
            allow_files = params.get("allow_files", False)
            with rb.connect(one_of_everything.path, allow_files=allow_files) as connection:
                connection.execute(params["query"])


@pytest.fixture(scope="module")
def connection(one_of_everything: Store) -> Iterator[Connection]:
    """What the queries are asked of."""
    with rb.connect(one_of_everything.path) as connection:
        yield connection


@pytest.mark.parametrize("block", blocks("sql"), ids=str)
def test_every_query_returns_rows(block: Block, connection: Connection) -> None:
    """Every SQL block gives rows on a store with one of everything."""
    assert connection.execute(block.code).fetchall()


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles_and_runs(
    block: Block, one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every Python block compiles; those marked `# runs` run beside a store named demo-store."""
    code = compile(block.code, str(block), "exec")
    if block.code.startswith(RUNS):
        shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
        monkeypatch.chdir(tmp_path)
        exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_every_toml_block_loads(block: Block, tmp_path: Path) -> None:
    """Every TOML block is a `store.toml`, a recipe, or settings of `rollbook serve`, `rollout`, `train` or
    `run`, or tables of `rollout`'s. Each key is known."""
    values = tomllib.loads(block.code)
    if is_whole(values):
        (tmp_path / "whole.toml").write_text(block.code)
        load_whole(tmp_path / "whole.toml")
    elif set(values) <= set(StoreSettings.model_fields):
        assert StoreSettings.model_validate(values) != StoreSettings()
    elif "base" in values:
        assert ServiceConfig.model_validate(values).model_fields_set == set(values)
    elif "tasks" in values:
        assert parse_rollouts(values, str(block)).model_fields_set == set(values)
    elif set(values) <= {"agent", "score"}:
        parse_rollouts({"tasks": "t.jsonl", "agent": {"command": ["true"]}} | values, str(block))
    elif "store" in values:
        assert parse_settings(values, str(block)).model_fields_set == set(values)
    elif set(values) <= set(RecipeConfig.model_fields):
        assert RecipeConfig.model_validate(values) != RecipeConfig()
    else:
        parse_config(values, str(block))


def test_commands_in_sentences_are_there() -> None:
    """Each `rollbook NAME` in prose, and in the forms for reports and requests, names a command."""
    forms = [path for path in (ROOT / ".github").rglob("*") if path.is_file()]
    command: Any = typer.main.get_command(app)
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*documents(), *forms]
        for name in re.findall(r"`rollbook\s+([a-z][\w-]*)", path.read_text())
        if name not in command.commands
    ]
    assert gone == []


def headings(path: Path) -> set[str]:
    """What links to a part of a page may name, as hosts of repositories make it of a heading."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    shown = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in shown}


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_exists(path: Path) -> None:
    """Every relative link names a file that is there, and a heading of that page if it names one."""
    broken = []
    for target, part in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text()):
        page = path.parent / target if target else path
        if "://" not in target and (not page.exists() or (part and part not in headings(page))):
            broken.append(f"{target}#{part}" if part else target)
    assert broken == []


def test_the_reader_of_commands() -> None:
    """Comments, continued lines, pipes, quotes and variables are understood; other commands are not ours."""
    code = 'A=1 rollbook sql "select 1; select 2" --store d | head  # rollbook no\n# rollbook no\n'
    code += "ls && rollbook \\\n  store info --store d &\necho rollbook\n"
    assert list(commands(code)) == [
        ["sql", "select 1; select 2", "--store", "d"],
        ["store", "info", "--store", "d"],
    ]


@pytest.mark.parametrize(
    "line", ["nope", "store", "sql 'select 1'", "replay step x --store d", "demo --nope"]
)
def test_invalid_commands_are_found(line: str) -> None:
    """An unknown command or option, a missing one, and an ill-typed value are all found."""
    with pytest.raises(Exception, match=r".") as caught:
        parse(shlex.split(line))
    assert isinstance(caught.value, KeyError) or "UsageError" in str(type(caught.value).__mro__)
