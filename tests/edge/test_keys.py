"""Keys: what a file may hold, how it is read again, what is refused, and that no key is kept in clear."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.clients.streamed import PATHS, asked
from tests.fakes.proxies.served import Served
from tests.fakes.proxies.settings import settings_of
from typer.testing import CliRunner

from rollbook.cli.app import app as command
from rollbook.cli.keys import list_
from rollbook.edge import keys as module
from rollbook.edge.guard import Guard
from rollbook.edge.keys import (
    Key,
    Keys,
    Role,
    add_key,
    digest_of,
    expiry_of,
    given_keys,
    keys_of,
    parsed,
    read_keys,
)
from rollbook.ingest.access import ROUTES
from rollbook.ingest.secrets import engine_key_of
from rollbook.ingest.serve.serve import check_settings
from rollbook.store.errors import ConfigError, RequestError, RollbookError

HASH = digest_of("one")
GOOD = f'[[key]]\nname = "a"\nrole = "judge"\nsha256 = "{HASH}"\n'
OTHER = f'[[key]]\nname = "b"\nrole = "writer"\nsha256 = "{digest_of("two")}"\nexpires = 2027-01-01\n'


def _file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


# A file's text --------------------------------------------------------------------------------------


def test_a_file_of_keys_is_read() -> None:
    """Names, roles, hashes and moments; of a day its beginning, UTC."""
    assert parsed(GOOD + OTHER, "f") == (
        Key("a", Role.judge, HASH),
        Key("b", Role.writer, digest_of("two"), datetime(2027, 1, 1, tzinfo=UTC)),
    )
    zoned = parsed(GOOD + "expires = 2027-01-01T02:00:00+02:00\n", "f")
    assert zoned[0].expires == datetime(2027, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds nothing"),
        ("[[key]", "not TOML"),
        ("key = 1", "write .*key.* tables"),
        ("[[keys]]", r"holds \['keys'\]"),
        (GOOD + "[other]\nx = 1", "other"),
        (GOOD + 'secret = "one"', "key 1: write name, role, sha256"),
        (GOOD.replace("sha256", "key"), "key 1: write name"),
        (GOOD.replace(HASH, "one"), "64 small hexadecimal digits of the key's hash, never the key itself"),
        (GOOD.replace(HASH, HASH.upper()), "64 small"),
        (GOOD.replace('"judge"', '"admin"'), "role is 'admin': use one of operator, writer, judge, reader"),
        (GOOD.replace('"judge"', '"trajectory"'), "role is 'trajectory'"),
        (GOOD.replace('"judge"', "[1]"), "role is"),
        (GOOD.replace('"a"', '"trajectory"'), "name is 'trajectory'"),
        (GOOD.replace('"a"', '"a b"'), "name is 'a b'"),
        (GOOD.replace('"a"', '""'), "name is ''"),
        (GOOD + "expires = 2027-01-01T00:00:00", "with its zone"),
        (GOOD + 'expires = "soon"', "expires is 'soon'"),
        (GOOD + OTHER.replace('"b"', '"a"'), "two keys are named 'a'"),
        (GOOD + OTHER.replace(digest_of("two"), HASH), "'a' and 'b' are the same key"),
    ],
)
def test_a_text_that_is_no_file_of_keys(text: str, reason: str) -> None:
    """Each fault is named, with the remedy, and a hash is never shown."""
    with pytest.raises(ConfigError, match=reason) as error:
        parsed(text, "f")
    assert HASH not in str(error.value)


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_any_text_is_refused_in_one_way(text: str) -> None:
    """No other error comes out of it."""
    with pytest.raises(ConfigError, match=r"^f"):  # no text so short is a key
        parsed(text, "f")


# Files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o666, 0o601])
def test_a_file_that_others_may_use(tmp_path: Path, mode: int) -> None:
    """Its mode is named, and what to do; a group that may read it is how secrets are mounted."""
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}, so others may use it: chmod 600"):
        read_keys(_file(tmp_path, GOOD, mode))
    assert read_keys(_file(tmp_path, GOOD, 0o440))[0][0].name == "a"


def test_what_is_no_file_of_keys_is_refused(tmp_path: Path) -> None:
    """A folder, a pipe that nobody writes, nothing, something huge or not text: an error at once."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "huge").touch(0o600)
    os.truncate(tmp_path / "huge", 1 << 30)
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "bytes").chmod(0o600)
    for name in ("", "pipe", "nothing", "huge", "bytes"):
        with pytest.raises(ConfigError, match=r"make it with|make one with|not UTF-8"):
            read_keys(tmp_path / name)


def test_a_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New keys open, removed ones do not; one that is wrong or gone keeps the last keys, and is told once."""
    file = _file(tmp_path, GOOD)
    keys = Keys(file=file)
    assert keys.find("one") == Key("a", Role.judge, HASH)
    keys.look()
    assert caplog.messages == []
    _file(tmp_path, OTHER)
    keys.look()
    assert (keys.find("one"), keys.find("two") is not None) == (None, True)
    assert caplog.messages == [f"{file} is read again: b"]
    caplog.clear()
    for wrong, message in ((lambda: file.write_text("["), "not TOML"), (file.unlink, "No such file")):
        wrong()
        for _ in range(3):
            keys.look()
        assert message in (keys.failure or "")
        assert keys.trouble() == {"keys": keys.failure}
        assert keys.find("two") is not None
        err = caplog.text
        caplog.clear()
        assert err.count("the keys that it held last stay good") == 1
        assert message in err
    _file(tmp_path, GOOD)
    keys.look()
    assert (keys.failure, keys.trouble(), keys.find("two")) == (None, {}, None)
    assert keys.find("one") is not None


def test_a_file_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, and read only where it is another one: a request never waits for it."""
    keys = Keys(file=_file(tmp_path, GOOD))
    reads: list[float] = []
    monkeypatch.setattr(module, "read_keys", lambda file: reads.append(time.monotonic()))
    monkeypatch.setattr(module, "LOOK_S", 0.01)

    async def some_time() -> None:
        following = asyncio.create_task(keys.follow())
        await asyncio.sleep(0.2)
        following.cancel()

    asyncio.run(some_time())
    assert reads == []
    assert module.LOOK_S == 0.01
    asyncio.run(Keys().follow())  # without a file there is nothing to look at


def test_a_replaced_file_is_seen(tmp_path: Path) -> None:
    """Also one of the same size and time of modification: its inode is another."""
    file = _file(tmp_path, GOOD)
    keys, before = Keys(file=file), file.stat()
    other = tmp_path / "new"
    other.write_text(GOOD.replace(HASH, digest_of("uno")))
    other.chmod(0o600)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(file)
    keys.look()
    assert keys.find("uno") is not None


# The command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([""], "an --api-key is empty|an --api-key empty"),
        (["  "], "empty"),
        (["a b"], "holds spaces"),
        (["é"], "not ASCII"),
        (["trajectory:x"], "begins with 'trajectory:'"),
        (["same", "same"], "'api-key-1' and 'api-key-2' are the same key"),
    ],
)
def test_api_keys_that_cannot_be_meant(values: list[str], reason: str) -> None:
    """An empty key would let in whoever sends none; no message repeats a key."""
    with pytest.raises(ConfigError, match=reason) as error:
        given_keys(values, {})
    assert not any(f"{value!r}" in str(error.value) for value in values)


def test_a_variable_that_is_set_to_nothing() -> None:
    """Which is how an unset variable arrives through a file of settings: it must not open the door."""
    for value in ("", " "):
        with pytest.raises(ConfigError, match="ROLLBOOK_API_KEYS is set and empty"):
            given_keys([], {"ROLLBOOK_API_KEYS": value})
        with pytest.raises(ConfigError, match="ROLLBOOK_ENGINE_KEY is set and empty"):
            engine_key_of(None, {"ROLLBOOK_ENGINE_KEY": value})
        with pytest.raises(ConfigError, match="set and empty"):
            engine_key_of(value, {})
    assert given_keys([], {}) == ()
    assert (engine_key_of(None, {}), engine_key_of("k", {})) == (None, "k")


def test_the_command_refuses_a_bad_file_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before a store is made or a port taken."""
    monkeypatch.setenv("ROLLBOOK_API_KEYS", "")
    result = CliRunner().invoke(command, ["serve", "--store", str(tmp_path / "s"), "--engine", "scripted"])
    assert isinstance(result.exception, RollbookError)
    assert "ROLLBOOK_API_KEYS is set and empty" in str(result.exception)
    assert not (tmp_path / "s").exists()


def test_what_is_kept_of_given_keys(tmp_path: Path) -> None:
    """Hashes, under names; the variable is not handed on to children; no name is taken twice."""
    environment = {"ROLLBOOK_API_KEYS": "first-secret", "HOME": "/"}
    keys = keys_of(["first-secret", "second-secret"], None, environment)
    assert environment == {"HOME": "/"}
    assert keys.roles() == {"api-key-1": "operator", "api-key-2": "operator"}
    assert keys.find("second-secret") == Key("api-key-2", Role.operator, digest_of("second-secret"))
    assert "secret" not in repr(vars(keys))
    both = _file(tmp_path, GOOD.replace('"a"', '"api-key-1"'))
    with pytest.raises(ConfigError, match="two keys are named 'api-key-1'"):
        Keys(given_keys(["x"], {}), both)


@pytest.mark.parametrize("address", ["*", "localhost", "10.0.0.1/8", ""])
def test_forwarded_from_takes_addresses_and_networks_alone(address: str) -> None:
    """Anybody's word is nobody's: an address or a network, and nothing else."""
    with pytest.raises(ConfigError, match="--forwarded-from"):
        check_settings(settings_of(forwarded_from=(address,)))
    check_settings(settings_of(forwarded_from=("10.0.0.0/8", "::1")))


# Making keys ----------------------------------------------------------------------------------------


def test_a_made_key_opens_and_is_stored_as_a_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is new, opens what it is for, and stands in the file as a hash alone; comments stay."""
    file = tmp_path / "keys.toml"
    first = add_key(file, "ops", "operator", None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("# ours\n" + file.read_text().rstrip())
    second = add_key(file, "judge", "judge", expiry_of("2027-01-01"))
    assert first != second
    assert all(key.startswith("rollbook-") and len(key) > 50 for key in (first, second))
    keys = Keys(file=file)
    assert [entry.name for entry in map(keys.find, (first, second)) if entry] == ["ops", "judge"]
    assert file.read_text().startswith("# ours\n[[key]]\n")
    assert first not in file.read_text()
    before = file.read_bytes()
    for name, role in (("ops", "reader"), ("new", "admin"), ("a b", "judge")):
        with pytest.raises(ConfigError):
            add_key(file, name, role, None)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    list_(file)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "role", "expires"],
        ["ops", "operator"],
        ["judge", "judge", "2027-01-01", "00:00", "UTC"],
    ]
    file.chmod(0o640)
    add_key(file, "third", "reader", None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_the_command_prints_the_key_alone(tmp_path: Path) -> None:
    """The key alone goes to stdout, so that it can be piped into a secret's place."""
    file = str(tmp_path / "keys.toml")
    added = CliRunner().invoke(
        command, ["keys", "add", file, "--name", "w", "--role", "writer", "--expires", "2020-01-01"]
    )
    assert added.exit_code == 0, added.output
    key = added.stdout.strip()
    assert Keys(file=Path(file)).find(key) is not None
    named = ["keys", "add", file, "--name", "t", "--role", "writer", "--prefix"]
    assert "letters, digits" in str(CliRunner().invoke(command, [*named, "a b"]).exception)
    tenants = CliRunner().invoke(command, [*named, "tml-"]).stdout.strip()
    assert tenants.startswith("tml-rollbook-")
    found = Keys(file=Path(file)).find(tenants)
    assert (found.name if found else None) == "t"
    listed = CliRunner().invoke(command, ["keys", "list", file])
    assert "2020-01-01 00:00 UTC, expired" in listed.stdout
    assert key not in listed.stdout
    printed = CliRunner().invoke(command, ["keys", "list", file, "--json"]).stdout
    written = '{"name":"w","role":"writer","expires":"2020-01-01T00:00:00Z"}'
    assert printed == f'[{written},{{"name":"t","role":"writer","expires":null}}]\n'


# Expiry, and a server whose keys are rotated ----------------------------------------------------------


def test_an_expired_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its moment on it is a 401 that says so; until then it opens."""
    moment = datetime(2027, 1, 1, tzinfo=UTC)
    key = Key("old", Role.operator, digest_of("old-key"), moment)
    assert (key.expired(moment), key.expired(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC))) == (True, False)
    past = Key("old", Role.operator, digest_of("old-key"), datetime(2020, 1, 1, tzinfo=UTC))
    guard = Guard(Keys([past]), ROUTES, "r", b"s")
    with pytest.raises(RequestError, match="'old' expired at 2020-01-01") as error:
        guard.admitted("GET", "/metrics", {"x-api-key": "old-key"}, "127.0.0.1")
    assert (error.value.status, error.value.code) == (401, "expired_api_key")


def test_rotation_on_a_running_server(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path, tmp_path: Path
) -> None:
    """A new key opens within seconds, the old one no more; a trajectory's own goes on through it all."""
    file = tmp_path / "keys.toml"
    first = add_key(file, "first", "operator", None)
    words = ("--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer")
    server = serve(*words, "--keys", str(file))
    with httpx.Client(base_url=server.url) as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers={"x-api-key": key}).status_code

        opened = http.post("/v1/trajectories", json={"id": "t"}, headers={"x-api-key": first}).json()
        own = opened["api_key"]
        second = add_key(file, "second", "operator", None)
        _await(lambda: status(second) == 200)
        assert status(first) == status(own) == 200
        only = "[[key]]" + file.read_text().rpartition("[[key]]")[2]
        file.write_text(only)
        _await(lambda: status(first) == 401)
        assert status(second) == status(own) == 200
        file.write_text("wrong")
        _await(lambda: "keys" in http.get("/healthz", headers={"x-api-key": second}).json())
        health = http.get("/healthz", headers={"x-api-key": second})
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert "not TOML" in health.json()["keys"]
        reply = http.post(PATHS["chat"], json=asked("chat"), headers={"x-api-key": own})
        assert reply.status_code == 200
    server.stop()
    log = server.log.read_text()
    assert "is read again: second" in log
    assert "the keys that it held last stay good" in log
    data = log.encode() + b"".join(p.read_bytes() for p in server.path.rglob("*") if p.is_file())
    assert not any(key.encode() in data for key in (first, second))


def _await(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
