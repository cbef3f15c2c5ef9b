"""Packed micro-batches: samples one after the other in one row, so that no padding is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollbook.train.batches.batch import MicroBatch
from rollbook.train.model.varlen import Documents


@dataclass(frozen=True, slots=True)
class Pack:
    """The S tokens of a micro-batch's samples, one sample after the other, and P - S tokens of
    padding.

    Attributes:
        tokens, positions: int64 [1, P]; positions begin anew with each sample.
        documents: where samples begin and end, as Megatron's attention takes it.
        before_trained: int64 [N], the places whose next token is trained.
        rows: int64 [S], the sample of each token.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    documents: Any
    before_trained: torch.Tensor
    rows: torch.Tensor


def pack(micro: MicroBatch, device: torch.device, multiple: int = 1, *, flash: bool = False) -> Pack:
    """The samples of a micro-batch as one row.

    Args:
        multiple: the row's length is a multiple of it: zeros fill it up, as one more document.
        flash: whether attention is that of `varlen`, where it takes it.
    """
    assert micro.lengths is not None
    real = np.arange(micro.tokens.shape[1]) < micro.lengths[:, None]
    rows, columns = np.nonzero(real)
    next_trained = np.zeros_like(real)
    next_trained[:, :-1] = micro.loss_mask[:, 1:]
    more = -len(rows) % multiple
    ends = np.cumsum([0, *micro.lengths, *([more] if more else [])])
    row = np.append(micro.tokens[real], np.zeros(more, micro.tokens.dtype))
    columns = np.append(columns, np.arange(more))
    places = (row, columns, np.flatnonzero(next_trained[real]), rows)
    placed = [torch.from_numpy(array).to(device, non_blocking=True) for array in places]
    tokens, positions, before, at = placed
    return Pack(tokens[None], positions[None], documents(ends, positions, flash=flash), before, at)


def documents(ends: npt.NDArray[np.int64], positions: torch.Tensor, *, flash: bool = False) -> Any:
    """The documents in a pack, as Megatron's `PackedSeqParams`.

    Megatron is not told where they end, and gets the angles of each token from `layer.RotatedAttention`: it
    would rotate document by document, and each layer would wait for the device four times.

    Args:
        ends: of the documents; the first one is 0.
        positions: int64 [P] of the tokens, each in its document.
        flash: as of `pack`.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(np.diff(ends).max())  # so many positions get angles
    params = PackedSeqParams(
        qkv_format="thd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.ends, params.positions, params.flash = ends.tolist(), positions, None
    if flash:
        placed = torch.from_numpy(ends.astype(np.int32)).to(positions.device, non_blocking=True)
        params.flash = Documents(placed, longest)
    return params


class OutputPlaces:
    """Has an output layer compute only some places of a pack: the vocabulary is wide, and the
    outputs at prompts and tool results are not used.

    Args:
        layer: Megatron's; None if it is in another stage.
        sequence: each rank has some of the tokens: they are gathered here instead of in the
            layer.
    """

    def __init__(self, layer: Any, *, sequence: bool) -> None:
        self._places: torch.Tensor | None = None
        self._sequence = sequence
        if layer is None:
            return
        layer.register_forward_pre_hook(self._choose)
        if sequence:
            vars(layer).update(sequence_parallel=False, allreduce_dgrad=True)

    @contextlib.contextmanager
    def only(self, places: torch.Tensor | None) -> Iterator[None]:
        """A context in which the layer sees only these places of [P, 1, hidden]; None: all."""
        self._places = places
        try:
            yield
        finally:
            self._places = None

    def _choose(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = inputs
        if self._sequence:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank has the whole gradient of the layer's input, and keeps that of its own tokens.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden if self._places is None else hidden[self._places], *rest
