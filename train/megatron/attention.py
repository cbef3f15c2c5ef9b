"""Attention of packed samples. Imported once Megatron's device is decided."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(DotProductAttention):
    """Megatron's attention; for packed samples torch's, which never holds the scores of all pairs of tokens.

    Each sample attends to itself alone. Keys and values stay as few as their heads are.
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
        few = query.shape[1] != key.shape[1]
        found = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=few)
            for q, k, v in split
        ]
        return torch.cat(found, 2)[0].transpose(0, 1).reshape(query.shape[0], -1)
