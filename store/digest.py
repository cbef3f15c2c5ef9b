"""The digest of a set of tensors, used for checkpoints, weight syncs and the stages of a step.

Each tensor is hashed with xxh3-128 (memory speed); the set is a sha256 over the sorted lines
`name dtype shape hash`. Equal digests mean equal names, types, shapes and bytes.

A tensor's hash is of its bytes; or of the hashes of its blocks of 64 KiB, which a device can compute where
the tensor is (`engines.weights.block_hash`). A digest of this kind, a tree's, begins with `tree-`, and is
compared with digests of its own kind alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson
import xxhash

BLOCK_BYTES = 1 << 16
"""Of a tree's blocks; a tensor that is no longer than one has the hash of its bytes in either kind."""
_TREE = "tree-"


def tensor_line(name: str, dtype: str, shape: Iterable[int], data: Any, *, tree: bool = False) -> str:
    """The line of one tensor. `data` is its bytes (any contiguous buffer), little-endian, row-major."""
    return line_with(name, dtype, shape, tree_hash(data) if tree else xxhash.xxh3_128_hexdigest(data))


def line_with(name: str, dtype: str, shape: Iterable[int], tensor_hash: str) -> str:
    """The line of a tensor that has this hash."""
    return f"{name} {dtype} {list(shape)} {tensor_hash}"


def tree_hash(data: Any) -> str:
    """The hash (hex) of a tensor's bytes by blocks."""
    view = memoryview(data).cast("B")
    starts = range(0, len(view), BLOCK_BYTES)
    return tree_root(b"".join(xxhash.xxh3_128_digest(view[at : at + BLOCK_BYTES]) for at in starts))


def tree_root(hashes: bytes) -> str:
    """The hash (hex) of a tensor whose blocks have these, 16 bytes each; of one block, or none, its own."""
    return hashes.hex() if len(hashes) == 16 else xxhash.xxh3_128_hexdigest(hashes)


def combine(lines: Iterable[str], *, tree: bool = False) -> str:
    """The digest of the tensors that have these lines: sha256 (hex) over the lines, sorted."""
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return _TREE + digest if tree else digest


def is_tree(digest: str) -> bool:
    """Whether a digest is of the kind that hashes tensors by blocks."""
    return digest.startswith(_TREE)


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
