"""Attention of packed samples by one kernel of variable lengths: torch's FlashAttention (arXiv:2307.08691),
or what `torch.nn.attention.activate_flash_attention_impl` has put in its place.

Sinks are not the kernel's. A sink is one more key, of value 0: it makes the sum of a query's exponentials
larger, and the output smaller in that proportion. The kernel's backward pass takes the logarithm of that sum
and the output, so with both corrected its gradients are those of attention with sinks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLASH = "flash"
"""The name of this attention in the fingerprint of a step's environment."""
WIDEST, MULTIPLE = 256, 8
"""Widths of heads that the kernel takes."""
CLOSE = 0.03
"""By how much of the greatest value the trial may differ from the same in float32: bfloat16 has 8 bits."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Documents:
    """Where samples end in a pack: int32 [N + 1] on its device, from 0 to P; and how long the longest is."""

    ends: torch.Tensor
    longest: int


def takes(width: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes heads of a width."""
    return width <= WIDEST and width % MULTIPLE == 0 and dtype in (torch.bfloat16, torch.float16)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    before: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention [P, heads, width] within each document.

    Args:
        query: [P, heads, width]; key, value: [P, groups, width], of which query heads share each.
        scale: of the products of queries and keys.
        before: how many tokens before its own a query sees; None: all.
        sinks: [heads]; see above.
    """
    return _Attention.apply(query, key, value, sinks, documents, scale, before)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        documents: Documents,
        scale: float,
        before: int | None,
    ) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output, sums, state, unused = _kernel(query, key, value, documents, scale, before)
        if sinks is not None:
            whole = torch.logaddexp(sums, sinks.float()[:, None])
            output = (output * (sums - whole).exp().t()[..., None]).to(output.dtype)
            sums = whole
        ctx.save_for_backward(query, key, value, output, sums, sinks, state, unused)
        ctx.how = documents, scale, before
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums, sinks, state, unused = ctx.saved_tensors
        gradient = gradient.contiguous()
        saved = (query, key, value, output, sums, state, unused)
        of_inputs = _kernel_backward(gradient, *saved, *ctx.how)
        of_sinks = None
        if sinks is not None:
            shares = (sinks.float()[:, None] - sums).exp()
            products = (gradient.float() * output.float()).sum(-1).t()
            of_sinks = -(shares * products).sum(-1).to(sinks.dtype)
        return (*of_inputs, of_sinks, None, None, None)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    before: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output [P, heads, width], logarithms of the sums of exponentials, float32 [heads, P], and what the
    backward pass needs of the generator)."""
    ends, longest = documents.ends, documents.longest
    output, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, ends, ends, longest, longest, 0.0, before is None, False),
        scale=scale,
        **_window(before),
    )
    return output, sums, state, unused


def _kernel_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    state: torch.Tensor,
    unused: torch.Tensor,
    documents: Documents,
    scale: float,
    before: int | None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value; with torch's deterministic algorithms the same bits each time."""
    ends, longest = documents.ends, documents.longest
    gradients: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_backward(
        *(gradient, query, key, value, output, sums, ends, ends, longest, longest, 0.0, before is None),
        *(state, unused),
        scale=scale,
        **_window(before),
    )
    return gradients


def _window(before: int | None) -> dict[str, int | None]:
    return {"window_size_left": before, "window_size_right": None if before is None else 0}


# Whether it can be used --------------------------------------------------------------------------------


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is there for a device and a type, gives attention, and the same bits again."""
    return device.type == "cuda" and takes(MULTIPLE, dtype) and _tried(device, dtype)


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        reason = trial(device, dtype)
    except RuntimeError as error:  # no kernel for this GPU, or no torch with it
        reason = str(error).partition("\n")[0]
    if reason is not None:
        logger.warning("packed samples get their attention one by one on %s: %s", device, reason)
    return reason is None


def trial(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernel: outputs and gradients that are not attention's, or other bits the second
    time; None: nothing.

    Raises:
        RuntimeError: it does not run.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for window, with_sinks in ((None, False), (6, False), (6, True)):
            given, documents = _given(device, with_sinks=with_sinks)
            narrow = {name: tensor.to(dtype) for name, tensor in given.items()}
            first, again = (_passes(attend, narrow, documents, window) for _ in range(2))
            wanted = _passes(_dense, {n: t.float() for n, t in narrow.items()}, documents, window)
            for name, tensor in wanted.items():
                if not torch.equal(first[name], again[name]):
                    return f"{name} has other bits the second time"
                gap = (first[name].float() - tensor).abs().max() / tensor.abs().max()
                if not float(gap) <= CLOSE:
                    return f"{name} differs by {float(gap):.2g} of its greatest value"
    finally:
        torch.use_deterministic_algorithms(before)
    return None


Attend = Callable[..., torch.Tensor]
"""`attend`, or what has its arguments."""


def _given(device: torch.device, *, with_sinks: bool) -> tuple[dict[str, torch.Tensor], Documents]:
    """What is attended in a trial."""
    drawn, lengths = torch.Generator().manual_seed(0), torch.tensor([0, 5, 1, 70, 33])
    ends = lengths.cumsum(0)
    heads = {"query": 4, "key": 2, "value": 2}
    shapes: dict[str, tuple[int, ...]] = {name: (int(ends[-1]), count, 64) for name, count in heads.items()}
    shapes |= {"sinks": (4,)} if with_sinks else {}
    given = {name: torch.randn(shape, generator=drawn).to(device) for name, shape in shapes.items()}
    return given, Documents(ends.to(torch.int32).to(device), 70)


def _passes(
    attention: Attend, given: dict[str, torch.Tensor], documents: Documents, before: int | None
) -> dict[str, torch.Tensor]:
    """The output, and the gradients of all that is given, by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    output = attention(**leaves, documents=documents, scale=0.125, before=before)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    (output.float() * weights).sum().backward()
    gradients = {name: tensor.grad for name, tensor in leaves.items() if tensor.grad is not None}
    return {"output": output.detach()} | gradients


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    before: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend`, by its definition: all pairs of tokens."""
    shared, places = query.shape[1] // key.shape[1], torch.arange(len(query), device=query.device)
    key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    scores = torch.einsum("qhw,khw->hqk", query, key) * scale
    own = torch.bucketize(places, documents.ends, right=True)
    behind = places[:, None] - places
    hidden = (own[:, None] != own) | (behind < 0) | (behind > (len(query) if before is None else before))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], 2)
    return torch.einsum("hqk,khw->qhw", scores.softmax(-1)[..., : len(query)], value)
