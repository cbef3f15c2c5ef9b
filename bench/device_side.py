"""A device alone, in a separate process of `bench device`: how fast it multiplies, reads and digests.

python -m rollbook.bench.device_side DEVICE DTYPE
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rollbook.bench.processes import obey
from rollbook.bench.train_sides import THREADS, Size, make_model

if TYPE_CHECKING:
    import torch

NAME, MODEL, PRODUCT, READ, DIGEST = "name", "model", "product", "read", "digest"
"""What is asked."""
PRODUCTS = {"cpu": (1536, 1), "cuda": (8192, 20)}
"""Device -> rows of the square matrices, and how many products follow each other."""
TENSOR = 1 << 23
"""Numbers of a tensor that a GPU digests: as of a large model's state. A CPU has one, for one thread."""


def product_flops(device: str) -> int:
    """Floating-point operations of PRODUCT."""
    rows, times = PRODUCTS[device]
    return times * 2 * rows**3


class DeviceSide:
    """Answers what is asked of a device.

    Args:
        dtype: of what is multiplied, and of the models that are made.
    """

    def __init__(self, device: str, dtype: str) -> None:
        import torch

        torch.set_num_threads(THREADS)
        self._device, self._dtype = device, dtype
        self._numbers: torch.Tensor | None = None

    def __call__(self, command: dict[str, Any]) -> Any:
        """The answer to a command, whose `what` is one of the names above."""
        match command["what"]:
            case "name":
                return device_name(self._device)
            case "model":
                make_model(Path(command["folder"]), Size(**command["size"]), self._dtype, self._device)
                return self._free()
            case "product":
                return {"seconds": self._seconds(functools.partial(self._multiply, *self._factors))}
            case what:
                numbers = self._of(command["floats"])
                work = _read if what == READ else _digest
                return {"seconds": self._seconds(functools.partial(work, numbers))}

    def _seconds(self, work: Callable[[], object]) -> float:
        self._wait()
        begun = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        """Give the memory back that a model took: others need it."""
        import torch

        if self._device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _multiply(self, left: torch.Tensor, right: torch.Tensor) -> None:
        for _ in range(PRODUCTS[self._device][1]):
            left @ right

    @functools.cached_property
    def _factors(self) -> torch.Tensor:
        import torch

        rows, dtype = PRODUCTS[self._device][0], getattr(torch, self._dtype)
        return torch.randn((2, rows, rows), device=self._device).to(dtype)

    def _of(self, floats: int) -> torch.Tensor:
        import torch

        if self._numbers is None:
            self._numbers = torch.arange(floats, dtype=torch.float32, device=self._device)
        return self._numbers


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    import torch

    from rollbook.train.environment import processor

    return torch.cuda.get_device_name() if device == "cuda" else processor()


def _read(numbers: torch.Tensor) -> object:
    """Everything, once: there summed up, here hashed as one piece."""
    return float(numbers.sum()) if numbers.is_cuda else xxhash.xxh3_128_digest(numbers.numpy().data)


def _digest(numbers: torch.Tensor) -> object:
    """As a step digests its gradients, its weights and its optimizer's state."""
    import torch

    from rollbook.engines.weights.digests import lines_of_stream
    from rollbook.train.ranks.kept_digests import digest_of

    parts = torch.split(numbers, TENSOR) if numbers.is_cuda else [numbers]
    tensors = ((str(i), part) for i, part in enumerate(parts))
    return digest_of(lines_of_stream(tensors, tree=True), tree=True)


def main() -> None:
    """Answer until standard input ends."""
    obey(DeviceSide(*sys.argv[1:3]))


if __name__ == "__main__":
    main()
