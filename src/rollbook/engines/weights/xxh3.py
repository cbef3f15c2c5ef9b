"""Numbers of XXH3's specification, for blocks of 64 KiB: 64 rows of 16 stripes of 8 words."""

from __future__ import annotations

import struct

from rollbook.store.digest import BLOCK_BYTES

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret, 192 bytes."""
LANES, STRIPES, ROWS = 8, 16, BLOCK_BYTES // 1024
"""Sums of 64 bits; stripes of 64 bytes in a row; rows in a block."""
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
FACTORS = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def signed(value: int) -> int:
    """The signed integer of 64 bits that has these bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def secret_words(at: int, count: int) -> list[int]:
    """Words of the secret from a byte on, signed."""
    return list(struct.unpack_from(f"<{count}q", _SECRET, at))


START = [signed(v) for v in (_P32[2], *FACTORS[:4], _P32[1], FACTORS[4], _P32[0])]
ROW_KEYS = [secret_words(8 * stripe, LANES) for stripe in range(STRIPES)]
SCRAMBLE_KEYS, LAST_KEYS = secret_words(128, LANES), secret_words(121, LANES)
SCRAMBLE_FACTOR = _P32[0]
