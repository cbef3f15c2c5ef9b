"""Daft reads a store's Iceberg tables: the bits of the log; and the block of docs/tables.md runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pyarrow as pa
from tests.clients.conftest import ENVIRONMENT, HERE
from tests.fakes.storage.tables import NAMES, append, bits, odd_events, sealed_rows

from rollbook.store import Store
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.tables.publish import publish_tables
from rollbook.store.upkeep.sealer import Sealer


def test_daft_reads_the_same_bits(store: Store, tmp_path: Path, root: Path) -> None:
    """All rows of all tables: NaN with its payload, null lists and empty ones apart."""
    append(store, "a", odd_events("t1", "t2"))
    append(store, "b", odd_events("t3")[:1])
    assert Sealer(store).run_once().damage == {}
    publish_tables(store)
    page = (root / "docs" / "tables.md").read_text()
    [block] = re.findall(r"^```python\n(import daft\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    program = [str(ENVIRONMENT / "daft" / "bin" / "python"), str(HERE / "programs" / "daft_tables.py")]
    words = [*program, catalog_url(store.path).render_as_string(), str(tmp_path)]
    done = subprocess.run(words, input=block, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "trajectory_id" in done.stdout
    for name in NAMES:
        with pa.OSFile(str(tmp_path / f"{name}.arrow")) as source:
            rows = pa.ipc.open_file(source).read_all()
        assert bits(name, rows) == bits(name, sealed_rows(store, name)), name
