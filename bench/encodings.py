"""How many bytes a token id and a logprob take in Parquet, encoding by encoding. In memory, untimed."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

IDS: dict[str, str | None] = {
    "plain": "PLAIN",
    "dict": None,
    "delta": "DELTA_BINARY_PACKED",
    "bss": "BYTE_STREAM_SPLIT",
}
LOGPROBS: dict[str, str | None] = {"plain": "PLAIN", "bss": "BYTE_STREAM_SPLIT"}
"""Name -> Parquet's; None for the dictionary, which is no encoding of its own to the writer."""
LEVELS = (1, 3)


def bytes_per_value(lists: pa.ChunkedArray, encoding: str | None, level: int, rows: int) -> float:
    """Size of the lists' values in a file with row groups of `rows`, over their number."""
    table = pa.table({"values": lists})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=level,
        use_dictionary=encoding is None,
        column_encoding=None if encoding is None else {"values.list.element": encoding},
        row_group_size=rows,
    )
    meta = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    columns = [meta.row_group(i).column(0) for i in range(meta.num_row_groups)]
    values = sum(len(chunk.flatten()) for chunk in lists.chunks)
    return float(sum(column.total_compressed_size for column in columns) / values)


def compare(turns: pa.Table, rows: int) -> dict[str, float]:
    """`ids.<encoding>.zstd<level>` and `logprobs...` -> bytes per value, of these sealed rows."""
    columns: dict[str, tuple[dict[str, str | None], list[pa.Array]]] = {
        "ids": (IDS, [*turns.column("prompt_ids").chunks, *turns.column("completion_ids").chunks]),
        "logprobs": (LOGPROBS, turns.column("logprobs").chunks),
    }
    return {
        f"{what}.{name}.zstd{level}": bytes_per_value(pa.chunked_array(chunks), encoding, level, rows)
        for what, (encodings, chunks) in columns.items()
        for name, encoding in encodings.items()
        for level in LEVELS
    }
