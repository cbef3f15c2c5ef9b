"""One digest for tensors: pinned values, and what does and does not change it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import xxhash

from rollbook.store.digest import (
    BLOCK_BYTES,
    combine,
    digest_arrays,
    digest_json,
    is_tree,
    tensor_line,
    tree_hash,
)

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_the_digest_of_fixed_arrays_never_changes() -> None:
    """The digest of fixed arrays never changes: replay compares with digests written long ago."""
    assert digest_arrays({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest_arrays({"w": ARRAY}) == "3869c9c30c1e6098375c61cd780729cba16f4b167be92552d44ba87c9087fa3e"
    assert (
        digest_arrays({"w": ARRAY, "b": np.array([1, -1], np.int32)})
        == "fe3248f622cb1eef972cf77763c8009d24444eab948e5670b0cfc215658cc23d"
    )
    assert (
        digest_json({"b": [1, 2.5, None], "a": "é"})
        == "d764fee2563da33e3d57334755404e635da33c995824b0adfabc4b6e1af4f608"
    )


def test_the_digest_is_as_defined() -> None:
    """The digest is sha256 over sorted lines `name dtype [shape] xxh3-128`, computed here by hand."""
    lines = [
        f"b int32 [2] {xxhash.xxh3_128_hexdigest(np.array([1, -1], '<i4').tobytes())}",
        f"w float32 [2, 3] {xxhash.xxh3_128_hexdigest(ARRAY.astype('<f4').tobytes())}",
    ]
    expected = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest_arrays({"w": ARRAY, "b": np.array([1, -1], np.int32)}) == expected
    assert combine(reversed(lines)) == expected
    assert tensor_line("w", "float32", (2, 3), ARRAY.tobytes()) == lines[1]


def test_a_tree_is_as_defined() -> None:
    """Of several blocks the hash is xxh3-128 over their hashes; of one it is the block's."""
    data = np.arange(3 * BLOCK_BYTES + 5, dtype=np.uint8).tobytes()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    assert [len(block) for block in blocks] == [65536, 65536, 65536, 5]
    whole = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    assert tree_hash(data) == xxhash.xxh3_128_hexdigest(whole) == "77ac0d39c61a3a0a6cd69d8549b16e66"
    for short in (blocks[0], b"a", b""):
        assert tree_hash(short) == xxhash.xxh3_128_hexdigest(short)
    line = tensor_line("w", "uint8", (len(data),), data, tree=True)
    assert line == f"w uint8 [{len(data)}] {tree_hash(data)}"
    assert combine([line], tree=True) == f"tree-{combine([line])}"
    assert (is_tree(combine([line], tree=True)), is_tree(combine([line]))) == (True, False)


def test_order_and_layout_do_not_matter() -> None:
    """The mapping's order and the array's memory layout leave the digest as it is."""
    other = np.ones(2, np.float64)
    assert digest_arrays({"a": ARRAY, "b": other}) == digest_arrays({"b": other, "a": ARRAY})
    assert digest_arrays({"a": np.asfortranarray(ARRAY)}) == digest_arrays({"a": ARRAY})
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})


@pytest.mark.parametrize(
    "changed",
    [
        {"v": ARRAY},
        {"w": ARRAY.view(np.int32)},
        {"w": ARRAY.reshape(3, 2)},
        {"w": np.nextafter(ARRAY, np.float32(9))},
        {"w": ARRAY, "more": np.empty(0, np.float32)},
        {},
    ],
    ids=["name", "dtype", "shape", "bytes", "added", "removed"],
)
def test_each_part_changes_the_digest(changed: dict[str, np.ndarray]) -> None:
    """Name, dtype, shape, bytes and the set of tensors each change the digest."""
    assert digest_arrays(changed) != digest_arrays({"w": ARRAY})


def test_scalar_and_empty_arrays() -> None:
    """0-d and empty arrays have digests, and their shapes tell them apart."""
    shapes = [np.float32(1), np.ones(1, np.float32), np.ones((1, 1), np.float32)]
    shapes += [np.empty(0, np.float32), np.empty((0, 3), np.float32), np.empty((3, 0), np.float32)]
    assert len({digest_arrays({"x": np.asarray(a)}) for a in shapes}) == len(shapes)


def test_json_numbers_differ_by_type() -> None:
    """1 and 1.0, and a number and its text, are different values."""
    assert len({digest_json(v) for v in (1, 1.0, "1", True)}) == 4
