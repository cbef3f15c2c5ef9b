"""Runs unmodified megatron-core on the CPU: every reference to a CUDA device is redirected to the CPU.

Every patch redirects a device name or makes a stream inert; no arithmetic is replaced. It is installed
only in a process that trains on the CPU. Written against megatron-core 0.16.1, whose internals three
patches name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (  # noqa: SIM905  (a wall of quotes would be no clearer)
    "tensor zeros ones empty full arange rand randn randint zeros_like ones_like empty_like full_like "
    "linspace eye triu_indices tril_indices empty_strided as_tensor"
).split()
_CUDA_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
_installed = False


class _Inert:
    """A stream or event that does nothing. A class, since megatron uses the names in annotations."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any, **__: Any) -> _Inert:
        return self

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inert)

    __hash__ = object.__hash__


def install() -> bool:
    """Patch torch and megatron once; returns whether this call did it. The patch cannot be undone."""
    global _installed
    if _installed:
        return False
    _installed = True
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    for name in ("set_device", "synchronize", "empty_cache"):
        # One distinct function per name: dynamo rejects one object under two torch names.
        setattr(torch.cuda, name, lambda *_, **__: None)
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_random_state()
    _make_streams_inert()
    _patch_megatron()
    return True


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _redirect_factories() -> None:
    # torch keeps its own set of factories for `with torch.device(...)`, filled at first use. Filled
    # after the wrapping it would miss the originals, and models loaded on "meta" would come out wrong.
    from torch.utils._device import _device_constructors

    _device_constructors()

    def redirected(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        setattr(torch, name, redirected(getattr(torch, name)))


def _redirect_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    move, type_name = tensor.to, tensor.type

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (str, torch.device)) and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return move(self, *args, **kwargs)

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer dispatches on the name of the CUDA tensor type.
        result = type_name(self, *args, **kwargs)
        return _CUDA_TYPES.get(result, result) if isinstance(result, str) else result

    tensor.to, tensor.type = to, type_
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda self, stream: None
    tensor.pin_memory = lambda self, *_, **__: self


def _redirect_random_state() -> None:
    import megatron.core.tensor_parallel.random as megatron_random

    def seed_cpu(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    cuda: Any = torch.cuda
    cuda.manual_seed = seed_cpu
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _make_streams_inert() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Inert
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *_, **__: _Inert())
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)


def _patch_megatron() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # Megatron leaves what is on the CPU as it is; a collective's splits are numbers, not tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    # Without TransformerEngine, 0.16.1 never defines this name, and looks it up.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
