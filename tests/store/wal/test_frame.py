"""Frames detect any damage, and nothing but BadFrameError comes of any bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store.wal.frame import (
    ALIGN,
    BATCH_FRAME,
    EMPTY_CHAIN,
    BadFrameError,
    encode_frame,
    padded,
    read_frame,
    scan,
    valid_frame_after,
)

PAYLOADS = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


def _frames(payloads: list[bytes]) -> list[bytes]:
    """Each payload as a whole frame of one chain."""
    chain, frames = EMPTY_CHAIN, []
    for i, payload in enumerate(payloads):
        buffers, chain = encode_frame(BATCH_FRAME, payload, i, 1, chain)
        frames.append(b"".join(buffers))
    return frames


def _scan(data: bytes, previous: bytes | None = EMPTY_CHAIN) -> list[Any]:
    return list(scan(memoryview(data), 0, len(data), previous))


@given(PAYLOADS)
def test_frames_come_back_as_written(payloads: list[bytes]) -> None:
    """Scanning what was encoded gives each payload, number and place, 64-byte aligned."""
    frames = _frames(payloads)
    back = _scan(b"".join(frames))
    assert [bytes(f.payload) for f in back] == payloads
    assert [(f.kind, f.first_seq, f.count) for f in back] == [
        (BATCH_FRAME, i, 1) for i in range(len(payloads))
    ]
    assert [f.end - f.offset for f in back] == [len(f) for f in frames]
    assert all(f.offset % ALIGN == 0 for f in back)


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=25)
def test_any_flipped_byte_is_detected(payload: bytes) -> None:
    """Changing any single byte of a frame, header, payload, reserved or padding, is detected."""
    frame = _frames([payload])[0]
    for place in range(len(frame)):
        damaged = bytearray(frame)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(BadFrameError):
            _scan(bytes(damaged))


@given(st.binary(min_size=1, max_size=130))
@settings(max_examples=20)
def test_a_frame_cut_short_is_detected(payload: bytes) -> None:
    """No proper prefix of a frame reads as a frame."""
    frame = _frames([payload])[0]
    for length in range(1, len(frame)):
        with pytest.raises(BadFrameError):
            _scan(frame[:length])


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=300)
def test_any_bytes_raise_only_bad_frame_error(junk: bytes, magic: bool) -> None:
    """Whatever the bytes, also behind a true magic number, scanning raises nothing but BadFrameError."""
    data = b"RBLF\0\0\1\0" + junk if magic else junk
    with contextlib.suppress(BadFrameError):
        _scan(data)
    with contextlib.suppress(BadFrameError):
        read_frame(memoryview(data), len(data) // 2)
    assert valid_frame_after(memoryview(junk), 0) is None


def test_the_chain_detects_frames_that_moved_or_are_gone() -> None:
    """Whole, valid frames in another order, or with one missing, break the chain; alone they do not."""
    a, b, c = _frames([b"a", b"b", b"c"])
    for wrong in (a + c + b, b + a + c, a + c, b + c):
        assert len(_scan(wrong, previous=None)) == len(wrong) // len(a)
        with pytest.raises(BadFrameError, match="chain"):
            _scan(wrong)
    assert len(_scan(a + b + c)) == 3


def test_valid_frame_after_finds_the_next_aligned_frame() -> None:
    """The search steps over damage, and over bytes that only look like a header."""
    a, b = _frames([b"a" * 70, b"b"])
    broken = bytearray(a + b)
    broken[100] ^= 255
    broken[ALIGN : ALIGN + 4] = b"RBLF"
    assert valid_frame_after(memoryview(bytes(broken)), 0) == len(a)
    assert valid_frame_after(memoryview(a + b[:-1]), 0) is None


@given(st.integers(0, 10**9))
def test_padded_is_the_next_multiple(length: int) -> None:
    """`padded` rounds up to 64 and never by more than 63."""
    assert padded(length) % ALIGN == 0
    assert 0 <= padded(length) - length < ALIGN
