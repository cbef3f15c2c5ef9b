"""Reads a store's tables with Daft: `daft_tables.py CATALOG-URL FOLDER` writes each as an Arrow file."""

import sys
from pathlib import Path

import daft
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

catalog = SqlCatalog("rollbook", uri=sys.argv[1])
for name in ("turns", "marks", "scalars"):
    rows = daft.read_iceberg(catalog.load_table(f"rollbook.{name}")).to_arrow()
    with (
        pa.OSFile(str(Path(sys.argv[2]) / f"{name}.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, rows.schema) as writer,
    ):
        writer.write_table(rows)
turns = catalog.load_table("rollbook.turns")
exec(sys.stdin.read())
