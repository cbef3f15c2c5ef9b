"""What a bundle says of itself, and what it may hold: names, kinds of files, numbers and sizes. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from rollbook.store.cut import LANE_NAME
from rollbook.store.errors import FormatError, InterchangeError
from rollbook.store.sealed.unit import MANIFEST as UNIT
from rollbook.store.sealed.unit import MARKS, MOST, TURNS, UNIT_NAME

FORMAT = 1
MANIFEST, CHECK = "BUNDLE.json", "BUNDLE.sha256"
MANIFEST_BYTES = 16 << 20
MOST_MEMBERS = 8192
"""A checkpoint of shards has a file or two per rank; a sealed lane has three."""
OPTIMIZER, WEIGHTS = "optimizer", "weights"
"""What a bundle may be without; without weights it has no optimizer either."""
LAST_WITHOUT_WEIGHTS = ("advantages", "losses")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[^./\\\0-\x1f\x7f][^/\\\0-\x1f\x7f]{0,254}")
_OF_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.(safetensors|json|jinja|txt)|tokenizer\.model")
"""Files of a checkpoint that are read and never run: no pickles (`.bin`, `.pt`), and no code."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file of a bundle, by its name in the store that the bundle opens as."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The manifest of a bundle: which step it is of, and what is in it.

    Attributes:
        bundle: its format.
        rollbook: the release that made it.
        store: id of the store that it was made of.
        cut: that the step was planned at.
        policy_version, from_version: that the step began with; and that of the checkpoint in it, if one is.
        steps: that are run again, the last of them the bundle's own.
        head: where its lanes end.
        events, trajectories: that it holds.
        redacted: whether it was made without text.
        without: what of the checkpoint was left out: nothing, `OPTIMIZER`, or `WEIGHTS`.
        up_to: without weights, the last stage that can be proven; None: all can.
    """

    bundle: int
    rollbook: str
    store: str
    run: str
    policy: str
    step: int
    attempt: int
    cut: str
    policy_version: int
    from_version: int | None
    steps: tuple[int, ...]
    head: str
    events: int
    trajectories: int
    redacted: bool
    without: tuple[str, ...]
    up_to: str | None
    members: tuple[Member, ...]


_ADAPTER = TypeAdapter(Bundle)


def manifest_bytes(bundle: Bundle) -> bytes:
    """The manifest as it is stored: JSON."""
    return orjson.dumps(asdict(bundle), option=orjson.OPT_INDENT_2)


def parse_bundle(data: bytes, path: object) -> Bundle:
    """The manifest that these bytes are; `path` is for messages.

    Raises:
        FormatError: a newer Rollbook made it.
        InterchangeError: they are no manifest, or one of what no bundle holds.
    """
    try:
        said: Any = orjson.loads(data)
        if isinstance(said, dict) and isinstance(said.get("bundle"), int) and said["bundle"] > FORMAT:
            raise FormatError(f"{path} is a bundle of format {said['bundle']}: update rollbook to open it")
        bundle = _ADAPTER.validate_json(data, strict=True)
    except orjson.JSONDecodeError as error:
        raise refused(path, f"its manifest is no JSON: {error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()[:3])
        raise refused(path, f"its manifest cannot be read: {problems}") from error
    if wrong := impossible(bundle):
        raise refused(path, wrong)
    return bundle


def refused(path: object, why: str) -> InterchangeError:
    """The error for a file that is no bundle, or none to be opened."""
    return InterchangeError(
        f"{path} is not opened: {why}; have it sent again, or make it anew (rollbook replay export step)"
    )


def may_hold(name: str) -> bool:
    """Whether a bundle may hold a file of this name: one of a sealed unit, or data of a checkpoint."""
    parts = name.split("/")
    if parts[0] == "sealed" and len(parts) == 4:
        _, lane, unit, file = parts
        known = file in (UNIT, TURNS, MARKS)
        return bool(LANE_NAME.fullmatch(lane) and UNIT_NAME.fullmatch(unit)) and known
    if parts[0] == "checkpoints" and len(parts) == 5:
        *folders, file = parts[1:]
        return all(_NAME.fullmatch(one) for one in folders) and of_model(file)
    return False


def of_model(name: str) -> bool:
    """Whether a file of a checkpoint's folder goes into bundles, by its name."""
    return _OF_MODEL.fullmatch(name) is not None


def impossible(bundle: Bundle) -> str | None:
    """The first thing in a manifest that no bundle has: names become paths, and numbers become sizes."""
    numbers = [getattr(bundle, field.name) for field in fields(bundle) if field.type == "int"]
    numbers += bundle.steps if bundle.from_version is None else (bundle.from_version, *bundle.steps)
    if not all(0 <= number <= MOST for number in numbers):
        return "its manifest has a number that no bundle has"
    if bundle.steps[-1:] != (bundle.step,):
        return f"its manifest is of step {bundle.step}, and of steps {list(bundle.steps)} to be run"
    if bundle.without not in ((), (OPTIMIZER,), (WEIGHTS,)):
        return f"its manifest leaves out {', '.join(bundle.without)}, which no bundle does"
    weights = WEIGHTS not in bundle.without
    stages = (None,) if weights else LAST_WITHOUT_WEIGHTS
    if bundle.up_to not in stages or (bundle.from_version is None) is weights:
        said = f"it goes from version {bundle.from_version} up to stage {bundle.up_to}"
        return f"its manifest says that {said}, {'with' if weights else 'without'} weights"
    if not 0 < len(bundle.members) <= MOST_MEMBERS:
        return f"it has {len(bundle.members):,} files, and a bundle has 1 to {MOST_MEMBERS:,}"
    seen: set[str] = set()
    for member in bundle.members:
        if not may_hold(member.name):
            return f"it holds {member.name!r}, which no bundle does"
        if member.name.casefold() in seen:
            return f"it holds {member.name!r} twice"
        seen.add(member.name.casefold())
        if not (0 <= member.bytes <= MOST and _SHA256.fullmatch(member.sha256)):
            return f"its manifest has {member.bytes} bytes of sha256 {member.sha256[:80]!r} for {member.name}"
    return None
