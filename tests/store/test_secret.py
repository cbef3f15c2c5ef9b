from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.store.errors import NotAStoreError, OutsideError
from rollbook.store.secret import ELSEWHERE, SECRET, store_secret


def test_a_secret_stays_and_purposes_share_nothing(tmp_path: Path) -> None:
    first = store_secret(tmp_path, "keys")
    assert len(first) == 32
    assert store_secret(tmp_path, "keys") == first
    assert store_secret(tmp_path, "digests") != first
    assert first not in (tmp_path / SECRET).read_bytes()


def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    store_secret(tmp_path, "keys")
    assert stat.S_IMODE((tmp_path / SECRET).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [SECRET]


def test_two_stores_have_different_secrets(tmp_path: Path) -> None:
    first, other = tmp_path / "one", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    assert store_secret(first, "keys") != store_secret(other, "keys")


def test_those_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: store_secret(tmp_path, "keys"), range(64)))) == 1


def test_a_damaged_secret_is_named(tmp_path: Path) -> None:
    (tmp_path / SECRET).write_bytes(b"short")
    with pytest.raises(NotAStoreError, match="holds 5 bytes"):
        store_secret(tmp_path, "keys")


def test_a_file_elsewhere_takes_the_place_of_the_stores_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made where there is none, for its owner alone; a secret that moves there makes the same keys."""
    stores = [tmp_path / "one", tmp_path / "other"]
    for store in stores:
        store.mkdir()
    before = store_secret(stores[0], "keys")
    elsewhere = tmp_path / "elsewhere"
    (stores[0] / SECRET).rename(elsewhere)
    monkeypatch.setenv(ELSEWHERE, str(elsewhere))
    assert store_secret(stores[0], "keys") == before
    monkeypatch.setenv(ELSEWHERE, str(tmp_path / "new"))
    store_secret(stores[1], "keys")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    assert [list(store.iterdir()) for store in stores] == [[], []]


def test_two_secrets_of_a_store_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that were given out would no longer be taken, so the one has to be moved first."""
    store_secret(tmp_path, "keys")
    monkeypatch.setenv(ELSEWHERE, str(tmp_path / "elsewhere"))
    with pytest.raises(
        NotAStoreError, match=f"move it there .mv {tmp_path / SECRET} {tmp_path / 'elsewhere'}"
    ):
        store_secret(tmp_path, "keys")
    monkeypatch.setenv(ELSEWHERE, str(tmp_path / SECRET))  # the same file, named
    assert len(store_secret(tmp_path, "keys")) == 32


def test_a_file_elsewhere_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ELSEWHERE, str(tmp_path / "no" / "folder"))
    with pytest.raises(
        NotAStoreError, match=r"ROLLBOOK_SECRET_FILE names .*cannot use as its secret: No such file"
    ):
        store_secret(tmp_path, "keys")


def test_a_file_elsewhere_may_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes shows a secret: the operator names it. In the store's folder no link is followed."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / SECRET).write_bytes(bytes(32))
    (tmp_path / SECRET).symlink_to(Path("..data") / SECRET)
    store = tmp_path / "store"
    store.mkdir()
    monkeypatch.setenv(ELSEWHERE, str(tmp_path / SECRET))
    first = store_secret(store, "keys")
    monkeypatch.delenv(ELSEWHERE)
    assert first != store_secret(store, "keys")
    (store / SECRET).unlink()
    (store / SECRET).symlink_to(tmp_path / SECRET)
    with pytest.raises(OutsideError):
        store_secret(store, "keys")
