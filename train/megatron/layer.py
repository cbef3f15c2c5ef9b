"""What Megatron's layers are made of, and where families differ from Megatron's own. Imported once Megatron's
device is decided."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from rollbook.train.megatron.attention import PackedAttention
from rollbook.train.megatron.norm import Norm, ZeroCentredNorm
from rollbook.train.megatron.reshard import RankLayout
from rollbook.train.megatron.shape import ModelShape, Yarn


def norm_of(shape: ModelShape) -> type[Norm]:
    """The norm of all layers."""
    return ZeroCentredNorm if shape.zero_centred_norms else Norm


def layer_of(shape: ModelShape) -> Any:
    """Megatron's description of a layer."""
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
    if shape.two_rotations:
        within.self_attention.module = RotatedByKind
    layer.submodules = replace(within, input_layernorm=norm, pre_mlp_layernorm=norm)
    if shape.output_norms:
        layer.module = OutputNormLayer
    return layer


def gate_of(shape: ModelShape) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gates pass through; Megatron clamps them before, where there is a limit."""
    if shape.gelu:
        return functools.partial(torch.nn.functional.gelu, approximate="tanh")
    if shape.experts is not None and shape.experts.limit is not None:
        return lambda gates: gates * torch.sigmoid(1.702 * gates)
    return torch.nn.functional.silu


def complete(module: Any, shape: ModelShape, layout: RankLayout) -> None:
    """Give a rank's GPTModel what Megatron has no setting for."""
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
    """Megatron's layer with two norms more: of what attention and the feed-forward layer give, before each is
    added to what they were given.

    Hooks norm it, so that what hooks of the linear layers within add is normalized with it.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for of in ("self_attention", "mlp"):
            norm = ZeroCentredNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.add_module(f"{of}_output_norm", norm)
            self.get_submodule(of).register_forward_hook(
                lambda _, __, output, norm=norm: (norm(output[0]), output[1])
            )


class Rotations(RotaryEmbedding):
    """The angles by which queries and keys are rotated, of layers without a window and of those with one."""

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


class RotatedByKind(SelfAttention):
    """Megatron's attention, which takes from `Rotations` those of its kind of layer."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What attention gives [T, B, hidden], and no bias."""
        windowed = int(
            is_layer_window_attention(
                self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
            )
        )
        given["rotary_pos_emb"] = given["rotary_pos_emb"][:, windowed : windowed + 1]
        found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
            hidden_states, attention_mask, **given
        )
        return found


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
    kept = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * turned) * (1 - kept) + 1.0 / turned * kept


def _add_biases(layer: TransformerLayer) -> None:
    """Have a layer of experts add the biases of its outputs where autograd has no objection.

    Megatron adds that of attention where gradients are on even in forward passes alone, and would keep what
    these compute; and that of an expert to a view in place, so that it is given a copy.
    """
    layer.self_attention.register_forward_hook(lambda _, __, output: (output[0] + output[1], None))
    for expert in layer.mlp.experts.local_experts:
        expert.linear_fc2.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))
