"""Text is encoded by fastokens where it gives what tokenizers gives, and by tokenizers else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from rollbook.ingest.tokens import text_encoder
from rollbook.ingest.tokens.text_encoder import TextEncoder, read_quick
from rollbook.store.errors import LimitError


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _of(tokenizer: Tokenizer, folder: Path) -> TextEncoder:
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextEncoder.tried(tokenizer, read_quick(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def quick(qwen: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    """Of Qwen's real vocabulary."""
    return _of(qwen, tmp_path_factory.mktemp("quick"))


def test_a_real_tokenizer_is_quick(quick: TextEncoder) -> None:
    """It passes the trial, and no text of the traffic has shown otherwise."""
    assert quick._quick is not None


@settings(max_examples=300)
@given(st.text(max_size=400) | st.text(st.sampled_from("ab A1\n\t .,'é漢🙂 ̈<|im_end>s"), max_size=400))
def test_any_text_has_the_same_ids(quick: TextEncoder, qwen: Tokenizer, text: str) -> None:
    """Of any characters that there are, control tokens and combining letters among them."""
    assert quick.encode(text).tolist() == _ids(qwen, text)
    assert quick.encode(text).dtype == np.int32
    assert quick._quick is not None


class _Odd:
    """Gives other ids for texts with this letter in them."""

    def __init__(self, real: Any, letter: str) -> None:
        self._real, self._letter = real, letter

    def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
        ids, ends = self._real.encode_batch_flat(texts)
        return (ids[4:] + ids[:4], ends) if self._letter in texts[0] else (ids, ends)


def test_the_trial_finds_a_difference(qwen: Tokenizer, tmp_path: Path) -> None:
    """In one script alone."""
    qwen.save(str(tmp_path / "tokenizer.json"))
    odd: Any = _Odd(read_quick(tmp_path / "tokenizer.json"), "ẞ")
    encoder = TextEncoder.tried(qwen, odd)
    assert encoder._quick is None
    assert encoder.encode("ẞ a").tolist() == _ids(qwen, "ẞ a")


def test_traffic_finds_a_difference(
    qwen: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What no text of the trial shows: the text that shows it has the right ids, and those behind it."""
    monkeypatch.setattr(text_encoder, "COMPARED_EVERY", 5)
    qwen.save(str(tmp_path / "tokenizer.json"))
    odd: Any = _Odd(read_quick(tmp_path / "tokenizer.json"), "ŵ")
    encoder = TextEncoder.tried(qwen, odd)
    assert encoder._quick is not None
    with caplog.at_level(logging.WARNING):
        for number in range(9):
            assert encoder.encode(f"{number} is plain").tolist() == _ids(qwen, f"{number} is plain")
        assert encoder._quick is not None
        assert encoder.encode("two ŵ here").tolist() == _ids(qwen, "two ŵ here"), "the tenth is compared"
    assert encoder._quick is None
    assert "not asked any more" in caplog.text


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁", -2.0)], unk_id=0)),
    ],
    ids=["words", "unigram"],
)
def test_other_kinds_are_encoded_all_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Whether fastokens can read them or not."""
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder = _of(tokenizer, tmp_path)
    for text in ("a a", "", "b a  a\n", "é"):
        assert encoder.encode(text).tolist() == _ids(tokenizer, text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """There is no quick one."""
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    assert read_quick(tmp_path / "tokenizer.json") is None


def test_a_tokenizer_that_cuts_is_not_quick(qwen: Tokenizer, tmp_path: Path) -> None:
    """What it truncates stays truncated."""
    cutting = Tokenizer.from_str(qwen.to_str())
    cutting.enable_truncation(3)
    encoder = _of(cutting, tmp_path)
    assert encoder._quick is None
    assert len(encoder.encode("one two three four five")) == 3


def test_text_far_beyond_the_context_is_refused(quick: TextEncoder) -> None:
    """By its beginning; what may fit is encoded."""
    with pytest.raises(LimitError, match="far more than the model's context of 10 tokens"):
        quick.encode("word " * 1000, 10)
    assert len(quick.encode("word " * 1000, 1000)) == 1001


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_half_a_surrogate_pair_is_an_error(quick: TextEncoder, qwen: Tokenizer, text: str) -> None:
    """Of whichever encoder."""
    for encoder in (quick, TextEncoder(qwen)):
        with pytest.raises((UnicodeEncodeError, TypeError)):
            encoder.encode(text)
