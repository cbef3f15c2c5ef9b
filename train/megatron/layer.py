"""Layers of families that differ from Megatron's own. Imported once Megatron's device is decided."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from rollbook.train.megatron.norm import ZeroCentredNorm
from rollbook.train.megatron.shape import ModelShape


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
