"""Single tokens as text: every id has one, whatever bytes it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rollbook.cli.show.draw import TokenText
from rollbook.store.errors import ModelError


def test_byte_level_tokens_show_spaces_bytes_and_escapes(byte_level: Tokenizer) -> None:
    """Spaces stay where they are, parts of characters are bytes, control characters are escapes."""
    text = TokenText(byte_level)
    ids = byte_level.encode("hello there é\n\x1b[").ids
    assert text.pieces(ids) == ["hello", " there", " ", "\\xc3", "\\xa9", "↵\n", "\\x1b", "["]
    assert text.pieces([byte_level.token_to_id("<|end|>"), 99_999, -1]) == ["<|end|>", "<99999>", "<-1>"]


def test_tokens_with_bytes_to_fall_back_to(byte_fallback: Tokenizer) -> None:
    """A space at a token's beginning is kept although the decoder drops a text's first one."""
    text = TokenText(byte_fallback)
    ids = [byte_fallback.token_to_id(token) for token in ("▁hi", "▁", "a", "<0xE2>", "<0x1B>")]
    assert text.pieces(ids) == [" hi", " ", "a", "\\xe2", "\\x1b"]


@given(st.binary(max_size=40))
@settings(max_examples=60)
def test_pieces_make_the_text_again(byte_level: Tokenizer, data: bytes) -> None:
    """For any text, its tokens' pieces put together are what is seen of it: nothing is dropped."""
    text = data.decode("latin-1").replace("\n", "").replace("\t", "")
    ascii_only = "".join(c for c in text if c.isascii())
    pieces = TokenText(byte_level).pieces(byte_level.encode(ascii_only).ids)
    assert "".join(pieces) == "".join(
        c if c.isprintable() else f"\\x{ord(c):02x}" for c in ascii_only
    ).replace("\\x0d", "\\r")


def test_without_a_tokenizer_ids_are_numbers() -> None:
    """So that tokens can be looked at without the model."""
    assert TokenText(None).pieces([5, 7]) == ["5 ", "7 "]


def test_a_model_without_a_tokenizer(tmp_path: Path, byte_level: Tokenizer) -> None:
    """The error names the folder or the file."""
    with pytest.raises(ModelError, match=r"holds no tokenizer.json"):
        TokenText.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer.json: cannot be read"):
        TokenText.load(tmp_path)
    byte_level.save(str(tmp_path / "tokenizer.json"))
    assert TokenText.load(tmp_path).pieces(byte_level.encode("hello").ids) == ["hello"]
