"""Whether an engine holds a model directory's weights: compares its checksums with those of the files.

It is a program, so that the proxy needs neither torch nor the memory: one tensor is in memory at
a time, and the comparison ends at the first that differs. Its request comes as JSON on standard
input, see `main`.

The checksums that an engine must report: computed while weights are sent to it, or later from
the weights alone.

An engine's checksum of a merged tensor is over the bytes of its parts in order, so the expected
one is computed as the parts pass by, and no second copy of the weights is needed.

Where a checkpoint's tensors lie in an engine.

An engine merges some tensors (SGLang: `qkv_proj` is the rows of q, k and v), pads vocabularies and splits
tensors among its tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open

from rollbook.engines.model_files import check_unchanged, origin_of, read_json, weight_files
from rollbook.engines.weights.digests import line_of
from rollbook.engines.weights.rank_checksums import RankChecksums, ranks_digest
from rollbook.engines.weights.tensor_checksums import CHECKSUMS, Checksum, checksum_kind
from rollbook.store.digest import combine, is_tree
from rollbook.store.errors import EngineError, FormatError, ModelError
from rollbook.store.events import Json

VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embeddings to a multiple of this, with zeros; times the ranks if those need it."""

_EXPERT = re.compile(r"(?P<mlp>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_PARTS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
MERGED = frozenset({"qkv_proj", "gate_up_proj", "w13_weight", "w2_weight"})
"""What SGLang calls tensors that several of a model's are merged into."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where a checkpoint's tensor lies: the engine's tensor, and which of its parts it is, from 0."""

    tensor: str
    part: int


def part_of(name: str, held: frozenset[str]) -> TensorPart | None:
    """Where a tensor lies in an engine that holds tensors of these names; None if it has no place there."""
    if name in held:
        return TensorPart(name, 0)
    merged = _merged(name)
    return merged[1] if merged is not None and merged[1].tensor in held else None


def place_of(name: str, merged: Collection[str]) -> TensorPart:
    """Where a tensor lies in an engine that merges tensors into those named here (some of `MERGED`)."""
    merged_place = _merged(name)
    return TensorPart(name, 0) if merged_place is None or merged_place[0] not in merged else merged_place[1]


def merged_in(names: Iterable[str], held: frozenset[str]) -> list[str] | None:
    """The tensors of `MERGED` that an engine has if it holds tensors of these names for a model's `names`.

    None if `place_of` does not give the names that it holds.
    """
    names = list(names)
    merged = sorted({f[0] for name in names if (f := _merged(name)) is not None and f[1].tensor in held})
    return merged if {place_of(name, merged).tensor for name in names} == held else None


def _merged(name: str) -> tuple[str, TensorPart] | None:
    """The engine's tensor that this one may be merged into, and its place in there."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        number, part = int(expert["expert"]), expert["part"]
        if part == "down_proj":
            return "w2_weight", TensorPart(f"{expert['mlp']}.w2_weight", number)
        return "w13_weight", TensorPart(f"{expert['mlp']}.w13_weight", 2 * number + (part == "up_proj"))
    module, _, kind = name.rpartition(".")
    parent, _, projection = module.rpartition(".")
    if projection not in _PARTS:
        return None
    merged, number = _PARTS[projection]
    return merged, TensorPart(f"{parent}.{merged}.{kind}", number)


def shard(
    name: str, tensor: torch.Tensor, rank: int, size: int, head_dim: int, *, padded: bool = True
) -> torch.Tensor:
    """A rank's part of a tensor, as SGLang's loaders cut it.

    If there are fewer key and value heads than ranks, several ranks hold the same one.
    """
    projection = name.split(".")[-2] if "." in name else name
    if padded and projection in ("embed_tokens", "lm_head"):
        tensor = _padded(tensor, size)
    if size == 1:
        return tensor
    if projection in ("k_proj", "v_proj") and tensor.shape[0] // head_dim < size:
        heads = tensor.shape[0] // head_dim
        head = rank * heads // size
        return tensor[head * head_dim : (head + 1) * head_dim]
    if projection in _BY_ROWS:
        return tensor.chunk(size, 0)[rank]
    return tensor.chunk(size, 1)[rank] if projection in _BY_COLUMNS and tensor.dim() > 1 else tensor


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """An embedding, padded with zero rows as SGLang does."""
    rows = tensor.shape[0]
    missing = -rows % VOCABULARY_MULTIPLE
    if (rows + missing) % size:
        missing = -rows % (VOCABULARY_MULTIPLE * size)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def check_layout(url: str, ranks: Sequence[RankChecksums], names: Iterable[str]) -> None:
    """Check that every tensor of a model has its place in an engine, and every place its tensors.

    Raises:
        EngineError: it holds another model, or the names are fused; the first that differ are
            named.
    """
    names = list(names)
    for rank in ranks:
        held = frozenset(rank.tensors)
        places = {name: part_of(name, held) for name in names}
        homeless = sorted(name for name, place in places.items() if place is None)
        if homeless:
            raise EngineError(
                f"engine {url} holds no tensor that {homeless[0]} goes into ({len(homeless)} of {len(names)} "
                "have no place), and would skip it silently; is it another model's, or are the names fused?"
            )
        empty = sorted(held - {place.tensor for place in places.values() if place is not None})
        if empty:
            raise EngineError(
                f"engine {url} holds {empty[0]}, which the model has not ({len(empty)} of {len(held)}): it "
                "serves another model"
            )


HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine reports that it holds: checksums, on which device, and in which type (or `auto`); and
    whether the digest of such weights is to be by blocks."""

    url: str
    ranks: Sequence[RankChecksums]
    device: str
    dtype: str
    trees: bool = True


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
        origin, dtype = origin_of(model), held.dtype
        kinds = {held.trees} if origin is None else {held.trees, is_tree(origin.digest)}
        lines: dict[bool, list[str]] = {tree: [] for tree in kinds}
        # The smallest first: most models differ in one of those already.
        for parts in sorted(places.values(), key=lambda parts: sum(files.sizes[name] for _, name in parts)):
            parts.sort(key=lambda part: part[0].part)
            dtype = _compared(files, parts, held, dtype, lines)
        holding = Holding(checksum_kind(held.device), dtype, files.head_dim)
        digests = {tree: combine(of_kind, tree=tree) for tree, of_kind in lines.items()}
        if origin is not None:
            check_unchanged(model, origin, digests[is_tree(origin.digest)])
        return digests[held.trees], describe_holding(held.ranks, files.handles, holding)


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
    files: ModelFiles,
    parts: list[tuple[TensorPart, str]],
    held: Held,
    dtype: str,
    lines: dict[bool, list[str]],
) -> str:
    """Compare one of the engine's tensors, made of these parts; the type that it is in.

    Args:
        dtype: the type, if it is already known.
        lines: of the weights' digest by blocks (True), or of bytes (False): those asked for get one for each
            part.
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
        for tree, of_kind in lines.items():
            of_kind.append(line_of(name, wide, tree=tree))
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
        request: `models` (paths), `url`, `device`, `dtype`, `trees`, and `ranks`: `tp_rank`, `tp_size`,
            `tensors` each.

    Returns:
        `found`: `path`, `digest` and `held`, or null; `reasons`: path -> why it is not that one.
    """
    ranks = [RankChecksums(**rank) for rank in request["ranks"]]
    held = Held(request["url"], ranks, request["device"], request["dtype"], request["trees"])
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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that an engine may hold weights in."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How an engine holds tensors, whatever their names.

    Attributes:
        checksum: the kind that it computes, of `CHECKSUMS`.
        dtype: that it holds tensors in, of `DTYPES`.
        head_dim: of the model's attention.
        padded: whether it pads vocabularies, as SGLang does.
    """

    checksum: str
    dtype: str
    head_dim: int
    padded: bool = True


@dataclass(slots=True)
class _Growing:
    """An incremental checksum of an engine's tensor whose parts come one by one, in any order."""

    checksum: Checksum
    parts: int = 0
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, part: int, tensor: torch.Tensor) -> None:
        if part != self.parts:
            # A copy: what waits may lie in a buffer that is filled again before its turn comes.
            self.waiting[part] = tensor.clone()
            return
        self.checksum.update(tensor)
        self.parts += 1
        while (ready := self.waiting.pop(self.parts, None)) is not None:
            self.checksum.update(ready)
            self.parts += 1


@dataclass(slots=True)
class _Rank:
    """Incremental checksums of what a tensor-parallel rank holds."""

    rank: int
    size: int
    holding: Holding
    growing: dict[str, _Growing] = field(default_factory=dict)

    def add(self, place: TensorPart, name: str, tensor: torch.Tensor) -> None:
        """Add a whole tensor that belongs to this place."""
        holding = self.holding
        if place.tensor not in self.growing:
            self.growing[place.tensor] = _Growing(CHECKSUMS[holding.checksum]())
        part = shard(name, tensor, self.rank, self.size, holding.head_dim, padded=holding.padded)
        self.growing[place.tensor].add(place.part, part.to(DTYPES[holding.dtype]))

    def whole(self) -> dict[str, str]:
        """The checksums of all tensors without parts that still wait for an earlier one."""
        return {
            name: growing.checksum.hexdigest()
            for name, growing in self.growing.items()
            if not growing.waiting
        }


class Expected:
    """The checksums that an engine must report after a sync, computed as tensors pass by.

    Engines that hold the same tensors, cut and hashed in the same way, share one.

    Args:
        ranks: the engine's checksums before the sync, for the names of its tensors.
        holding: how it holds them.
    """

    def __init__(self, ranks: Sequence[RankChecksums], holding: Holding) -> None:
        self._ranks = [_Rank(rank.tp_rank, rank.tp_size, holding) for rank in ranks]
        self._names = [frozenset(rank.tensors) for rank in ranks]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is sent.

        Raises:
            EngineError: the engine has no place for it, and would silently ignore it.
        """
        for rank, names in zip(self._ranks, self._names, strict=True):
            place = part_of(name, names)
            if place is None:
                text = f"holds no tensor that {name} goes into, and would skip it silently"
                raise EngineError(text + "; is it another model's, or are the names fused?")
            rank.add(place, name, tensor)

    def check(self, url: str, ranks: Sequence[RankChecksums]) -> None:
        """Compare with what the engine at `url` reports now.

        Raises:
            EngineError: a tensor differs from the one sent, or was never sent; the first is
                named.
        """
        if len(ranks) != len(self._ranks):
            text = f"engine {url}: {len(ranks)} ranks answer, {len(self._ranks)} did before the sync"
            raise EngineError(text)
        for rank, own in zip(ranks, self._ranks, strict=True):
            wanted = own.whole()
            wrong = sorted(n for n, value in wanted.items() if rank.tensors.get(n) != value)
            unsent = sorted(set(rank.tensors) - set(wanted))
            if wrong:
                text = f"{len(wrong)} of {len(wanted)} tensors are not those sent, such as {wrong[0]}"
            elif unsent:
                text = f"{len(unsent)} tensors were not sent whole, such as {unsent[0]}"
            else:
                continue
            raise EngineError(f"engine {url}, rank {rank.tp_rank}: verification failed: {text}")


def describe_holding(ranks: Sequence[RankChecksums], names: Iterable[str], holding: Holding) -> Json | None:
    """How an engine holds a model's tensors, in the form of `policy.activated` that
    `expected_ranks_digest` reads.

    Args:
        ranks: its checksums, for the names of its tensors.
        names: of the model's tensors.

    Returns:
        `holding` and the engine's `tp_size`, `tp_ranks` and `merged`; None where its tensors
        have other names than follow from those of the model, or not the same ones on all ranks.
    """
    held, sizes = {frozenset(rank.tensors) for rank in ranks}, {rank.tp_size for rank in ranks}
    if len(held) != 1 or len(sizes) != 1 or (merged := merged_in(names, *held)) is None:
        return None
    ranks_held = {
        "tp_size": sizes.pop(),
        "tp_ranks": sorted({rank.tp_rank for rank in ranks}),
        "merged": merged,
    }
    return asdict(holding) | ranks_held


def expected_ranks_digest(tensors: Iterable[tuple[str, torch.Tensor]], held: Json) -> str:
    """The `ranks_digest` of an engine that holds exactly these tensors.

    Args:
        tensors: all of a model's, by Hugging Face names, one at a time. None is kept, except
            parts of a merged tensor that come before their turn.
        held: how the engine holds them, as in `policy.activated`.

    Raises:
        FormatError: this release does not know the form, or it does not fit these tensors.
    """
    ranks, merged = _read(held)
    for name, tensor in tensors:
        place = place_of(name, merged)
        try:
            for rank in ranks:
                rank.add(place, name, tensor)
        except IndexError as error:
            text = f"{name} of shape {list(tensor.shape)} is not held by {len(ranks)} ranks: held is {held}"
            raise FormatError(f"{text}; were these weights of another model?") from error
    return ranks_digest([RankChecksums(filled.rank, filled.size, filled.whole()) for filled in ranks])


def _read(held: Json) -> tuple[list[_Rank], frozenset[str]]:
    """The ranks, still empty, and the merged tensors."""
    try:
        holding = Holding(held["checksum"], held["dtype"], held["head_dim"], held["padded"])
        size, merged = held["tp_size"], frozenset(held["merged"])
        ranks = [_Rank(rank, size, holding) for rank in held["tp_ranks"]]
        known = holding.checksum in CHECKSUMS and holding.dtype in DTYPES and merged <= MERGED
        known = known and holding.head_dim > 0 and all(rank.rank in range(size) for rank in ranks)
    except (KeyError, TypeError):
        known = False
    if not known:
        raise FormatError(
            f"an engine's tensors are held as {held}, which this release does not know: read the store with "
            "the release that wrote it, or a newer one"
        )
    return ranks, merged


if __name__ == "__main__":
    main()
