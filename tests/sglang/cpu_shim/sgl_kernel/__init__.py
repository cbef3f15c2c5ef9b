"""Stands in for SGLang's compiled kernels, which PyPI has for CUDA only.

On a CPU SGLang imports names of them and, with the torch backends, calls none. So every name is there, and
says what it is if it is called after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def _missing(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called: there are no compiled kernels here")

    return kernel


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
