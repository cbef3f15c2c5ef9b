"""Reading the log, the proxy and `--help` start without torch, commands without pandas: imports take time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from rollbook.store import Event, Store

HELP = "import sys; sys.argv = ['rollbook', '--help']\nfrom rollbook.cli.app import main\ntry:\n    main()\n"
HELP += "except SystemExit as stop:\n    assert not stop.code, stop.code\n"


PARTS = ["store", "ingest.serve.proxy", "testing.pytest_cassette"]
CASSETTE = """
from pathlib import Path
from rollbook.cli.replay.serve import read_cassette, run_cassette
from rollbook.store.errors import RollbookError
for command in (
    lambda: read_cassette(Path("no-store"), ["task-7"], None),
    lambda: run_cassette(None, "127.0.0.1", 0, ["no-address"], None, False, None, False),
):
    try:
        command()
    except RollbookError:
        pass
"""


@pytest.mark.more_but("import rollbook.ingest.serve.proxy*", "import rollbook.store*")
@pytest.mark.parametrize("code", [*(f"import rollbook.{part}\n" for part in PARTS), CASSETTE, HELP])
def test_torch_is_not_imported(run_python: Callable[..., tuple[int, str, str]], code: str) -> None:
    """A fresh process that does this has neither torch nor transformers nor ray in sys.modules."""
    heavy = {"torch", "transformers", "megatron", "ray"}
    check = f"import sys\nprint('HEAVY', sorted({heavy!r} & set(sys.modules)))\n"
    status, out, err = run_python(code + check)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "HEAVY []"


def test_commands_import_no_pandas(
    run_python: Callable[..., tuple[int, str, str]], store: Store, story: dict[str, list[Event]]
) -> None:
    """Not even where it is installed and pyarrow would use it: those that read, and those that write."""
    with store.writer("serve") as writer:
        writer.append(story["serve"]).result(30)
    assert importlib.util.find_spec("pandas")
    chats = store.path.parent / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "assistant", "content": "hi"}]}\n')
    commands = (
        ["sql", "select count(*) as n from turns"],
        ["tail", "--no-follow"],
        ["store", "info"],
        ["import", str(chats), "--run", "r"],
    )
    code = "import sys\nfrom rollbook.__main__ import main\n"
    for words in commands:
        code += f"sys.argv = {['rollbook', *words, '--store', str(store.path)]}\n"
        code += "try:\n    main()\nexcept SystemExit as stop:\n"
        code += "    print('\\nENDED', stop.code, 'pandas' in sys.modules)\n"
    status, out, _ = run_python(code)
    assert status == 0
    ended = [line for line in out.splitlines() if line.startswith("ENDED")]
    assert ended == ["ENDED 0 False"] * len(commands)


USES_PANDAS = """
import sys
sys.argv = ["rollbook", "sql", "--help"]
from rollbook.__main__ import main
try:
    main()
except SystemExit:
    assert "pandas" not in sys.modules
import pyarrow as pa
"""
LATER = [
    "import pandas; print(pa.array(pandas.Categorical(['x'])).type.value_type)",
    "import pandas; print(pa.table(pandas.DataFrame({'a': ['x']})).schema.field('a').type)",
    "from pandas import DataFrame; print(pa.Table.from_pandas(DataFrame({'a': ['x']}))['a'].type)",
    "print(pa.array(['string', 'x']).to_pandas()[0])",
]


@pytest.mark.more_but("import pandas; print(pa.table*")
@pytest.mark.parametrize("later", LATER)
def test_pandas_can_be_used_later(run_python: Callable[..., tuple[int, str, str]], later: str) -> None:
    """By code of a user's own that a command runs: pyarrow takes its values, and gives them."""
    status, out, err = run_python(USES_PANDAS + later)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].endswith("string")
