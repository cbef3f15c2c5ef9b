"""Long texts are encoded piece by piece: the same ids, in a fraction of the memory."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from rollbook.ingest.tokens import text_encoder
from rollbook.ingest.tokens.text_encoder import TextEncoder

WORDS = [
    *(
        "def",
        "return",
        "the",
        "a",
        "",
        "x",
        "==",
        "0:\n\n\n",
        "\t",
        "2026",
        "3.14159",
        "don't",
        "I'll",
        "\ufffc",
    ),
    *("élan", "naïve", "漢字", "かな", "한글", "🙂", "👩\u200d👩\u200d👧", "<|im_start|>", "<|im_end|>\n"),
]


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Pieces of a few hundred letters, so that short texts are long."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LONG", 400), ("PIECE", 200), ("MARGIN", 64)):
            patch.setattr(text_encoder, name, value)
        yield


def _trained(pre: pre_tokenizers.PreTokenizer, decoder: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox don't return\n\n  x == 0:"] * 3, trainer)
    return tokenizer


def _gpt2_trimmed() -> Tokenizer:
    tokenizer = _trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


OTHERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: _trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2, trimmed offsets": _gpt2_trimmed,
    "gpt2, prefix space": lambda: _trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": lambda: _trained(pre_tokenizers.Metaspace()),
    "metaspace, first": lambda: _trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "no words": lambda: _trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "digits": lambda: _trained(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
}


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    joined = [
        rng.choice(WORDS) + rng.choice(["", " ", " ", " ", "\n", " " * rng.randrange(40)])
        for _ in range(words)
    ]
    return "".join(joined)


@given(st.text(st.sampled_from("ab A1\n\t .,'é漢🙂 ̈<|im_end>"), min_size=300, max_size=1500))
@settings(max_examples=60)
def test_any_text_has_the_ids_of_the_whole(qwen: Tokenizer, text: str) -> None:
    """Of Qwen's real vocabulary; combining letters, runs of blanks and control tokens cut anywhere."""
    assert TextEncoder(qwen).encode(text).tolist() == _ids(qwen, text)


@pytest.mark.parametrize("seed", range(12))
def test_programs_and_prose_have_the_ids_of_the_whole(qwen: Tokenizer, seed: int) -> None:
    """Texts as people and programs write them, in many scripts."""
    text = _text(seed, 900)
    assert TextEncoder(qwen).encode(text).tolist() == _ids(qwen, text)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_tokenizers(name: str) -> None:
    """Those that split otherwise, add a first blank, or do not split at all."""
    tokenizer = OTHERS[name]()
    for seed in range(6):
        text = _text(seed, 300)
        assert TextEncoder(tokenizer).encode(text).tolist() == _ids(tokenizer, text)


def test_long_texts_are_encoded_in_pieces(qwen: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole is not encoded where it can be taken apart; one endless word cannot be."""
    sizes: list[int] = []
    whole = text_encoder._whole
    monkeypatch.setattr(text_encoder, "_whole", lambda t, text: sizes.append(len(text)) or whole(t, text))
    text = _text(1, 900)
    TextEncoder(qwen).encode(text)
    assert max(sizes) <= 200 + 64
    sizes.clear()
    assert TextEncoder(qwen).encode("a" * 1000).tolist() == _ids(qwen, "a" * 1000)
    assert sizes == [1000]


def test_a_tokenizer_that_cuts_its_texts(qwen: Tokenizer) -> None:
    """What it truncates is truncated once, not in every piece."""
    cutting = Tokenizer.from_str(qwen.to_str())
    cutting.enable_truncation(100)
    text = "word " * 40_000
    assert TextEncoder(cutting).encode(text).tolist() == _ids(cutting, text)


MEASURE = """
import sys
from tokenizers import Tokenizer
from rollbook.ingest.tokens.text_encoder import TextEncoder
def now(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key))
tokenizer, text = Tokenizer.from_file(sys.argv[1]), "word " * 600_000
before = now("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
count = len(TextEncoder(tokenizer).encode(text))
print(count, (now("VmHWM") - before) // 1024)
"""


def test_long_texts_take_little_memory(qwen: Tokenizer, tmp_path: Path) -> None:
    """3 MB of text, 600,000 tokens, in less than 100 MB, where the whole at once takes 250."""
    qwen.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "tokenizer.json")]
    count, megabytes = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    assert count == 600_001
    assert megabytes < 100
