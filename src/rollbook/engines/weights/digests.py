"""Weights as named tensors: read from a model directory, and digested wherever they are.

Engines verify the weights they loaded with this, and the trainer those it wrote: both use one
digest.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from rollbook.engines.model_files import check_unchanged, origin_of, weight_files
from rollbook.engines.weights.device_hashes import DeviceHashes, hash_there, lines_of
from rollbook.store.digest import combine, is_tree, tensor_line
from rollbook.store.errors import ModelError
from rollbook.store.safe_paths import reading

Tensors = dict[str, torch.Tensor]
Look = Callable[[str, torch.Tensor], None]
"""Called with the name of a tensor and the tensor; it may raise."""
HASHERS = {"cpu": 2, "cuda": 8}
"""Threads that hash tensors of a device: of a CPU few, since it computes as well."""
LARGE = 1 << 21
"""Bytes of a tensor that a thread is given."""


def tensor_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's bytes, row-major; copied only from another device, or from a view with gaps."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_cuda:  # pinned memory, which torch keeps for the next: four times as fast
        host = torch.empty_like(flat, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        torch.cuda.current_stream(flat.device).synchronize()
        flat = host
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def line_of(name: str, tensor: torch.Tensor, *, tree: bool = False) -> str:
    """The line of one tensor in a digest; its last word is the xxh3-128 of its bytes, or in a tree's of the
    hashes of its blocks.

    bfloat16 and float16 are converted to float32 of the same values: so the digest does not
    depend on which of these types holds the weights.
    """
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    dtype = str(wide.dtype).removeprefix("torch.")
    return tensor_line(name, dtype, wide.shape, tensor_bytes(wide).data, tree=tree)


def digest_tensors(tensors: Tensors, *, tree: bool = False) -> str:
    """The digest of `store.digest` over torch tensors of any type and device, by blocks or of their bytes."""
    return digest_stream(tensors.items(), tree=tree)


def digest_stream(tensors: Iterable[tuple[str, torch.Tensor]], *, tree: bool = False) -> str:
    """As `digest_tensors`, for tensors that come one at a time."""
    return combine(lines_of_stream(tensors, tree=tree), tree=tree)


def digest_like(tensors: Tensors, wanted: str) -> str:
    """The digest of tensors, of the kind of the one that it is compared with."""
    return digest_tensors(tensors, tree=is_tree(wanted))


def lines_of_stream(
    tensors: Iterable[tuple[str, torch.Tensor]], look: Look | None = None, *, tree: bool = False
) -> list[str]:
    """Digest lines of tensors that come one at a time; threads hash large ones meanwhile, and by blocks a GPU
    those that it holds.

    Args:
        look: called with each tensor first.
    """
    lines: list[str] = []
    there: list[DeviceHashes] = []
    waiting: deque[Future[str]] = deque()
    with ThreadPoolExecutor(max(HASHERS.values())) as pool:
        for name, tensor in tensors:
            if look is not None:
                look(name, tensor)
            if tree and tensor.is_cuda:
                there.append(hash_there(name, tensor))
                continue
            if tensor.nbytes < LARGE:
                lines.append(line_of(name, tensor, tree=tree))
                continue
            if len(waiting) >= HASHERS.get(tensor.device.type, 1):  # no more of them are kept in memory
                lines.append(waiting.popleft().result())
            waiting.append(pool.submit(line_of, name, tensor, tree=tree))
        lines += [line.result() for line in waiting]
    return lines + lines_of(there)


def checksums(tensors: Tensors) -> dict[str, str]:
    """SGLang's checksum of each tensor where it runs on a CPU: the first 8 bytes of SHA-256, hexadecimal."""
    return {name: hashlib.sha256(tensor_bytes(t).data).hexdigest()[:16] for name, t in tensors.items()}


def read_weights(model: Path) -> Tensors:
    """The tensors of a Hugging Face model directory's safetensors files.

    Raises:
        ModelError: there are none, or they cannot be read.
    """
    return dict(stream_files(model))


def stream_files(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_weights`, one tensor at a time.

    Raises:
        ModelError: as `read_weights`.
    """
    with reading(model):
        files = weight_files(model)
        if not files:
            raise ModelError(f"{model}: holds no safetensors weights")
        for file in files:
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118
                        yield name, handle.get_tensor(name)
            except Exception as error:
                raise ModelError(f"{file}: cannot be read: {error}") from error


def read_unchanged(model: Path) -> Tensors:
    """As `read_weights`; a checkpoint, or an exported model, must match its own manifest.

    Raises:
        ModelError: as `read_weights`; or the weights were changed after they were written.
    """
    weights, origin = read_weights(model), origin_of(model)
    if origin is not None:
        check_unchanged(model, origin, digest_like(weights, origin.digest))
    return weights


def widened(tensors: Tensors) -> Tensors:
    """The tensors in float32: exact for bfloat16 and float16, not copied if they are float32 already."""
    return {name: tensor.float() for name, tensor in tensors.items()}
