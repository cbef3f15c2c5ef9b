"""Checks, before any tensor is sent, whether an engine can load a policy's tensors, and how it holds them.

SGLang's scheduler dies of a tensor of another shape, in the middle of a version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollbook.engines.sglang.protocol import release_of
from rollbook.engines.weights.expected import Holding
from rollbook.engines.weights.rank_checksums import RankChecksums
from rollbook.engines.weights.tensor_checksums import checksum_kind
from rollbook.engines.weights.tensor_layout import check_layout
from rollbook.store.errors import EngineError, ModelError
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.sync.control import EMBEDDED, SESSIONS_SINCE, EngineInfo
from rollbook.train.sync.transports import FromDisk

EXACT = "float32"
"""The type that holds whatever is trained; an engine's checksums are of the type that it holds."""
BUILDS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tied", "experts")
"""Fields of a model's shape that determine the shapes of its tensors."""


def check_fits(
    url: str,
    info: EngineInfo,
    ranks: Sequence[RankChecksums],
    names: Sequence[str],
    shape: ModelShape | None,
    dtype: str,
) -> None:
    """Compare an engine with what it is to be sent: names, types and shapes.

    An engine reports the names and the type of its tensors, but not their shapes. Those follow from its
    model's configuration; if that cannot be read from here, shapes are not compared.

    Args:
        dtype: of what it is sent.

    Raises:
        EngineError: it is of another model, or of another type; the first difference is named.
    """
    if names:
        check_layout(url, ranks, names)
    if info.kind == EMBEDDED:
        return  # it refuses a tensor that does not fit without damage
    if info.dtype not in ("", "auto", EXACT, dtype):
        raise EngineError(
            f"engine {url} holds its weights in {info.dtype}, and those that are trained are {dtype}: they "
            f"would be rounded, and what it samples would be another policy. Start it with --dtype {dtype}"
        )
    held = _shape_of(info)
    if shape is None or held is None:
        return
    odd = [name for name in BUILDS if getattr(held, name) != getattr(shape, name)]
    if odd:
        shown = ", ".join(f"{name} {getattr(held, name)}, not {getattr(shape, name)}" for name in odd)
        raise EngineError(f"engine {url} serves a model of another shape ({info.model_path}): {shown}")


def _shape_of(info: EngineInfo) -> ModelShape | None:
    """The shape of its model, None where its directory is not on this host, or of no kind that is trained."""
    path = Path(info.model_path)
    if not path.is_absolute() or not (path / "config.json").is_file():
        return None
    try:
        return read_shape(path)
    except ModelError:
        return None  # the names have been compared


def holding(info: EngineInfo, head_dim: int, dtype: str) -> Holding:
    """How an engine will hold what it is sent.

    Args:
        head_dim: of the model's attention.
        dtype: of what it is sent.
    """
    # The embedded engine hashes as on a CPU, whatever its device, and pads nothing.
    own = info.kind == EMBEDDED
    # It widens what it is sent, and SGLang what is narrower than its own type.
    wide = own or info.dtype == EXACT
    kind = checksum_kind("cpu" if own else info.device)
    return Holding(kind, EXACT if wide else dtype, head_dim, padded=not own)


def check_transport(url: str, info: EngineInfo, transport: str) -> None:
    """Check that an engine knows how weights come to it.

    Raises:
        EngineError: it is too old.
    """
    found = release_of(info.version)
    too_old = info.kind != EMBEDDED and found is not None and found < (release_of(SESSIONS_SINCE) or ())
    if transport != FromDisk.name and too_old:
        raise EngineError(
            f"engine {url}: SGLang {info.version} takes no weights by {transport}: use {SESSIONS_SINCE} or "
            'newer, or transport = "disk"'
        )
