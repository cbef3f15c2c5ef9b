"""docs/ledger.md: its commands print what the page shows, and its table names every reason."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.cli import app as cli
from rollbook.store import Store
from rollbook.store.events import JUDGE, QUARANTINE, REPLAY, SPLITS
from rollbook.testing import ledger


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The text of docs/ledger.md."""
    return (root / "docs" / "ledger.md").read_text()


def test_the_commands_balance_and_print_the_block(
    page: str,
    one_of_everything: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command runs and balances; the first prints the page's block, durations aside."""
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    outputs = []
    for line in block.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        outputs.append(capsys.readouterr().out)
    [shown] = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    first = [line for line in outputs[0].splitlines(keepends=True) if "duration" not in line]
    assert "".join(first) == shown
    assert "actor         1          4        4" in outputs[1]
    assert outputs[2].splitlines()[0] == "run demo at serve=27"
    assert orjson.loads(outputs[3])["balances"] is True


def test_the_table_has_every_term_and_reason(page: str) -> None:
    """The terms are the fold's, and so are the reasons; `no version` is told beneath."""
    rows = re.findall(r"^\| ([a-z ]+) \| (.*?) ?\| ", page.split("## Terms")[1], re.MULTILINE)
    assert {term for term, _ in rows} - {"term"} == set(ledger.TERMS)
    reasons = {name for term, rule in rows if term == "kept out" for name in re.findall(r"`(.+?)`", rule)}
    constants = {
        ledger.TEXT_ONLY,
        ledger.ALTERED,
        ledger.ERASED,
        ledger.UNDELIVERED,
        ledger.LATE,
        ledger.OMITTED,
    }
    assert reasons == constants | {*SPLITS, JUDGE, QUARANTINE, REPLAY} - {"train"}
    assert f"`{ledger.NO_VERSION}`" in page


def test_the_significance_level_matches_the_code(page: str) -> Any:
    """The significance level that the page names is the code's."""
    from rollbook.cli.show.ledger import SIGNIFICANT

    assert f"below {SIGNIFICANT} the sentence says" in page
