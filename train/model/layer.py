"""The parts of Megatron's layers, and where families of models differ from Megatron's own:
attention of packed samples, and norms.

Imported once Megatron's device is decided.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.functional import scaled_dot_product_attention

from rollbook.train.model.reshard import RankLayout
from rollbook.train.model.shape import ModelShape, Yarn
from rollbook.train.model.varlen import attend, takes


def norm_of(shape: ModelShape) -> type[Norm]:
    """The class of all norms in the layers."""
    return ZeroCentredNorm if shape.zero_centred_norms else Norm


def layer_of(shape: ModelShape) -> Any:
    """Megatron's spec of a layer."""
    layer = get_gpt_layer_local_spec(
        num_experts=shape.experts.count if shape.experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    norm = norm_of(shape)
    within, norms = layer.submodules, {"q_layernorm": norm, "k_layernorm": norm} if shape.qk_norm else {}
    attention = replace(within.self_attention.submodules, core_attention=PackedAttention, **norms)
    within.self_attention.submodules = attention
    within.self_attention.module = RotatedAttention
    layer.submodules = replace(within, input_layernorm=norm, pre_mlp_layernorm=norm)
    if shape.output_norms:
        layer.module = OutputNormLayer
    return layer


def gate_of(shape: ModelShape) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation function of gates; Megatron clamps gates before it, where there is a limit."""
    if shape.gelu:
        return functools.partial(torch.nn.functional.gelu, approximate="tanh")
    if shape.experts is not None and shape.experts.limit is not None:
        return lambda gates: gates * torch.sigmoid(1.702 * gates)
    return torch.nn.functional.silu


def complete(module: Any, shape: ModelShape, layout: RankLayout) -> None:
    """Add to a rank's GPTModel what Megatron has no setting for."""
    if shape.two_rotations:
        module.add_module("rotary_pos_emb", Rotations(shape))
    if shape.yarn is not None:
        frequencies = yarn_frequencies(shape.yarn, shape.rope_theta, shape.head_dim)
        module.rotary_pos_emb.inv_freq.copy_(frequencies)
    if shape.biases:
        for layer in module.decoder.layers:
            _add_biases(layer)
    if shape.scaled_embedding and layout.first:
        # Rounded to the type of the embedding first, as transformers does.
        factor = torch.tensor(shape.hidden**0.5)
        module.embedding.register_forward_hook(lambda _, __, output: output * factor.to(output))


class OutputNormLayer(TransformerLayer):
    """Megatron's layer with two more norms, of the outputs of attention and of the feed-forward
    layer, before each is added to the residual.

    The norms are hooks, so that what hooks of the linear layers within add is normalized, too.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in ("self_attention", "mlp"):
            norm = ZeroCentredNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.add_module(f"{name}_output_norm", norm)
            self.get_submodule(name).register_forward_hook(
                lambda _, __, output, norm=norm: (norm(output[0]), output[1])
            )


class Rotations(RotaryEmbedding):
    """The rotation angles of queries and keys, for layers without a window and for those with one."""

    def __init__(self, shape: ModelShape) -> None:
        assert shape.windows is not None
        super().__init__(shape.head_dim, 1.0, rotary_base=shape.rope_theta, use_cpu_initialization=True)
        self.inv_freq.div_(shape.rope_factor)
        self._of_windows = RotaryEmbedding(
            shape.head_dim, 1.0, rotary_base=shape.windows.rope_theta, use_cpu_initialization=True
        )

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles [T, 2, 1, head_dim]."""
        both = super().get_emb(max_seq_len, offset), self._of_windows.get_emb(max_seq_len, offset)
        return torch.cat(both, 1)


class RotatedAttention(SelfAttention):
    """Megatron's attention, with the angles for its kind of layer, and of packed samples for each token."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of attention [T, B, hidden], and no bias."""
        angles, packed = kwargs["rotary_pos_emb"], kwargs.get("packed_seq_params")
        if angles.shape[1] > 1:  # of `Rotations`
            windowed = int(
                is_layer_window_attention(
                    self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
                )
            )
            angles = angles[:, windowed : windowed + 1]
        kwargs["rotary_pos_emb"] = angles if packed is None else angles[packed.positions, 0]
        output: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
            hidden_states, attention_mask, **kwargs
        )
        return output


def yarn_frequencies(yarn: Yarn, theta: float, width: int) -> torch.Tensor:
    """Angles per position [width / 2] of queries and keys of heads of that width."""
    turned = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    low, high = (
        width * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (yarn.fast, yarn.slow)
    )
    if yarn.truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    extrapolation = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * turned) * (1 - extrapolation) + 1.0 / turned * extrapolation


def _add_biases(layer: TransformerLayer) -> None:
    """Have a layer of experts add its output biases in a way that autograd accepts.

    Megatron adds the bias of attention where gradients are on even in forward passes alone, and
    would keep what these compute; and it adds the bias of an expert to a view in place, so the
    expert is given a copy.
    """
    layer.self_attention.register_forward_hook(lambda _, __, output: (output[0] + output[1], None))
    for expert in layer.mlp.experts.local_experts:
        expert.linear_fc2.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))


class PackedAttention(DotProductAttention):
    """Megatron's attention; for packed samples torch's, which never holds the scores of all pairs
    of tokens.

    Each sample attends only to itself, and to the sinks of heads where there are any. Keys and
    values are not repeated for the query heads that share them. Where one kernel does not take all
    of a pack (`varlen`), samples get it one by one; in a layer with a window in parts as long as the
    window, each with the keys that it sees.
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
        """Attention [P, heads * width] of packed queries [P, heads, width]; otherwise Megatron's
        own."""
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        if packed_seq_params.flash is not None and takes(query.shape[-1], query.dtype):
            window = self.scale_mask_softmax.window_size
            output = attend(
                *(query, key, value, packed_seq_params.flash),
                scale=self.softmax_scale,
                before=None if window is None else window[0],
                sinks=self.softmax_offset,
            )
            return output.reshape(query.shape[0], -1)
        ends = packed_seq_params.ends
        lengths = [end - start for start, end in pairwise(ends)]
        split = zip(
            *(tensor.transpose(0, 1)[None].split(lengths, 2) for tensor in (query, key, value)), strict=True
        )
        outputs = [self._of_sample(*sample) for sample in split]
        return torch.cat(outputs, 2)[0].transpose(0, 1).reshape(query.shape[0], -1)

    def _of_sample(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention [1, heads, T, width] of a sample's queries, each [1, heads, T, width]."""
        window, length = self.scale_mask_softmax.window_size, query.shape[2]
        size = length if window is None else min(window[0] + 1, length)
        parts = [self._attend(query[:, :, :size], key[:, :, :size], value[:, :, :size], None)]
        for start in range(size, length, size):
            end, visible = min(start + size, length), slice(start - size + 1, min(start + size, length))
            mask = _band(size, query.dtype, query.device)[: end - start, : end - visible.start]
            parts.append(self._attend(query[:, :, start:end], key[:, :, visible], value[:, :, visible], mask))
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
        padded = _with_sinks(query, key, value, self.softmax_offset / self.softmax_scale)
        if mask is not None:
            how["attn_mask"] = torch.nn.functional.pad(mask, (1, 0, 1, 0))
        return scaled_dot_product_attention(*padded, **how)[:, :, -count:, :width]


def _with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with one more of each in front: a key whose product with every query
    of a head is that head's entry of `sinks` [heads], and whose value is 0. The output of its
    query is not used.

    Query heads that share keys share this one, so widths grow by the number of these heads: each
    head's queries have a 1 at its own place there.
    """
    groups, width = key.shape[1], query.shape[3]
    each = query.shape[1] // groups
    query, key, value = (torch.nn.functional.pad(tensor, (0, each, 1, 0)) for tensor in (query, key, value))
    ones = torch.eye(each, dtype=query.dtype, device=query.device).repeat(groups, 1)[None, :, None]
    query = torch.cat([query[..., :width], ones.expand(*query.shape[:3], each)], 3)
    first = torch.nn.functional.pad(sinks.to(key.dtype).view(1, groups, 1, each), (width, 0))
    return query, torch.cat([first, key[:, :, 1:]], 2), value


@functools.lru_cache(maxsize=8)
def _band(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The mask that is added to the scores [size, 2 size - 1] of queries and of the keys from the
    first one's window on: 0 within each query's window, else minus infinity."""
    ahead = torch.arange(2 * size - 1, device=device) - torch.arange(size, device=device)[:, None]
    outside = (ahead < 0) | (ahead >= size)
    return torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill_(outside, float("-inf"))


class Norm(torch.nn.RMSNorm):
    """Root mean square norm (arXiv:1910.07467), torch's own, constructed as Megatron constructs its
    layers' parts.

    Megatron's wrapper of it refuses sequences that ranks share. There each rank has some of the
    tokens, so the weight's gradient is a sum over ranks: a mark has Megatron sum it.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCentredNorm(Norm):
    """The norm of Gemma 3, which multiplies by 1 + its weight and is computed in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., hidden_size], normalized; of the same type."""
        weight = 1.0 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)
