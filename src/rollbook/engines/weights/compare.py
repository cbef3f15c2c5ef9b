"""Whether an engine holds a model directory's weights: compares its checksums with those of the files.

It is a program, so that the proxy needs neither torch nor the memory: one tensor is in memory at
a time, and the comparison ends at the first that differs. Its request comes as JSON on standard
input, see `main`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open

from rollbook.engines.model_files import check_unchanged, origin_of, read_json, weight_files
from rollbook.engines.weights.digests import line_of
from rollbook.engines.weights.expected import DTYPES, Holding, describe_holding
from rollbook.engines.weights.rank_checksums import RankChecksums
from rollbook.engines.weights.tensor_checksums import CHECKSUMS, checksum_kind
from rollbook.engines.weights.tensor_layout import TensorPart, check_layout, part_of, shard
from rollbook.store.digest import combine
from rollbook.store.errors import EngineError, ModelError
from rollbook.store.events import Json

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine reports that it holds: checksums, on which device, and in which type (or `auto`)."""

    url: str
    ranks: Sequence[RankChecksums]
    device: str
    dtype: str


@dataclass(slots=True, eq=False)
class ModelFiles:
    """A model directory's weights: name -> open file, and -> size in bytes."""

    model: Path
    config: Mapping[str, Any]
    handles: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def open(self, file: Path, stack: contextlib.ExitStack) -> None:
        """Take a safetensors file's tensors."""
        handle = stack.enter_context(safe_open(file, framework="pt"))
        for name in handle.keys():  # noqa: SIM118
            part = handle.get_slice(name)
            self.handles[name] = handle
            self.sizes[name] = torch.Size(part.get_shape()).numel()

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, read now."""
        tensor: torch.Tensor = self.handles[name].get_tensor(name)
        return tensor

    @property
    def head_dim(self) -> int:
        """Of the model's attention.

        Raises:
            ModelError: its configuration does not say.
        """
        try:
            head_dim = self.config.get("head_dim")
            return int(head_dim or self.config["hidden_size"] // self.config["num_attention_heads"])
        except (KeyError, TypeError, ValueError, ArithmeticError):
            text = "give head_dim, or hidden_size and num_attention_heads, as whole numbers"
            raise ModelError(f"{self.model}/config.json does not say how large a head is: {text}") from None


def compare(model: Path, held: Held) -> tuple[str, Json | None]:
    """(the digest of a directory's weights, how they are held), if the engine holds exactly these.

    Raises:
        ModelError: the directory has no weights, or they cannot be read, or were changed after
            they were written.
        EngineError: the engine holds others; the first tensor that differs is named.
    """
    with contextlib.ExitStack() as stack:
        files = _opened(model, stack)
        names = frozenset(held.ranks[0].tensors)
        if files.config.get("tie_word_embeddings") and HEAD not in names:
            files.handles.pop(HEAD, None)
        check_layout(held.url, held.ranks, files.handles)
        places: dict[str, list[tuple[TensorPart, str]]] = {}
        for name in files.handles:
            place = part_of(name, names)
            assert place is not None
            places.setdefault(place.tensor, []).append((place, name))
        lines: list[str] = []
        dtype = held.dtype
        # The smallest first: most models differ in one of those already.
        for parts in sorted(places.values(), key=lambda parts: sum(files.sizes[name] for _, name in parts)):
            parts.sort(key=lambda part: part[0].part)
            dtype = _compared(files, parts, held, dtype, lines)
        holding = Holding(checksum_kind(held.device), dtype, files.head_dim)
        digest = combine(lines)
        check_unchanged(model, origin_of(model), digest)
        return digest, describe_holding(held.ranks, files.handles, holding)


def _opened(model: Path, stack: contextlib.ExitStack) -> ModelFiles:
    paths = weight_files(model)
    if not paths:
        raise ModelError(f"{model} holds no safetensors weights")
    config = read_json(model, "config.json")
    files = ModelFiles(model, config.get("text_config", config))
    try:
        for file in paths:
            files.open(file, stack)
    except Exception as error:  # safetensors has errors of its own
        raise ModelError(f"{model}: its weights cannot be read: {error}") from error
    return files


def _compared(
    files: ModelFiles, parts: list[tuple[TensorPart, str]], held: Held, dtype: str, lines: list[str]
) -> str:
    """Compare one of the engine's tensors, made of these parts; the type that it is in.

    Args:
        dtype: the type, if it is already known.
        lines: gets a line of the weights' digest for each part.
    """
    place = parts[0][0].tensor
    for guess in (dtype,) if dtype in DTYPES else DTYPES:
        if _checksums(files, parts, held, DTYPES[guess]) == [rank.tensors[place] for rank in held.ranks]:
            break
    else:
        raise EngineError(f"engine {held.url} holds another {place} than the weights compared with it")
    for _, name in parts:
        wide = files.tensor(name).float()
        if not torch.equal(wide.to(DTYPES[guess]).float(), wide):
            text = f"engine {held.url} holds {guess}, to which {name} was rounded: start it with "
            raise EngineError(text + "--dtype float32, which is what is trained")
        lines.append(line_of(name, wide))
    return guess


def _checksums(
    files: ModelFiles, parts: list[tuple[TensorPart, str]], held: Held, dtype: torch.dtype
) -> list[str]:
    """The expected checksum of the tensor on each rank."""
    growing = [CHECKSUMS[checksum_kind(held.device)]() for _ in held.ranks]
    for _, name in parts:
        tensor = files.tensor(name).to(dtype)
        for rank, checksum in zip(held.ranks, growing, strict=True):
            checksum.update(shard(name, tensor, rank.tp_rank, rank.tp_size, files.head_dim))
    return [checksum.hexdigest() for checksum in growing]


def answer(request: Json) -> Json:
    """Compare an engine with one directory after the other, until one matches.

    Args:
        request: `models` (paths), `url`, `device`, `dtype`, and `ranks`: `tp_rank`, `tp_size`,
            `tensors` each.

    Returns:
        `found`: `path`, `digest` and `held`, or null; `reasons`: path -> why it is not that one.
    """
    ranks = [RankChecksums(**rank) for rank in request["ranks"]]
    held = Held(request["url"], ranks, request["device"], request["dtype"])
    reasons: dict[str, str] = {}
    for path in request["models"]:
        try:
            digest, how = compare(Path(path), held)
        except (EngineError, ModelError) as error:
            reasons[path] = str(error)
            continue
        match = {"path": path, "digest": digest, "held": how}
        return {"found": match, "reasons": reasons}
    return {"found": None, "reasons": reasons}


def main() -> None:
    """Read a request from standard input, and write its `answer` to standard output."""
    torch.set_num_threads(1)
    sys.stdout.buffer.write(orjson.dumps(answer(orjson.loads(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    main()
