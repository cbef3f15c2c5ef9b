"""The experts of `routed_experts`, read back as docs/format.md says that they are packed."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

ExpertIds = npt.NDArray[np.int16]


def unpack(stored: Mapping[str, Any]) -> ExpertIds:
    """The expert ids that were packed, int16 [positions, layers, topk]; the first is of `stored["start"]`.

    Raises:
        ValueError: `stored` is empty, or not what `pack` makes.
    """
    try:
        shape, bits = tuple(stored["shape"]), stored["bits"]
        data = np.frombuffer(base64.b64decode(stored["data"], validate=True), np.uint8)
        count = math.prod(shape)
        if len(shape) != 3 or not 1 <= bits <= 15 or len(data) != (count * bits + 7) // 8:
            raise ValueError(f"{len(data)} bytes are not {shape} ids of {bits} bits")
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"these are no packed expert ids: {error!r}") from error
    planes = np.zeros((count, 16), np.uint8)
    planes[:, 16 - bits :] = np.unpackbits(data, count=count * bits).reshape(count, bits)
    return np.packbits(planes, axis=1).view(">u2").astype(np.int16).reshape(shape)
