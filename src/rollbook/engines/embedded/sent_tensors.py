"""Tensors as SGLang's clients send them: a pickle in base64, read without running what it names.

A pickle may call anything it can name. Here it can name only a few functions that build a
tensor; everything else is refused. Storage comes inline, or as the name of shared memory on this
host.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from rollbook.store.errors import ModelError

Named = list[tuple[str, torch.Tensor]]


def _tensor(kind: Any, storage: Any, metadata: tuple[Any, ...]) -> torch.Tensor:
    offset, size, stride, _ = metadata
    return _rebuilt(storage, offset, size, stride)


def _rebuilt(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    rebuild: Any = torch._utils._rebuild_tensor
    tensor: torch.Tensor = rebuild(storage, offset, tuple(size), tuple(stride))
    return tensor


def _parameter(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


def _typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    rebuild: Any = reductions.rebuild_typed_storage
    return rebuild(storage, dtype)


def _shared_storage(kind: Any, manager: bytes, handle: bytes, size: int, *_: Any) -> Any:
    rebuild: Any = reductions.rebuild_storage_filename
    return rebuild(torch.UntypedStorage, manager, handle, size)


def _empty_storage(kind: Any) -> Any:
    empty: Any = torch.UntypedStorage
    return empty(0)


def _inline_storage(data: bytes) -> Any:
    storage = torch.load(io.BytesIO(data), weights_only=True)
    if not isinstance(storage, torch.UntypedStorage | torch.storage.TypedStorage):
        raise pickle.UnpicklingError(f"a {type(storage).__name__} where a storage must be")
    return storage


_REDUCTIONS = "torch.multiprocessing.reductions"
# Classes are only ever arguments: a plain mark stands for each, which cannot be called or changed.
_ALLOWED: dict[tuple[str, str], Any] = {
    (_REDUCTIONS, "rebuild_tensor"): _tensor,
    (_REDUCTIONS, "rebuild_typed_storage"): _typed_storage,
    (_REDUCTIONS, "rebuild_storage_filename"): _shared_storage,
    (_REDUCTIONS, "rebuild_storage_empty"): _empty_storage,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "_load_from_bytes"): _inline_storage,
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
    ("torch", "UntypedStorage"): "UntypedStorage",
    ("torch", "Tensor"): "Tensor",
    ("torch.nn.parameter", "Parameter"): "Parameter",
    ("torch", "Size"): tuple,
    ("torch", "float32"): torch.float32,
    ("torch", "bfloat16"): torch.bfloat16,
    ("torch", "float16"): torch.float16,
    ("torch", "float64"): torch.float64,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if name in ("rebuild_storage_fd", "DupFd"):
            raise pickle.UnpicklingError(
                "it shares file descriptors, which only a child process can take: call "
                'torch.multiprocessing.set_sharing_strategy("file_system") before sending'
            )
        builder: Any = _ALLOWED.get((module, name))
        if builder is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which builds no tensor")
        return builder  # type: ignore[no-any-return]


def read_sent(payloads: list[str]) -> Named:
    """The named tensors of one tensor-parallel rank.

    Raises:
        ModelError: there are several ranks, or it is no list of named tensors.
    """
    if len(payloads) != 1:
        raise ModelError(f"{len(payloads)} payloads were sent: this engine is one tensor-parallel rank")
    try:
        data = base64.b64decode(payloads[0], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ModelError(f"the payload is not base64: {error}") from error
    try:
        items = _Reader(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ModelError(f"the payload cannot be read as named tensors: {error}") from error
    if not isinstance(items, list | tuple):
        raise ModelError(f"the payload is a {type(items).__name__}, not a list of (name, tensor)")
    for item in items:
        pair = isinstance(item, list | tuple) and len(item) == 2
        if not (pair and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)):
            raise ModelError("the payload is a list, but not of (name, tensor): send load_format null")
    return [(name, tensor) for name, tensor in items]
