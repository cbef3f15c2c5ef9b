"""Tensors of a device in the host's memory, by one transfer for all of a type: each waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copied_at_once(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU, in order; the same ones where they are there already."""
    away = [at for at, tensor in enumerate(tensors) if tensor.device.type != "cpu"]
    result = list(tensors)
    for at, copy in zip(away, by_type([tensors[at] for at in away]), strict=True):
        result[at] = copy
    return result


def by_type(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the CPU of tensors of one device, joined type by type."""
    copies = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [at for at, tensor in enumerate(tensors) if tensor.dtype == dtype]
        joined = torch.cat([tensors[at].reshape(-1) for at in places]).cpu()
        parts = torch.split(joined, [tensors[at].numel() for at in places])
        for at, part in zip(places, parts, strict=True):
            copies[at] = part.view(tensors[at].shape)
    return copies
