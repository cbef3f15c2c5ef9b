"""Every command of docs/object-storage.md runs, in the page's order, against a server of object storage."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.fakes.processes.warm import run_warm

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.sealer import Sealer

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """An empty bucket, and credentials in the environment."""
    pytest.importorskip("moto", reason="object storage is tested against moto: install the [dev] extra")
    from tests.fakes.storage.s3_server import ObjectStorage, set_credentials

    set_credentials(monkeypatch)
    server = ObjectStorage()
    yield server
    server.stop()


@pytest.mark.more
def test_the_commands_run(
    one_of_everything: Store,
    storage: ObjectStorage,
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the page's store.toml the files move, and the attached store has what was sealed."""
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    log = rb.open(tmp_path / "demo-store")
    assert Sealer(log).run_once().damage == {}
    page = (root / "docs" / "object-storage.md").read_text()
    page = page.replace("https://s3.example.org:9000", storage.endpoint).replace("STORE-ID", log.store_id)
    [allowed] = re.findall(r"^export ROLLBOOK_ALLOW=(.*)$", page, re.MULTILINE)
    allowed = allowed.replace("s3.example.org:9000", storage.endpoint.removeprefix("http://"))
    monkeypatch.setenv("ROLLBOOK_ALLOW", allowed)
    [settings] = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (log.path / "store.toml").write_text(settings)
    commands = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)).splitlines()
    assert commands[0] == 'pip install "rollbook[s3]"'
    assert len(commands) == 5
    answers = []
    for command in commands[1:]:
        name, *words = shlex.split(command)
        assert name == "rollbook"
        done = run_warm(
            [sys.executable, "-m", "rollbook", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        answers.append(done.stdout)
    assert list((tmp_path / "demo-store").rglob("sealed/*/*/*.parquet")) == []
    units = [unit for lane in log.lanes() for unit in current_units(log.path, lane)]
    assert f"s3://rollouts/team/{log.store_id}: {len(units)} units more" in answers[0]
    keys = {f"team/{log.store_id}/sealed/{u.lane}/{u.name}/{f.name}" for u in units for f in u.files}
    keys |= {f"team/{log.store_id}/sealed/{u.lane}/{u.name}/UNIT.json" for u in units}
    assert set(storage.objects()) == keys | {f"team/{log.store_id}/STORE.json"}
    assert rb.open(tmp_path / "elsewhere").head() == log.head()
    assert str(sum(log.head().values())) in answers[3]
