"""Attention of packed samples. Imported once Megatron's device is decided."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(DotProductAttention):
    """Megatron's attention; for packed samples torch's, which never holds the scores of all pairs of tokens.

    Each sample attends to itself alone, and to the sinks of heads where there are any. Keys and values stay
    as few as their heads are. In a layer with a window a sample goes by parts as long as that, each with the
    keys that it sees.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention [P, heads * width] of packed queries [P, heads, width], or as Megatron's own."""
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        ends = packed_seq_params.ends
        lengths = [end - start for start, end in pairwise(ends)]
        split = zip(*(of.transpose(0, 1)[None].split(lengths, 2) for of in (query, key, value)), strict=True)
        found = [self._of_sample(*sample) for sample in split]
        return torch.cat(found, 2)[0].transpose(0, 1).reshape(query.shape[0], -1)

    def _of_sample(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention [1, heads, T, width] of a sample's queries, each [1, heads, T, width]."""
        window, length = self.scale_mask_softmax.window_size, query.shape[2]
        size = length if window is None else min(window[0] + 1, length)
        parts = [self._attend(query[:, :, :size], key[:, :, :size], value[:, :, :size], None)]
        for start in range(size, length, size):
            end, seen = min(start + size, length), slice(start - size + 1, min(start + size, length))
            mask = _band(size, query.dtype, query.device)[: end - start, : end - seen.start]
            parts.append(self._attend(query[:, :, start:end], key[:, :, seen], value[:, :, seen], mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of some queries to some keys; without a mask it is causal."""
        few = query.shape[1] != key.shape[1]
        how = {"attn_mask": mask, "is_causal": mask is None, "scale": self.softmax_scale, "enable_gqa": few}
        if self.softmax_offset is None:
            return scaled_dot_product_attention(query, key, value, **how)
        count, width = query.shape[2], query.shape[3]
        given = _with_sinks(query, key, value, self.softmax_offset / self.softmax_scale)
        if mask is not None:
            how["attn_mask"] = torch.nn.functional.pad(mask, (1, 0, 1, 0))
        return scaled_dot_product_attention(*given, **how)[:, :, -count:, :width]


def _with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with one more of each before the first: a key whose product with every query
    of a head is that head's number of `sinks` [heads], and whose value is 0. Of its query nothing is used.

    Query heads that share keys share it, so that widths grow by as many as these are: each head's queries
    have a 1 at its own place there.
    """
    groups, width = key.shape[1], query.shape[3]
    each = query.shape[1] // groups
    query, key, value = (torch.nn.functional.pad(of, (0, each, 1, 0)) for of in (query, key, value))
    ones = torch.eye(each, dtype=query.dtype, device=query.device).repeat(groups, 1)[None, :, None]
    query = torch.cat([query[..., :width], ones.expand(*query.shape[:3], each)], 3)
    first = torch.nn.functional.pad(sinks.to(key.dtype).view(1, groups, 1, each), (width, 0))
    return query, torch.cat([first, key[:, :, 1:]], 2), value


@functools.lru_cache(maxsize=8)
def _band(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores [size, 2 size - 1] of queries and of the keys from the first one's window
    on: 0 within each query's window, else minus infinity."""
    ahead = torch.arange(2 * size - 1, device=device) - torch.arange(size, device=device)[:, None]
    outside = (ahead < 0) | (ahead >= size)
    return torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill_(outside, float("-inf"))
