"""Bundles: an excerpt of a store in one file, to be sent to somebody and opened there.

A bundle is a tar archive that any tar can list, in a form that determines every byte: first its
manifest, then the manifest's sha256, then the files that the manifest names, in its order, then
zeros up to a whole record. It is read in one pass from front to end, into a folder of its own.
No byte is interpreted before it is known how many there may be, and any deviation from the
manifest is refused. Nothing in a bundle is executed.

The manifest bounds what a bundle may hold: names, kinds of files, numbers and sizes.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import orjson
from pydantic import TypeAdapter, ValidationError

from rollbook.store.cut import LANE_NAME
from rollbook.store.errors import FormatError, InterchangeError
from rollbook.store.interchange.destination import destination
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.safe_paths import place_inside
from rollbook.store.sealed.unit import MANIFEST as UNIT
from rollbook.store.sealed.unit import MARKS, MOST, TURNS, UNIT_NAME

_CHUNK = 1 << 20
_BLOCK, _RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE


def member_of(name: str, file: Path) -> Member:
    """How a file is named in a manifest.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as source:
        return Member(
            name, os.fstat(source.fileno()).st_size, hashlib.file_digest(source, "sha256").hexdigest()
        )


def write_bundle(out: Path, bundle: Bundle, files: Mapping[str, Path]) -> str:
    """Write a bundle, whole or not at all; returns its sha256 (hex).

    Args:
        files: where each of its members is.

    Raises:
        InterchangeError: something is at `out`, it cannot be written there, a file changed meanwhile, or no
            bundle may hold one.
    """
    manifest = manifest_bytes(bundle)
    if wrong := impossible(bundle):
        raise InterchangeError(f"step {bundle.step} of run {bundle.run!r} makes no bundle: {wrong}")
    with destination(out, folder=False) as temporary:
        make_empty(temporary)
        with temporary.open("wb") as file:
            target = _Written(file)
            for name, data in ((MANIFEST, manifest), (CHECK, _check(manifest))):
                target.add(header(name, len(data)))
                target.add(data)
                target.pad(_BLOCK)
            for member in bundle.members:
                _copy(member, files[member.name], target)
            target.add(bytes(2 * _BLOCK))
            target.pad(_RECORD)
    return target.digest.hexdigest()


def unpack_bundle(path: Path, folder: Path) -> Bundle:
    """Unpack a bundle's files into a folder, each checked; returns its manifest.

    Raises:
        InterchangeError: it is no bundle, is damaged or cut short, or holds what no bundle does. What was
            unpacked until then is left.
        FormatError: a newer Rollbook made it.
    """
    with _opened(path) as file:
        source = _Source(path, file)
        bundle, manifest = _manifest(source)
        whole = _size(bundle, manifest)
        if source.size != whole:
            less = "cut short: " if source.size < whole else ""
            raise refused(path, f"it is {less}{source.size:,} bytes, and its manifest tells of {whole:,}")
        for member in bundle.members:
            _unpack(source, member, folder)
        source.expect(bytes(whole - source.at), "its end")
    make_empty(folder / MANIFEST).write_bytes(manifest)
    return bundle


def header(name: str, size: int) -> bytes:
    """A file's header in a bundle, which follows entirely from the file's name and size."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _check(manifest: bytes) -> bytes:
    """What `sha256sum --check` reads."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _size(bundle: Bundle, manifest: bytes) -> int:
    """Bytes of a bundle with this manifest."""
    own = [(MANIFEST, len(manifest)), (CHECK, len(_check(manifest)))]
    sizes = [*own, *((member.name, member.bytes) for member in bundle.members)]
    files = sum(len(header(*entry)) + _padded(entry[1], _BLOCK) for entry in sizes)
    return _padded(files + 2 * _BLOCK, _RECORD)


# Writing ------------------------------------------------------------------------------------------


class _Written:
    """A file that is written from front to end, with its digest."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._size, self.digest = file, 0, hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Write some more."""
        self._file.write(data)
        self.digest.update(data)
        self._size += len(data)

    def pad(self, unit: int) -> None:
        """Write zeros up to a multiple."""
        self.add(bytes(-self._size % unit))


def _copy(member: Member, path: Path, target: _Written) -> None:
    target.add(header(member.name, member.bytes))
    digest, left = hashlib.sha256(), member.bytes
    with path.open("rb") as source:
        while left and (data := source.read(min(left, _CHUNK))):
            digest.update(data)
            target.add(data)
            left -= len(data)
    if left or digest.hexdigest() != member.sha256:
        raise InterchangeError(f"{path} changed while it was exported: export the step again")
    target.pad(_BLOCK)


# Reading ------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    except OSError as error:
        raise InterchangeError(f"{path} cannot be read: {error.strerror}; name a bundle's file") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InterchangeError(f"{path} is no plain file: name a bundle's file")
    with os.fdopen(fd, "rb") as file:
        yield file


class _Source:
    """A bundle that is read from front to end; any deviation from its manifest is refused."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file = path, file
        self.size, self.at = os.fstat(file.fileno()).st_size, 0

    def read(self, size: int) -> bytes:
        """So many bytes."""
        data = self._file.read(size)
        self.at += len(data)
        if len(data) != size:
            raise refused(self.path, f"it is cut short at byte {self.at:,}")
        return data

    def expect(self, wanted: bytes, what: str) -> None:
        """Read these bytes, and no others."""
        at = self.at
        if self.read(len(wanted)) != wanted:
            raise refused(self.path, f"it is damaged: {what}, at byte {at:,}, is not what its manifest tells")

    def skip_padding(self, size: int, what: str) -> None:
        """Read the zeros behind a file of this size."""
        self.expect(bytes(-size % _BLOCK), f"what follows {what}")

    def copy(self, size: int, take: Callable[[bytes], object]) -> str:
        """Hand out so many bytes, some at a time; their sha256 (hex)."""
        digest, left = hashlib.sha256(), size
        while left:
            data = self.read(min(left, _CHUNK))
            digest.update(data)
            take(data)
            left -= len(data)
        return digest.hexdigest()


def _manifest(source: _Source) -> tuple[Bundle, bytes]:
    """Read the manifest and its checksum file; the manifest, and its bytes."""
    first = source.read(min(_BLOCK, source.size))
    try:
        size = tarfile.TarInfo.frombuf(first, "utf-8", "surrogateescape").size
    except tarfile.HeaderError as error:
        raise refused(source.path, "it is no bundle of Rollbook, or damaged at its beginning") from error
    if not 0 < size <= MANIFEST_BYTES or first != header(MANIFEST, size):
        raise refused(source.path, f"it is no bundle of Rollbook: it does not begin with {MANIFEST}")
    data = source.read(size)
    source.skip_padding(size, MANIFEST)
    source.expect(header(CHECK, len(_check(data))), f"the header of {CHECK}")
    source.expect(_check(data), f"the sha256 of {MANIFEST}")
    source.skip_padding(len(_check(data)), CHECK)
    bundle = parse_bundle(data, source.path)
    return bundle, data


def _unpack(source: _Source, member: Member, folder: Path) -> None:
    source.expect(header(member.name, member.bytes), f"the header of {member.name}")
    target = place_inside(folder, member.name)
    make_folder(target.parent)
    with make_empty(target).open("wb") as file:
        digest = source.copy(member.bytes, file.write)
    if digest != member.sha256:
        raise refused(source.path, f"it is damaged: {member.name} has another sha256 than its manifest tells")
    source.skip_padding(member.bytes, member.name)


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
        store: id of the store that it was made from.
        cut: that the step was planned at.
        policy_version, from_version: the version that the step began with, and that of the
            checkpoint in the bundle, if there is one.
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
    """Parse and check a manifest; `path` is for messages.

    Raises:
        FormatError: a newer Rollbook made it.
        InterchangeError: the bytes are no manifest, or describe what no bundle may hold.
    """
    try:
        values: Any = orjson.loads(data)
        if isinstance(values, dict) and isinstance(values.get("bundle"), int) and values["bundle"] > FORMAT:
            raise FormatError(f"{path} is a bundle of format {values['bundle']}: update rollbook to open it")
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
    """The error for a file that is no bundle, or must not be opened."""
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
        return all(_NAME.fullmatch(folder) for folder in folders) and of_model(file)
    return False


def of_model(name: str) -> bool:
    """Whether a file of a checkpoint's folder goes into bundles, by its name."""
    return _OF_MODEL.fullmatch(name) is not None


def impossible(bundle: Bundle) -> str | None:
    """The first entry of a manifest that no bundle can have: names become paths, and numbers become
    sizes."""
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
        description = f"it goes from version {bundle.from_version} up to stage {bundle.up_to}"
        return f"its manifest says that {description}, {'with' if weights else 'without'} weights"
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
