"""The seal benchmark, in small: real text without repeats, sizes of real files, and what encodings take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollbook import store as rb
from rollbook.bench import encodings, seal
from rollbook.bench.corpus import Corpus, model_logprobs, read_text
from rollbook.bench.rounds import Limit
from rollbook.store.events import TurnCompleted, TurnRequested
from rollbook.store.sealed.unit import current_units

PLAN = seal.Plan(limit=Limit(2, 60.0), turns=12, characters=200_000, vocabulary=600)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, seal.Measured]:
    """A tiny measurement and its folder."""
    folder = tmp_path_factory.mktemp("seal")
    return folder, seal.measure(folder, PLAN, lambda: None)


def test_sizes_are_those_of_the_files(measured: tuple[Path, seal.Measured]) -> None:
    """The last round's unit is whole, holds every event, and has the size that is told."""
    folder, result = measured
    store = rb.open(folder / "store")
    (unit,) = current_units(store.path, seal.LANE)
    on_disk = sum((store.path / "sealed" / seal.LANE / unit.name / f.name).stat().st_size for f in unit.files)
    assert result.sealed_bytes == on_disk
    assert (
        result.wal_bytes == unit.segments[0].bytes == (store.path / "lanes/serve/00000001.wal").stat().st_size
    )
    assert result.events == unit.next_seq == store.head()[seal.LANE] == 3 * 3 + 12 * 3
    assert result.turns == 12
    assert result.pyarrow_bytes == (folder / "0.parquet").stat().st_size
    figures = {f.figure: f for f in seal.outcome(result).figures}
    assert figures["seal.size"].value == on_disk
    assert figures["seal.size"].ratio == pytest.approx(on_disk / result.wal_bytes)
    assert list(figures)[2:] == [f"seal.{name}" for name in result.encodings]
    assert len(result.encodings) == 4 * 2 + 2 * 2


def test_no_text_is_used_twice(measured: tuple[Path, seal.Measured]) -> None:
    """Windows follow each other in the text: no prompt and no completion repeats; messages say the ids."""
    folder, _ = measured
    events = [e.record for e in rb.open(folder / "store").events()]
    windows = [e for e in events if isinstance(e, TurnCompleted)]
    flat = np.concatenate([ids for t in windows for ids in (t.prompt_ids, t.completion_ids)])
    text = read_text(PLAN.characters)
    corpus = Corpus.of(PLAN.characters, PLAN.vocabulary)
    assert np.array_equal(corpus.ids[: len(flat)], flat)
    assert corpus.tokenizer.decode(corpus.ids.tolist()) == text
    prompts = [e.messages[0]["content"] for e in events if isinstance(e, TurnRequested)]
    assert prompts == corpus.tokenizer.decode_batch([t.prompt_ids.tolist() for t in windows])
    assert all(200 <= t.prompt_length == len(t.prompt_ids) <= 2000 for t in windows)
    assert all(
        50 <= len(t.completion_ids) == len(t.logprobs) <= 1000 for t in windows if t.logprobs is not None
    )


def test_text_that_ends_ends_the_turns() -> None:
    """No window is made of text that is not there."""
    corpus = Corpus.of(20_000, 300)
    events = [e for events in corpus.trajectories(10_000) for e in events]
    used = [t.record for t in events if isinstance(t.record, TurnCompleted)]
    assert 0 < sum(len(t.prompt_ids) + len(t.completion_ids) for t in used) <= len(corpus.ids)


def test_logprobs_are_of_bfloat16_logits() -> None:
    """Not above 0 but for rounding, finite, varied, and a difference of a bfloat16 and a float32."""
    logprobs = model_logprobs(np.random.default_rng(0), 5000)
    assert logprobs.dtype == np.float32
    assert np.isfinite(logprobs).all()
    assert logprobs.max() <= 1e-5
    assert -4 < logprobs.mean() < -0.1
    assert len(np.unique(logprobs)) > 4000


def test_bytes_per_value_depend_on_the_encoding() -> None:
    """Noise takes its four bytes, a constant next to none; a dictionary helps where there are few values."""
    rng = np.random.default_rng(0)
    noise = _lists(rng.integers(-(2**31), 2**31, 50_000, dtype=np.int64).astype(np.int32))
    assert encodings.bytes_per_value(noise, "PLAIN", 1, 100) == pytest.approx(4.0, rel=0.02)
    assert encodings.bytes_per_value(_lists(np.zeros(50_000, np.int32)), "PLAIN", 1, 100) < 0.05
    few = _lists(rng.integers(0, 2, 50_000).astype(np.int32) * 123_456_789)
    assert encodings.bytes_per_value(few, None, 1, 100) == pytest.approx(1 / 8, rel=0.3)
    assert encodings.bytes_per_value(few, None, 1, 100) < encodings.bytes_per_value(
        few, "BYTE_STREAM_SPLIT", 1, 100
    )


def _lists(values: Any) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(list(values.reshape(-1, 50)), pa.list_(pa.int32()))])
