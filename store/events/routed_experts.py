"""Packs the experts to which a mixture-of-experts model routed each token for the log, and unpacks
them. Pure.

A token passes through `topk` experts in each of `layers`, so an engine's int32 ids take 1,536
bytes a token for 48 layers with 8 of 128 experts. Ids of so few experts need 7 bits each: 336
bytes, which no general compressor achieves. In the log they are text, in base64: it is encoded
50 times faster than base85, and is no larger once sealed, since zstd reduces either to about the
packed bits.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 2**15 - 1

ExpertIds = npt.NDArray[np.int16]


def pack(experts: npt.NDArray[Any], start: int) -> dict[str, Any]:
    """Expert ids as `routed_experts` of a completed turn has them.

    Args:
        experts: integers [positions, layers, topk]; row i is position `start + i` of prompt and completion.

    Returns:
        `start`; `shape`; `bits` of an id, the fewest that hold the largest; `data`, base64 of the ids
        one behind the other, each with its highest bit first, filled up with zeros to a whole byte.

    Raises:
        ValueError: other dimensions, or an id that is negative or larger than 32,767.
    """
    if experts.ndim != 3:
        raise ValueError(f"expert ids are [positions, layers, topk], these have {experts.ndim} dimensions")
    low, high = (int(experts.min()), int(experts.max())) if experts.size else (0, 0)
    if low < 0 or high > LARGEST:
        raise ValueError(f"expert ids {low} to {high}: they have to be 0 to {LARGEST}")
    bits = max(high.bit_length(), 1)
    data = _packed(experts.reshape(-1), bits)
    return {
        "start": start,
        "shape": list(experts.shape),
        "bits": bits,
        "data": base64.b64encode(data).decode(),
    }


def _packed(ids: npt.NDArray[Any], bits: int) -> bytes:
    if bits > 8:
        planes = np.unpackbits(ids.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)
        return np.packbits(planes[:, 16 - bits :]).tobytes()
    # Eight ids fill `bits` bytes of one 64-bit word: ten times faster than going through single bits.
    groups = np.zeros((-(-len(ids) // 8), 8), np.uint64)
    groups.reshape(-1)[: len(ids)] = ids
    words = np.zeros(len(groups), np.uint64)
    for place in range(8):
        words = (words << np.uint64(bits)) | groups[:, place]
    packed = words.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - bits :]
    return packed.tobytes()[: (len(ids) * bits + 7) // 8]


def unpack(stored: Mapping[str, Any]) -> ExpertIds:
    """The expert ids that `pack` packed.

    Args:
        stored: `routed_experts` of a completed turn.

    Returns:
        int16 [positions, layers, topk]; the first position is `stored["start"]`.

    Raises:
        ValueError: `stored` is empty, or not what `pack` makes.
    """
    try:
        shape, bits = tuple(stored["shape"]), stored["bits"]
        data = np.frombuffer(base64.b64decode(stored["data"], validate=True), np.uint8)
        numbers = all(isinstance(number, int) and number >= 0 for number in (*shape, bits))
        if not numbers or len(shape) != 3 or not 1 <= bits <= 15:
            raise ValueError(f"{shape} of {bits} bits are no packed expert ids")
        count = math.prod(shape)
        if len(data) != (count * bits + 7) // 8:
            raise ValueError(f"{len(data)} bytes are not {shape} ids of {bits} bits")
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"these are no packed expert ids: {error!r}") from error
    return _unpacked(data, count, bits).reshape(shape)


def _unpacked(data: npt.NDArray[np.uint8], count: int, bits: int) -> ExpertIds:
    # Eight ids fill `bits` bytes, and none lies in more than three of them.
    groups = -(-count // 8)
    whole = np.zeros(groups * bits, np.uint8)
    whole[: len(data)] = data
    padded = np.zeros((groups, bits + 2), np.uint8)
    padded[:, :bits] = whole.reshape(groups, bits)
    ids = np.empty((groups, 8), np.int16)
    for place in range(8):
        byte, bit = divmod(place * bits, 8)
        three = padded[:, byte].astype(np.uint32) << 16
        three |= padded[:, byte + 1].astype(np.uint32) << 8
        three |= padded[:, byte + 2]
        ids[:, place] = (three >> (24 - bits - bit)) & (2**bits - 1)
    return ids.reshape(-1)[:count]
