"""Bodies of a few kilobytes that stand for hundreds of megabytes."""

from __future__ import annotations

import gzip
import zlib
from functools import cache

MIB = 1 << 20


@cache
def bomb(size: int) -> bytes:
    """A gzip of a gzip of so many spaces (JSON as far as it goes), made without holding them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    inner = b"".join(packer.compress(b" " * MIB) for _ in range(size // MIB)) + packer.flush()
    return gzip.compress(inner)
