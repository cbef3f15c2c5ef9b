"""Bundles as files: each byte is what its manifest tells, and nothing else is unpacked."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollbook.store.errors import FormatError, InterchangeError
from rollbook.store.interchange.bundle import (
    MOST_MEMBERS,
    Bundle,
    Member,
    may_hold,
    member_of,
    unpack_bundle,
    write_bundle,
)

CHECKPOINT = "checkpoints/demo/actor/v00000009"
UNIT = "sealed/serve/00000001-00000001.1"
CONTENT = {
    f"{UNIT}/UNIT.json": b"{}",
    f"{UNIT}/marks.parquet": bytes(range(256)) * 5,
    f"{CHECKPOINT}/config.json": b"",
    f"{CHECKPOINT}/model.safetensors": b"w" * 512,
}
BARE = Bundle(
    *(
        1,
        "0.1.0",
        "store-id",
        "demo",
        "actor",
        10,
        1,
        "serve=3",
        10,
        9,
        (9, 10),
        "serve=5",
        4,
        2,
        False,
        (),
        None,
        (),
    )
)
Made = tuple[Path, Bundle]


def _members(content: dict[str, bytes]) -> tuple[Member, ...]:
    return tuple(Member(n, len(data), hashlib.sha256(data).hexdigest()) for n, data in content.items())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A bundle of four small files."""
    folder = tmp_path_factory.mktemp("bundle")
    files = {}
    for i, (name, data) in enumerate(CONTENT.items()):
        files[name] = folder / str(i)
        files[name].write_bytes(data)
    bundle = replace(BARE, members=tuple(member_of(name, path) for name, path in files.items()))
    out = folder / "made.rollbook"
    assert write_bundle(out, bundle, files) == hashlib.sha256(out.read_bytes()).hexdigest()
    return out, bundle


def _tar(entries: Sequence[tuple[str, bytes]], kind: bytes = tarfile.REGTYPE) -> bytes:
    """An archive as Python's library writes it, with what a bundle's headers have; the last is of a kind."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for at, (name, data) in enumerate(entries):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o600
            if at == len(entries) - 1 and kind != tarfile.REGTYPE:
                info.type, info.linkname, info.size = kind, "/etc/passwd", 0
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _archive(manifest: bytes, content: Sequence[tuple[str, bytes]], kind: bytes = tarfile.REGTYPE) -> bytes:
    """An archive like a bundle, of any manifest and any files."""
    check = f"{hashlib.sha256(manifest).hexdigest()}  BUNDLE.json\n".encode()
    return _tar([("BUNDLE.json", manifest), ("BUNDLE.sha256", check), *content], kind)


def _manifest(listed: Sequence[Member] = _members(CONTENT), **changes: Any) -> bytes:
    return orjson.dumps(asdict(replace(BARE, members=tuple(listed))) | changes, option=orjson.OPT_INDENT_2)


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., str]:
    """Opens these bytes as a bundle, which must be refused; what is said. Nothing else is written."""

    def attempt(data: bytes, error: type[Exception] = InterchangeError) -> str:
        file, folder = tmp_path / "hostile.rollbook", tmp_path / "into"
        file.write_bytes(data)
        folder.mkdir(exist_ok=True)
        with pytest.raises(error) as raised:
            unpack_bundle(file, folder)
        assert {path.name for path in tmp_path.iterdir()} == {"hostile.rollbook", "into"}
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert all(map(may_hold, files)), files
        return str(raised.value)

    return attempt


# As it should be ----------------------------------------------------------------------------------


def test_what_was_packed_is_unpacked(made: Made, tmp_path: Path) -> None:
    """Each file has its bytes, is its owner's alone, and the manifest is beside them."""
    path, bundle = made
    assert unpack_bundle(path, tmp_path / "into") == bundle
    files = {str(p.relative_to(tmp_path / "into")): p for p in (tmp_path / "into").rglob("*") if p.is_file()}
    assert {name: p.read_bytes() for name, p in files.items() if name != "BUNDLE.json"} == CONTENT
    assert orjson.loads(files["BUNDLE.json"].read_bytes()) == orjson.loads(orjson.dumps(asdict(bundle)))
    assert {p.stat().st_mode & 0o777 for p in [*files.values(), path]} == {0o600}


def test_it_is_what_tar_makes(made: Made) -> None:
    """A bundle is, byte for byte, the archive that Python's own library makes of the same files."""
    path, bundle = made
    assert path.read_bytes() == _archive(_manifest(bundle.members), list(CONTENT.items()))


def test_keys_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    """A later release of this format may tell more."""
    file = tmp_path / "later.rollbook"
    file.write_bytes(_archive(_manifest(more="told"), list(CONTENT.items())))
    assert unpack_bundle(file, tmp_path / "into").step == 10


def test_nothing_is_overwritten_or_left_behind(made: Made, tmp_path: Path) -> None:
    """A file that is there stays; of an export whose file changed meanwhile nothing is left."""
    path, bundle = made
    (tmp_path / "there").write_bytes(b"mine")
    files = {m.name: path.parent / str(i) for i, m in enumerate(bundle.members)}
    with pytest.raises(InterchangeError, match="exists"):
        write_bundle(tmp_path / "there", bundle, files)
    (tmp_path / "other").write_bytes(b"v" * 512)
    with pytest.raises(InterchangeError, match="changed while it was exported"):
        write_bundle(tmp_path / "new", bundle, files | {bundle.members[-1].name: tmp_path / "other"})
    bad = replace(bundle, members=(replace(bundle.members[0], name="../x"),))
    with pytest.raises(InterchangeError, match=r"makes no bundle: it holds '../x'"):
        write_bundle(tmp_path / "new", bad, {"../x": path})
    assert (tmp_path / "there").read_bytes() == b"mine"
    assert {p.name for p in tmp_path.iterdir()} == {"there", "other"}


# Damaged ------------------------------------------------------------------------------------------


def test_every_length_but_its_own_is_refused(made: Made, refuse: Callable[..., str]) -> None:
    """Cut short at any byte, or with a byte more: refused, before anything is unpacked."""
    data = made[0].read_bytes()
    for length in range(0, len(data), 61):
        message = refuse(data[:length])
        assert "cut short" in message or "no bundle" in message
    assert f"it is {len(data) + 1:,} bytes" in refuse(data + b"\0")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 1 << 20), bit=st.integers(0, 7))
@example(place=0, bit=0)
@example(place=-1, bit=7)
def test_every_flipped_bit_is_found(made: Made, refuse: Callable[..., str], place: int, bit: int) -> None:
    """One bit anywhere: in a header, the manifest, a file, what pads it, or the zeros at the end."""
    data = bytearray(made[0].read_bytes())
    data[place % len(data)] ^= 1 << bit
    refuse(bytes(data), (InterchangeError, FormatError))  # type: ignore[arg-type]


# Hostile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "/etc/cron.d/x",
        "../../x.json",
        "checkpoints/../../x.json",
        "checkpoints/demo/actor/../x.json",
        "checkpoints/demo/actor/..",
        "checkpoints/demo/.hidden/v1/config.json",
        "checkpoints/demo/actor/v1/deeper/config.json",
        "checkpoints/demo/actor/v1/pytorch_model.bin",
        "checkpoints/demo/actor/v1/optimizer.pt",
        "checkpoints/demo/actor/v1/x.pkl",
        "checkpoints/demo/actor/v1/modeling.py",
        "checkpoints/demo/actor/v1/.config.json",
        "checkpoints/demo/actor/v1/a\\b.json",
        "checkpoints/de\nmo/actor/v1/config.json",
        "checkpoints/demo/actor\0/v1/config.json",
        "checkpoints//actor/v1/config.json",
        "sealed/serve/00000001-00000001.1/run.sh",
        "sealed/serve/UPLOADING",
        "sealed/../serve/00000001-00000001.1/UNIT.json",
        "sealed/SERVE/00000001-00000001.1/UNIT.json",
        "lanes/serve/00000001.wal",
        "STORE.json",
        "store.toml",
        "BUNDLE.json",
        "SECRET",
        "",
    ],
)
def test_other_names_are_refused(refuse: Callable[..., str], name: str) -> None:
    """What leads out of the folder, is code or a pickle, or is no file of an excerpt."""
    content = {**CONTENT, name: b"x"}
    data = _archive(_manifest(_members(content)), [*CONTENT.items(), (name.replace("\0", "") or "x", b"x")])
    assert "which no bundle does" in refuse(data)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(refuse: Callable[..., str], kind: bytes) -> None:
    """In the place of a file that the manifest names: its header is not that of a file."""
    content = {**CONTENT, f"{CHECKPOINT}/a.json": b""}
    message = refuse(_archive(_manifest(_members(content)), list(content.items()), kind))
    assert f"the header of {CHECKPOINT}/a.json" in message


def test_a_name_twice_is_refused(refuse: Callable[..., str]) -> None:
    """Also in other letters, which are the same on some disks."""
    for name in (f"{CHECKPOINT}/config.json", f"{CHECKPOINT}/CONFIG.json"):
        members = (*_members(CONTENT), *_members({name: b""}))
        assert "twice" in refuse(_archive(_manifest(members), [*CONTENT.items(), (name, b"")]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bytes": 1 << 60}, "its manifest has"),
        ({"bytes": -1}, "its manifest has"),
        ({"bytes": 1 << 47}, "cut short"),
        ({"bytes": 700}, "the header of"),
        ({"sha256": "0" * 64}, "another sha256"),
        ({"sha256": "../../x"}, "its manifest has"),
        ({"name": f"{CHECKPOINT}/other.json"}, "the header of"),
    ],
)
def test_a_member_that_is_not_as_told(refuse: Callable[..., str], changes: Any, reason: str) -> None:
    """Sizes, digests and names that lie: no more is read or written than the file has."""
    *others, last = _members(CONTENT)
    assert reason in refuse(_archive(_manifest([*others, replace(last, **changes)]), list(CONTENT.items())))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": "ten"}, "step Input should be a valid integer"),
        ({"events": True}, "events Input should be a valid integer"),
        ({"policy_version": -1}, "a number that no bundle has"),
        ({"steps": [9]}, "of step 10, and of steps [9]"),
        ({"steps": [-(1 << 62), 10]}, "a number that no bundle has"),
        ({"without": ["tokens"]}, "leaves out tokens"),
        ({"without": ["weights"]}, "goes from version 9 up to stage None, without weights"),
        ({"without": ["weights"], "from_version": None, "up_to": "weights"}, "up to stage weights"),
        ({"from_version": -1}, "a number that no bundle has"),
        ({"members": []}, "it has 0 files"),
        ({"members": [asdict(_members(CONTENT)[0])] * (MOST_MEMBERS + 1)}, "8,193 files"),
        ({"members": None}, "members Input should be a valid"),
    ],
)
def test_a_manifest_of_no_bundle(refuse: Callable[..., str], changes: Any, reason: str) -> None:
    """Values of other types, impossible numbers, too many files."""
    assert reason in refuse(_archive(_manifest(**changes), list(CONTENT.items())))


def test_a_newer_format_and_other_files(refuse: Callable[..., str], tmp_path: Path) -> None:
    """A newer bundle says so; what is no bundle, no JSON or no file is refused; a pipe is not waited for."""
    newer = _archive(orjson.dumps({"bundle": 2, "all": "else is other"}), [])
    assert "update rollbook" in refuse(newer, FormatError)
    for data in (b"", b"hello", bytes(20_480), b"PK\x03\x04" * 300, _tar([("x", b"")])):
        assert "no bundle of Rollbook" in refuse(data) or "cut short" in refuse(data)
    for manifest in (b"[", b"[1]", b"null", b"{}"):
        assert "manifest" in refuse(_archive(manifest, []))
    os.mkfifo(tmp_path / "pipe")
    for place, message in (("pipe", "no plain file"), ("", "no plain file"), ("nowhere", "cannot be read")):
        with pytest.raises(InterchangeError, match=message):
            unpack_bundle(tmp_path / place, tmp_path / "into")


def test_a_manifest_is_not_read_beyond_its_limit(refuse: Callable[..., str]) -> None:
    """One that says it has 17 MiB is refused by its header alone."""
    info = tarfile.TarInfo("BUNDLE.json")
    info.size, info.mode = 17 << 20, 0o600
    assert "does not begin with BUNDLE.json" in refuse(info.tobuf(tarfile.GNU_FORMAT) + bytes(512))
