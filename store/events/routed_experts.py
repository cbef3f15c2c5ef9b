"""Packs, for the log, the experts to which a mixture-of-experts model routed each token. Pure.

A token passes `topk` experts in each of `layers`, so an engine's int32 ids are 1,536 bytes a token for 48
layers of 8 out of 128 experts. Ids of so few experts need 7 bits each: 336 bytes, which no general
compressor makes of them. They are text in the log, and base64, which is encoded 50 times faster than base85
and is no larger once it is sealed: zstd takes either back to about the bits that were packed.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 2**15 - 1


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
