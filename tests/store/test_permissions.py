"""A store's files are its owner's alone, whatever the umask; or as store.toml shares them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollbook import store
from rollbook.store.catalog import Catalog
from rollbook.store.errors import ConfigError
from rollbook.store.events import Event, TrajectoryOpened, TurnDelivered
from rollbook.store.permissions import MODES, make_empty, make_folder, modes_of, open_file
from rollbook.store.sealed.leases import take_lease
from rollbook.store.secret import store_secret
from rollbook.store.upkeep.find import live_units
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.wal.files import quarantine


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The process's umask."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def walked(folder: Path) -> dict[str, int]:
    """Mode of every file and folder of a store, its own among them."""
    return {str(p.relative_to(folder)): _mode(p) for p in [folder, *folder.rglob("*")]}


def check_modes(folder: Path, share: str) -> dict[str, int]:
    """That all of it has the modes of `share`, and what there is."""
    modes = MODES[share]
    present = walked(folder)
    for name, mode in present.items():
        wanted = modes.folder if (folder / name).is_dir() else modes.file
        wanted = wanted & 0o660 if name == "SECRET" else wanted
        assert oct(mode) == oct(wanted), name
    return present


def _whole_store(folder: Path) -> None:
    """A store with what its commands make: recorded, sealed, compacted, queried, leased, claimed, damaged."""
    log = store.open(folder, create=True)
    store_secret(folder, "test")
    for number in range(4):
        with log.writer("serve") as writer:
            records = [TrajectoryOpened(f"t{number}", f"t{number}"), TurnDelivered(f"t{number}", "u", "sent")]
            writer.append([Event(record, "r") for record in records]).result()
        Sealer(log).run_once()
    assert any(unit.generation > 1 for unit in live_units(log))
    with store.connect(folder) as connection:
        connection.execute("SELECT count(*) FROM events").fetchall()
    quarantine(folder / "lanes/serve", "a test")


EXPECTED = {
    *("STORE.json", "SECRET", "catalog.db", "leases/LOCK", "claims/sealing.lock", "lanes/serve/LOCK"),
    *("lanes/serve/WATERMARK", "lanes/serve/QUARANTINED"),
}


@pytest.mark.more_but("0-nobody", "63-all")
@pytest.mark.parametrize("share", MODES)
def test_all_of_a_store_has_its_modes(tmp_path: Path, umask: int, share: str) -> None:
    """Segments, watermark, locks, leases, units, what is derived, the catalog with its journal, folders."""
    folder = tmp_path / "store"
    if share != "nobody":
        make_folder(folder)
        make_empty(folder / "store.toml").write_text(f'[files]\nshare = "{share}"\n')
        folder.chmod(MODES[share].folder)
        (folder / "store.toml").chmod(MODES[share].file)
    _whole_store(folder)
    log = store.open(folder)
    with (
        take_lease(folder, {}),
        log.claim("a run", "wait"),
        log.writer("open") as writer,
        closing(Catalog.of(log.path)) as catalog,
    ):
        catalog.record_lane("open", writer.recovered)
        present = check_modes(folder, share)
    assert present.keys() >= EXPECTED
    endings = (".wal", "UNIT.json", "marks.parquet", "trajectories.4.parquet", "locations.arrow", ".lease")
    assert {end for end in endings if any(name.endswith(end) for name in present)} == set(endings)


def test_a_store_from_before_keeps_its_modes(tmp_path: Path) -> None:
    """Nothing that is there is changed; what is new follows the setting, in an old folder too."""
    folder = tmp_path / "store"
    _whole_store(folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = set(walked(folder))
    with store.open(folder).writer("serve") as writer:
        writer.append([Event(TurnDelivered("t", "u", "sent"), "r")]).result()
    for name, mode in walked(folder).items():
        assert mode == ((0o755 if (folder / name).is_dir() else 0o644) if name in before else 0o600), name
    assert set(walked(folder)) - before


def test_settings_that_cannot_be_read_share_nothing(tmp_path: Path) -> None:
    """Until whoever opens the store hears of it; then the setting counts at once."""
    store.open(tmp_path / "s", create=True)
    toml = tmp_path / "s" / "store.toml"
    toml.write_text('[files]\nshare = "everybody"\n')
    assert modes_of(tmp_path / "s" / "lanes") == MODES["nobody"]
    with pytest.raises(ConfigError, match=r"files\.share"):
        store.open(tmp_path / "s").writer("lane")
    toml.write_text('[files]\nshare = "group"\n')
    assert modes_of(tmp_path / "s" / "lanes" / "new" / "file") == MODES["group"]


def test_files_are_opened_as_the_system_does(tmp_path: Path) -> None:
    """What is there is opened as it is; what may not be there is refused; nothing is inherited."""
    file = tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        open_file(file, os.O_RDWR)
    fd = open_file(file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    assert not os.get_inheritable(fd)
    os.write(fd, b"abc")
    os.close(fd)
    file.chmod(0o640)
    with pytest.raises(FileExistsError):
        open_file(file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.close(open_file(file, os.O_RDWR | os.O_CREAT))
    assert (file.read_bytes(), _mode(file)) == (b"abc", 0o640)
    os.close(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    assert make_empty(file).read_bytes() == b""
    make_folder(tmp_path / "x" / "y")
    make_folder(tmp_path / "x" / "y")
    assert (_mode(tmp_path / "x"), _mode(tmp_path / "x" / "y")) == (0o700, 0o700)
    with pytest.raises(FileExistsError):
        make_folder(file)
