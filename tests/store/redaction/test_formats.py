"""Keys of known formats are found, wherever they stand in a text; what only begins like one is not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store.redaction.formats import FORMATS, find_keys, may_hold_keys

B64 = "MIIEowIBAAKCAQEA7bq3PZkL5x+abc/DEF0123456789abcdefghijklmnopqrstuv"
KEYS = {
    "anthropic": ["sk-ant-api03-" + "aB3-_" * 18],
    "openai": ["sk-" + "a1B2c3D4e5" * 4, "sk-proj-" + "aB3_-x" * 20 + "Z", "sk-svcacct-aaaaaaaaaaaaaaaaaaa1"],
    "aws": ["AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE"],
    "github": [f"gh{kind}_{'aB3d' * 9}" for kind in "pousr"] + ["github_pat_" + "11ABCDEFG0_" * 7],
    "gitlab": ["glpat-aB3dE_fGh-IjKlMnOpQr"],
    "google": ["AIzaSyA" + "b1-_" * 8],
    "huggingface": ["hf_" + "aBcDeFgHiJkL" * 3],
    "npm": ["npm_" + "aB3d" * 9],
    "pypi": ["pypi-AgEIcHlwaS5vcmc" + "aB3-_" * 12],
    "slack": ["xoxb-123456789012-123456789012-aBcDeFgHiJkLmNoP", "xapp-1-A0B1C2D3-123-abcdef"],
    "stripe": ["sk_live_" + "aB3d" * 6, "rk_live_" + "aB3d" * 6],
    "jwt": ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"],
    "private_key": [
        f"-----BEGIN {kind}PRIVATE KEY-----\n{B64}\n{B64}\n-----END {kind}PRIVATE KEY-----"
        for kind in ("", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ")
    ],
}
ALL = [(name, key) for name, keys in KEYS.items() for key in keys]


def test_every_format_has_an_example() -> None:
    """So that each is tested below."""
    assert KEYS.keys() == FORMATS.keys()


@pytest.mark.parametrize(("name", "key"), ALL)
@pytest.mark.parametrize("around", ["{}", "x={},y", "a b\n{}\n", '{{"k": "{}"}}', "\\n{}\\n", "ü{}ü", "/{}/"])
@pytest.mark.parametrize("length", [0, 20_000])
def test_a_key_is_found_whole(name: str, key: str, around: str, length: int) -> None:
    """In small texts and in large ones, which another search goes through first."""
    before = " lorem ipsum " * (length // 12)
    text = before + around.format(key) + before
    [match] = find_keys(text)
    assert (match.format, text[match.start : match.stop]) == (name, key)


def test_a_private_key_inside_json_text_and_one_that_was_cut_off() -> None:
    """Its lines end in a backslash and n there, and its end may be missing."""
    whole = KEYS["private_key"][1]
    for text in (whole.replace("\n", "\\n"), whole.partition("\n-----END")[0], whole.replace("\n", "\\\\n")):
        [match] = find_keys(text)
        assert (match.start, match.stop) == (0, len(text))
    legacy = whole.replace("KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A\n\n", 1)
    [match] = find_keys(legacy)
    assert legacy[match.start : match.stop] == legacy


@pytest.mark.parametrize(
    "text",
    [
        "task-oriented-dialogue-systems-are-fun-1234567890",
        "risk-free-and-more-words-0123456789012345",
        '<div class="sk-toggleable__content fitted">',
        "sk-short1",
        "AKIATOOSHORT",
        "XAKIAIOSFODNN7EXAMPLE",
        "AKIAIOSFODNN7EXAMPLEX",
        "ghp_tooshort",
        "hf_hub_download",
        "xoxo",
        "if '-----BEGIN RSA PRIVATE KEY-----' in text:",
        "-----BEGIN PUBLIC KEY-----\n" + B64,
        "npm_config_registry",
        "eyJ.eyJ.x",
        "",
    ],
)
def test_what_only_begins_like_a_key(text: str) -> None:
    """Words, other lengths, other blocks."""
    assert find_keys(text) == []


@given(st.lists(st.sampled_from([key for _, key in ALL]) | st.text(max_size=8), max_size=6))
@settings(max_examples=150)
def test_nothing_is_missed_by_the_quick_look(parts: list[str]) -> None:
    """Where the quick look says no there is no key, in small and in large texts."""
    text = " ".join(parts)
    keys = sum(part in dict.fromkeys(key for _, key in ALL) for part in parts)
    assert may_hold_keys(text) or not keys
    assert may_hold_keys(text + " " * 10_000) or not keys
    assert len(find_keys(text)) >= keys


@pytest.mark.parametrize(
    "unit",
    ["-----BEGIN PRIVATE KEY-----", "sk-", "sk-a1b2c3-", "eyJaaaaaaaaaaaa.", "github_pat_", "a: b\n", "A"],
)
def test_the_time_grows_with_the_length_alone(unit: str) -> None:
    """Whatever a client sends: four times as much takes not much more than four times as long."""

    def took(size: int) -> float:
        text = "-----BEGIN PRIVATE KEY-----\n" + unit * (size // len(unit))
        begun = time.thread_time()
        find_keys(text)
        return time.thread_time() - begun

    assert min(took(400_000) for _ in range(3)) < 40 * max(took(100_000), 0.005)
