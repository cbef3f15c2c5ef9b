"""The settings of `rollbook serve`: a file, options that overrule it, and what neither may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollbook.edge.web_pages import own
from rollbook.ingest.options import ProxyOptions
from rollbook.ingest.serve.options import Secrets, ServeOptions, options_of
from rollbook.ingest.serve.settings import ServeSettings, load_settings, parse_settings
from rollbook.store.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Writes a file of settings."""

    def write(text: str) -> Path:
        (tmp_path / "serve.toml").write_text(text)
        return tmp_path / "serve.toml"

    return write


def _options(settings: ServeSettings, **secrets: Any) -> ServeOptions:
    return options_of(settings, Secrets(**secrets), {}, "here")


def test_options_overrule_the_file(file: Any) -> None:
    """Key by key; what neither says is the default."""
    path = file('store = "runs"\nport = 9\nredact = ["known"]\nhold_s = 5\n[engine_ask]\nlogprobs = true\n')
    settings = load_settings(path, {"port": 10, "engine_url": ["http://one:1"]})
    assert (settings.store, settings.port, settings.redact) == (Path("runs"), 10, ("known",))
    assert (settings.hold_s, settings.engine_ask, settings.lane) == (5.0, {"logprobs": True}, "serve")
    assert [str(url) for url in settings.engine_url] == ["http://one:1"]


def test_no_settings_are_the_options_own_defaults(tmp_path: Path) -> None:
    """One default for each, whichever way `rollbook serve` is started."""
    made = _options(parse_settings({"store": tmp_path}, "test"))
    bare = ServeOptions(tmp_path, proxy=ProxyOptions(own=own("127.0.0.1", "here")))
    assert made.as_json() == bare.as_json()


def test_settings_reach_the_options(tmp_path: Path) -> None:
    """Those that are named or counted otherwise there."""
    given = {
        "store": tmp_path,
        "max_body_mb": 1,
        "abandon_s": 2,
        "image_host": ["pics"],
        "reasoning": "respect",
    }
    made = _options(parse_settings(given, "test"), engine_key="k")
    assert (made.proxy.max_body_bytes, made.proxy.abandoned_s) == (2**20, 2.0)
    assert (made.proxy.image_hosts, made.tree.reasoning, made.engine_key) == (("pics",), "respect", "k")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "prot: unknown key: did you mean port?"),
        ("max-running = 1", "max-running: unknown key: did you mean max_running?"),
        ("zzz = 1", "zzz: unknown key: a file of settings has abandon_s, "),
        ('engine_key = "k"', "a file of settings holds no secrets: give it as ROLLBOOK_ENGINE_KEY"),
        ('api_key = ["k"]', "a file of settings holds no secrets: name a file of keys"),
        ('engine_url = ["http://me:word@host"]', "engine_url holds a login or a key"),
        ('engine_url = "http://host"', "engine_url: send a list"),
        ('port = "8000"', "port: Input should be a valid integer (got '8000')"),
        ("port = 70000", "port: Input should be less than 65536"),
        ('history = "none"', "history: Input should be 'faithful' or 'preserve'"),
        ("port = ", "not TOML"),
    ],
)
def test_what_cannot_be_meant_is_refused(file: Any, text: str, said: str) -> None:
    """By its key, with the nearest one; and no secret is repeated."""
    with pytest.raises(ConfigError) as refused:
        load_settings(file(f'store = "runs"\n{text}\n'), {})
    assert said in str(refused.value)
    assert "word" not in str(refused.value)


def test_all_that_is_wrong_is_named_at_once(file: Any) -> None:
    """So that one look is enough."""
    with pytest.raises(ConfigError) as refused:
        load_settings(file("prot = 1\nseal = 3\n"), {})
    assert [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]] == [
        "store",
        "seal",
        "prot",
    ]
    assert "give --store DIR, or set ROLLBOOK_STORE" in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It is named."""
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_settings(tmp_path / "none.toml", {})
