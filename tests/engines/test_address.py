"""An engine's address is taken apart where it enters: what opens the engine is shown nowhere."""

from __future__ import annotations

import asyncio
import base64
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.proxies.settings import proxy_parts
from tests.fakes.stories.weights import ToldWeights

from rollbook.engines.address import EngineAddress
from rollbook.engines.sglang.client import SglangEngine
from rollbook.ingest.secrets import ProxySecrets
from rollbook.ingest.serve.engines import make_engine, upstream_of
from rollbook.ingest.serve.serve import recorded_settings
from rollbook.ingest.settings import ServeSettings
from rollbook.store.errors import ConfigError, EngineError
from rollbook.train.config.config import parse_config
from rollbook.train.sync.control import EngineControl

SECRET = "pl4nted-s3cret"


@pytest.mark.parametrize(
    ("text", "url", "login", "query"),
    [
        ("http://h:1", "http://h:1", None, ""),
        ("http://h:1/", "http://h:1", None, ""),
        (" https://h/v1/ ", "https://h/v1", None, ""),
        ("http://[::1]:30000", "http://[::1]:30000", None, ""),
        ("http://user:pass@h:1/engine", "http://h:1/engine", "user:pass", ""),
        ("http://us%40er:p%3Ass@h", "http://h", "us@er:p:ss", ""),
        ("http://user:p@ss@h", "http://h", "user:p@ss", ""),
        ("http://token@h", "http://h", "token:", ""),
        ("https://h/v1?api-version=1&key=k#part", "https://h/v1", None, "api-version=1&key=k"),
    ],
)
def test_an_address_is_split_into_url_login_and_query(
    text: str, url: str, login: str | None, query: str
) -> None:
    """Login, place and query; once taken apart it stays as it is."""
    address = EngineAddress.of(text)
    assert (address.url, str(address), address.query) == (url, url, query)
    coded = None if login is None else "Basic " + base64.b64encode(login.encode()).decode()
    assert address.login == coded
    assert EngineAddress.of(address) is address
    assert EngineAddress.of(address.url) == EngineAddress(url)


@pytest.mark.parametrize(
    "text", ["", "h:1", "ftp://h", "http://", "http://u:pl4nted@", "http://h:x", "http://h:0"]
)
def test_what_is_no_address_is_refused_without_being_repeated(text: str) -> None:
    """The message says how one looks; a secret may stand in it."""
    with pytest.raises(ConfigError, match="must be http://HOST:PORT") as refused:
        EngineAddress.of(text)
    assert "pl4nted" not in str(refused.value)


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_nothing_of_a_login_is_shown(user: str, password: str) -> None:
    """Whatever it holds."""
    secret = quote(user + "§", safe="") + ":" + quote(password + "§", safe="")
    address = EngineAddress.of(f"http://{secret}@host:1/path?key={quote(password + '§', safe='')}")
    assert repr(address) == "EngineAddress(url='http://host:1/path')"
    assert address.login is not None
    assert base64.b64decode(address.login[6:]).decode() == f"{user}§:{password}§"


def test_a_login_or_a_key_and_not_both() -> None:
    """There is one header."""
    plain, login = EngineAddress.of("http://h"), EngineAddress.of(f"http://u:{SECRET}@h")
    assert plain.headers(None) == {}
    assert plain.headers("k") == {"authorization": "Bearer k"}
    assert login.headers(None) == {"authorization": login.login}
    with pytest.raises(ConfigError, match="give one of them") as refused:
        login.headers("k")
    assert SECRET not in str(refused.value)
    assert EngineAddress.of("http://h?key=abc&api-version=7").secrets == ("abc",)


def _parts(*urls: str, **more: Any) -> tuple[ServeSettings, ProxySecrets]:
    return proxy_parts(engine_url=tuple(EngineAddress.of(url) for url in urls), **more)


def test_serve_is_told_and_records_addresses_without_logins(chat: Any) -> None:
    """What run.opened holds, what engines are named by, and what is asked of them."""
    url = f"http://u:{SECRET}@h:1"
    parts = _parts(url, engine="sglang", engine_key=None)
    assert recorded_settings(*parts)["engine_urls"] == ["http://h:1"]
    assert SECRET not in repr(parts)
    weights: Any = ToldWeights()
    fleet: Any = make_engine(*parts, chat())(weights)
    assert fleet.states()[0]["url"] == "http://h:1"
    assert fleet.members[0].engine._keys.headers()["authorization"].startswith("Basic ")
    for refused, match in (
        (_parts(url, "http://h:1/", engine="sglang"), "twice"),
        (_parts(url, engine="sglang", engine_key="k"), "give one of them"),
        (_parts(f"http://h?key={SECRET}", engine="sglang"), "has no query"),
    ):
        with pytest.raises(ConfigError, match=match) as error:
            make_engine(*refused, chat())(weights)
        assert SECRET not in str(error.value)
    with pytest.raises(ConfigError, match="give one of them"):
        upstream_of(*_parts(url, engine="upstream", engine_key="k"))
    assert SECRET not in repr(upstream_of(*_parts(url, engine="upstream")))


async def _never(*_: Any) -> None:
    raise AssertionError


def test_a_server_that_is_away_is_named_without_its_login() -> None:
    """By an engine and by the trainer."""
    with pytest.raises(EngineError) as error:
        asyncio.run(SglangEngine(f"http://u:{SECRET}@127.0.0.1:9", ToldWeights()).start(_never))
    assert "http://127.0.0.1:9" in str(error.value)
    assert SECRET not in repr(error.value)
    control = EngineControl(f"http://u:{SECRET}@127.0.0.1:9/", 1.0)
    with pytest.raises(EngineError) as lost:
        control.info()
    assert control.url == "http://127.0.0.1:9"
    assert SECRET not in repr(lost.value) + repr(control)
    again = EngineControl(control.url, 1.0, control.key, control.login)
    sent = again._address.headers(None)["authorization"]
    assert sent == control._address.headers(None)["authorization"]
    assert base64.b64decode(sent[6:]) == f"u:{SECRET}".encode()
    control.close()
    again.close()


def test_the_trainers_configuration_keeps_no_login() -> None:
    """Neither what it records nor what it refuses."""
    values = {
        "model": "m",
        "steps": 1,
        "algorithm": {"name": "sft", "batch_size": 1},
        "sync": {"engines": [f"http://u:{SECRET}@h:1/engine"]},
    }
    config = parse_config(values, "train.toml")
    assert config.as_json()["sync"]["engines"] == ["http://h:1/engine"]
    assert SECRET not in repr(config) + orjson.dumps(config.as_json()).decode()
    with pytest.raises(ConfigError, match="must be http://HOST:PORT") as refused:
        parse_config(values | {"sync": {"engines": [f"ftp://u:{SECRET}@h"]}}, "train.toml")
    assert SECRET not in str(refused.value)
