"""store.toml: every key has a default, none is guessed, and the environment may name the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.store.errors import ConfigError
from rollbook.store.settings import AppendSettings, SealSettings, StoreSettings, read_settings


def test_without_a_file_everything_has_its_default(tmp_path: Path) -> None:
    """Without a file, and with an empty one, everything has its default."""
    assert read_settings(tmp_path) == StoreSettings()
    (tmp_path / "store.toml").write_text("")
    assert read_settings(tmp_path) == StoreSettings()
    assert read_settings(tmp_path).append == AppendSettings(
        linger_ms=2.0,
        group_events=512,
        group_bytes=4 << 20,
        segment_bytes=64 << 20,
        segment_age_s=60.0,
        body_bytes=8192,
    )


def test_values_are_read(tmp_path: Path) -> None:
    """What is given counts; what is not keeps its default."""
    (tmp_path / "store.toml").write_text(
        "[append]\nlinger_ms = 0\n[seal]\nrow_group = 8\n[remote]\nuri = 's3://b/p'"
    )
    settings = read_settings(tmp_path)
    assert settings.append == AppendSettings(linger_ms=0)
    assert settings.seal == SealSettings(row_group=8)
    assert (settings.remote.uri, settings.remote.endpoint, settings.catalog.url) == ("s3://b/p", None, None)


def test_the_environment_names_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLLBOOK_CATALOG_URL wins over the file; nothing else does."""
    (tmp_path / "store.toml").write_text("[catalog]\nurl = 'sqlite:///a'\n[append]\ngroup_events = 7\n")
    assert read_settings(tmp_path).catalog.url == "sqlite:///a"
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", "sqlite:///b")
    settings = read_settings(tmp_path)
    assert (settings.catalog.url, settings.append.group_events) == ("sqlite:///b", 7)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[append]\nlinger = 1\n", "append.linger"),
        ("[append]\nlinger_ms = 'soon'\n", "append.linger_ms"),
        ("[append]\nsegment_bytes = 0\n", "append.segment_bytes"),
        ("[seal]\ncompression_level = 23\n", "seal.compression_level"),
        ("[sea]\n", "sea"),
        ("append = 3\n", "append"),
        ("[append\n", "not TOML"),
        ("\udcff", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, names: str) -> None:
    """An unknown key, an ill-typed or impossible value, and bytes that are no TOML name file and key."""
    path = tmp_path / "store.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_settings(tmp_path)
    assert str(path) in str(caught.value)
    assert names in str(caught.value)
