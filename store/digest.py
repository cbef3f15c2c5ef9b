"""The digest of a set of tensors, used for checkpoints, weight syncs and the stages of a step.

Each tensor is hashed with xxh3-128 (memory speed); the set is a sha256 over the sorted lines
`name dtype shape hash`. Equal digests mean equal names, types, shapes and bytes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson
import xxhash


def tensor_line(name: str, dtype: str, shape: Iterable[int], data: Any) -> str:
    """The line of one tensor. `data` is its bytes (any contiguous buffer), little-endian, row-major."""
    return f"{name} {dtype} {list(shape)} {xxhash.xxh3_128_hexdigest(data)}"


def combine(lines: Iterable[str]) -> str:
    """sha256 (hex) over the sorted tensor lines."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Digest of named numpy arrays."""
    return combine(
        tensor_line(name, _name(a.dtype), a.shape, np.ascontiguousarray(a).data if a.size else b"")
        for name, a in arrays.items()
    )


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    """A type's name, which numpy takes longer to spell than a short array to hash."""
    return str(dtype)


def digest_json(value: Any) -> str:
    """sha256 (hex) over the value as JSON with sorted keys."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()
