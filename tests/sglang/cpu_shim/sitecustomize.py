"""Lets an unchanged SGLang 0.5.23 run on a machine without an accelerator, with PyTorch's CPU build.

Python imports a `sitecustomize` by itself when it starts, so a server whose PYTHONPATH names this folder is
patched in each of its processes, the spawned scheduler too. Each patch waits for the module that it is about,
and changes no number: only what is asked of a driver or a compiled library that is not there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _declare_vision_operators(_: ModuleType | None) -> None:
    """Before torchvision describes its operators: it has a CUDA build only, whose library does not load here.

    SGLang imports it for the configurations of models that see, and torchvision then describes how `nms` acts
    on shapes, which PyTorch refuses for an operator that it does not know.
    """
    import torch

    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)


def _register_no_host_memory(module: ModuleType | None) -> None:
    """Host memory is registered with the CUDA driver, for routed experts among others: there is none."""
    assert module is not None
    module._cuda_host_register = lambda *_, **__: None  # type: ignore[attr-defined]


def _pin_no_memory(_: ModuleType | None) -> None:
    """Adapters are prepared in pinned memory, which only a driver has."""
    import torch
    from torch.utils._device import _device_constructors  # type: ignore[attr-defined]

    _device_constructors()  # kept by torch from its first use on: of the functions as they are
    for name in ("arange", "empty", "ones", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, pin_memory=False, **more: make(*given, **more)


BEFORE: dict[str, Callable[[ModuleType | None], None]] = {
    "sglang.srt.lora.layers": _pin_no_memory,
    "torchvision._meta_registrations": _declare_vision_operators,
}
AFTER: dict[str, Callable[[ModuleType | None], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _register_no_host_memory
}
"""Module -> what is done before, and after, it is first imported."""


class _Patches(importlib.abc.MetaPathFinder):
    """Finds the modules that are patched where they are, and patches them."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of the tables, whose loader patches it; None of any other."""
        if name in self._looking or not (name in BEFORE or name in AFTER):
            return None
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                BEFORE.get(name, _nothing)(None)
                execute(module)
                AFTER.get(name, _nothing)(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _nothing(_: ModuleType | None) -> None:
    """Not patched at this moment."""


sys.meta_path.insert(0, _Patches())
