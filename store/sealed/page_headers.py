"""Reads the headers of a Parquet file's pages, and bounds their decoded size before any page is
decoded.

A footer states how large a row group is, but whoever made the file may state anything. A page
decompresses into as many bytes as its own header says, and a dictionary value is copied to every
row that names it. So a stranger's file is walked header by header, in little memory, and refused
if any page or the total of a row group is larger than allowed, or than its footer says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

PAGE_BYTES = 1 << 30
"""Largest page; what an append may hold."""
GROUP_BYTES = 2 << 30
"""Largest row group, its values in memory."""
HEADER_BYTES = 1 << 20
"""Largest header of a page: statistics may stand in it."""
_FIRST_READ = 256
_VALUE_BYTES = 8
_DATA, _DICTIONARY, _DATA_2 = 5, 7, 8
"""Fields of a header that tell of such a page."""
_ENCODING = {_DATA: 2, _DICTIONARY: 2, _DATA_2: 4}
_BY_DICTIONARY, _BY_PREFIX = (2, 8), 7
"""Encodings by which a few bytes stand for many: an entry of a dictionary, a part of the value before."""


@dataclass(frozen=True, slots=True)
class Page:
    """The contents of a page's header.

    Attributes:
        kind: `_DATA`, `_DICTIONARY`, `_DATA_2`, or 0 for pages that readers skip.
        bytes, packed: its size, and that in the file; `header`: size of the header itself.
    """

    kind: int
    bytes: int
    packed: int
    header: int
    values: int
    encoding: int


def refuse_large_pages(path: Path, page_bytes: int = PAGE_BYTES, group_bytes: int | None = None) -> None:
    """Check that no page of a file, and no row group, is larger than allowed.

    Args:
        group_bytes: limit of a row group's decoded values; None: row groups are not read as a
            whole.

    Raises:
        pa.ArrowInvalid: one is, or a header contradicts the footer.
        pa.ArrowException, OSError: it is no Parquet, or cannot be read.
    """
    with pq.ParquetFile(path) as parquet, path.open("rb") as file:
        footer, size = parquet.metadata, path.stat().st_size
        for group in range(footer.num_row_groups):
            about, used = footer.row_group(group), 0
            for index in range(about.num_columns):
                column = about.column(index)
                where = f"row group {group}, column {column.path_in_schema}"
                used += _column_bytes(file, size, column, where, page_bytes, whole=group_bytes is not None)
            if group_bytes is not None and used > group_bytes:
                raise pa.ArrowInvalid(f"row group {group} takes up to {used:,} bytes, of {group_bytes:,}")


def _column_bytes(
    file: IO[bytes], size: int, column: Any, where: str, page_bytes: int, *, whole: bool
) -> int:
    """Upper bound of the decoded bytes of a row group's column."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    end = start + column.total_compressed_size
    if not 0 <= start <= end <= size:
        raise pa.ArrowInvalid(f"{where} is said to stand at byte {start:,} to {end:,} of {size:,}")
    unpacked = values = dictionary = total = 0
    for page in _pages(file, start, end, where):
        if page.bytes > page_bytes:
            raise pa.ArrowInvalid(f"{where} has a page of {page.bytes:,} bytes, of {page_bytes:,}")
        if whole and page.encoding == _BY_PREFIX:
            raise pa.ArrowInvalid(f"{where} has values by their prefixes, which none of ours has")
        unpacked += page.header + page.bytes
        if page.kind == _DICTIONARY:
            dictionary, total = page.bytes, total + page.bytes
        elif page.kind:
            values += page.values
            copied = dictionary * page.values if page.encoding in _BY_DICTIONARY else 0
            total += max(page.bytes, copied, _VALUE_BYTES * page.values)
    if unpacked > column.total_uncompressed_size or values != column.num_values:
        raise pa.ArrowInvalid(
            f"{where} has {values:,} values in pages of {unpacked:,} bytes, and its footer says "
            f"{column.num_values:,} in {column.total_uncompressed_size:,}"
        )
    return total


def _pages(file: IO[bytes], start: int, end: int, where: str) -> Iterator[Page]:
    """The pages of a column of a row group, by their headers."""
    at = start
    while at < end:
        page = _page(file, at, end, where)
        if page.bytes < 0 or page.packed < 0 or page.values < 0 or at + page.header + page.packed > end:
            raise pa.ArrowInvalid(f"{where}: the page at byte {at:,} does not fit into its column")
        yield page
        at += page.header + page.packed


def _page(file: IO[bytes], at: int, end: int, where: str) -> Page:
    """The page whose header begins at a byte."""
    wanted = _FIRST_READ
    while True:
        file.seek(at)
        data = file.read(min(wanted, end - at))
        header = _Header(data)
        try:
            fields = header.struct()
        except IndexError:
            if len(data) < wanted or wanted >= HEADER_BYTES:
                raise pa.ArrowInvalid(f"{where}: no page begins at byte {at:,}") from None
            wanted *= 16
            continue
        kind = next((code for code in (_DATA, _DICTIONARY, _DATA_2) if isinstance(fields.get(code), dict)), 0)
        details = fields.get(kind, {})
        numbers: tuple[Any, ...] = (
            fields.get(2),
            fields.get(3),
            details.get(1, 0),
            details.get(_ENCODING.get(kind, 0), 0),
        )
        if not all(isinstance(number, int) for number in numbers):
            raise pa.ArrowInvalid(f"{where}: no page begins at byte {at:,}")
        return Page(kind, numbers[0], numbers[1], header.at, numbers[2], numbers[3])


class _Header:
    """The part of Thrift's compact protocol that page headers need: integers and structs are read,
    everything else is skipped. Truncated input raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields of a struct by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._number()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > 8:
            raise IndexError
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self._number()
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (3, 7):
            self._skip(1 if kind == 3 else 8)
        elif kind == 8:
            self._skip(self._unsigned())
        elif kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            for _ in range(count):
                # In a list true and false take a byte each.
                self._value(3 if head & 15 in (1, 2) else head & 15, depth + 1)
        else:
            raise IndexError
        return None

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _number(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise IndexError
