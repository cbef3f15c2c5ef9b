"""Reading: from other processes, by tail, and at cuts that stay what they are."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.store import Store, format_cut, parse_cut
from rollbook.store.cut import holds
from rollbook.store.errors import CorruptionError, CutError, FormatError
from rollbook.store.events import Event, StepPlanned
from rollbook.store.events.codec import decode
from rollbook.store.log.reader import LaneReader
from rollbook.store.settings import AppendSettings

LANES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)


@given(st.dictionaries(LANES, st.integers(1, 10**17), max_size=5))
def test_cuts_survive_their_text(cut: dict[str, int]) -> None:
    """Formatting and parsing a cut gives the cut; the text is sorted and empty lanes are left out."""
    assert parse_cut(format_cut(cut)) == cut
    assert format_cut(cut | {"zero-lane": 0}) == format_cut(cut | {"zero-lane": 0} and cut)
    assert format_cut(dict(reversed(cut.items()))) == format_cut(cut)


def test_the_text_of_a_cut() -> None:
    """The canonical text, spaces, the empty cut, and what a cut holds."""
    assert format_cut({"train": 45, "serve": 120, "idle": 0}) == "serve=120,train=45"
    assert parse_cut("serve=120, train=45") == {"serve": 120, "train": 45}
    assert format_cut({}) == "empty"
    assert parse_cut("empty") == {}
    assert [holds({"a": 2}, lane, seq) for lane, seq in (("a", 1), ("a", 2), ("b", 0))] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=",
        "=1",
        "a=-1",
        "a=1.5",
        "a=1,a=2",
        "A=1",
        "a=1,",
        "a=²",
        "a=٣",
        "a=0x1",
        "a=" + "9" * 5000,
    ],
)
def test_bad_cuts_are_refused(text: str) -> None:
    """What is not lane=count raises CutError with an example of what is."""
    with pytest.raises(CutError, match="serve=120,train=45"):
        parse_cut(text)


@given(st.text(max_size=30))
def test_any_text_is_a_cut_or_a_cut_error(text: str) -> None:
    """Parsing any text gives a cut or CutError, nothing else."""
    try:
        cut = parse_cut(text)
    except CutError:
        return
    assert all(isinstance(count, int) and count >= 0 for count in cut.values())


def test_cuts_of_a_store(story_store: Store) -> None:
    """head, empty, lanes, and steps (a later attempt replaces an earlier one) all name cuts."""
    assert story_store.cut() == story_store.cut("head") == {"serve": 18, "train": 8}
    assert story_store.cut("empty") == {}
    assert story_store.cut("serve=3") == {"serve": 3}
    assert story_store.cut("step:0") == {"serve": 14, "train": 2}
    assert story_store.cut("step:1", run="demo") == {"serve": 18, "train": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("serve=19", "holds 19 events of lane 'serve', but the store has 18"),
        ("moon=1", "holds 1 events of lane 'moon', but the store has 0"),
        ("step:2", "no run planned it"),
        ("step:x", "no run planned it"),
        ("step:", "no run planned it"),
    ],
)
def test_cuts_beyond_the_store_are_refused(story_store: Store, text: str, message: str) -> None:
    """A cut beyond the head, of an unknown lane or of an unknown step says what there is."""
    with pytest.raises(CutError, match=message):
        story_store.cut(text)


def test_events_beyond_the_store_are_refused(story_store: Store) -> None:
    """Reading at a cut the store does not hold raises CutError for known and unknown lanes."""
    for cut in ({"serve": 19}, {"moon": 1}):
        with pytest.raises(CutError, match="cut holds"):
            list(story_store.events(cut))


def test_a_step_of_two_runs_needs_the_run(story_store: Store, story: Any) -> None:
    """When two runs planned a step of that number, the run has to be named."""
    planned = next(e.record for e in story["train"] if isinstance(e.record, StepPlanned))
    with story_store.writer("other") as writer:
        writer.append([Event(planned, "second")]).result(30)
    with pytest.raises(CutError, match=r"demo \(actor\), second \(actor\); name the run"):
        story_store.cut("step:0")
    assert story_store.cut("step:0", run="second") == {"serve": 13}
    assert story_store.cut("step:0", run="demo") == {"serve": 14, "train": 2}


@pytest.mark.parametrize("count", range(9))
def test_a_cut_inside_a_frame(story_store: Store, story: Any, plain: Any, count: int) -> None:
    """A cut may end anywhere, also inside a frame: exactly that many events are read."""
    got = list(story_store.events({"train": count}))
    assert [plain(e, place=False) for e in got] == [plain(e, place=False) for e in story["train"][:count]]


def test_a_reader_goes_on_inside_a_frame(story_store: Store) -> None:
    """A reader that stopped at a limit, also inside a frame, hands out the rest, each event once."""
    reader = LaneReader(story_store.path, "train")
    seqs = []
    for limit in (3, 3, 5, 8, None):
        seqs.append([e.seq for batch in reader.poll(limit) for e in decode(batch, "train")])
    assert seqs == [[0, 1, 2], [], [3, 4], [5, 6, 7], []]


def test_table_equals_events(story_store: Store, plain: Any) -> None:
    """The Arrow table holds the same events in the same order, with the lane first."""
    for cut in (None, {"serve": 5, "train": 3}, {}):
        table = story_store.table(cut)
        batches = [(row.column("lane")[0].as_py(), row) for row in table.to_batches() if row.num_rows]
        back = [plain(e) for lane, b in batches for e in decode(b.select(b.schema.names[1:]), lane)]
        assert back == [plain(e) for e in story_store.events(cut)]
        assert table.schema.names[:2] == ["lane", "seq"]


def test_a_cut_is_the_same_for_ever(store: Store, notes: Any) -> None:
    """While events are appended, an earlier cut keeps giving the same rows, byte for byte."""
    with store.writer("a", AppendSettings(segment_bytes=3000)) as writer:
        writer.append(notes(5)).result(30)
        cut = store.head()
        before = store.table(cut)
        for i in range(5, 60, 5):
            writer.append(notes(5, i)).result(30)
            assert store.table(cut).equals(before)
        assert store.head() == {"a": 60}
        assert before.num_rows == 5
        assert [e.record.error for e in store.events({"a": 7})] == [f"note {i}" for i in range(7)]


READER = """
import sys
from rollbook import store as rb
tail = rb.open(sys.argv[1]).tail()
for _ in sys.stdin:
    print(*(f"{e.lane}/{e.seq}:{e.record.error}" for e in tail.poll()), sep=",", flush=True)
"""


def _ask(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return [part for part in process.stdout.readline().strip().split(",") if part]


def test_another_process_sees_what_was_acknowledged(
    store: Store, notes: Any, fork_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """While this process holds the lanes, another one reads each acknowledged event, once."""
    reader = fork_python(READER, store.path)
    with store.writer("a", AppendSettings(segment_bytes=2500)) as a, store.writer("b") as b:
        assert _ask(reader) == []
        for i in range(0, 30, 3):
            a.append(notes(3, i)).result(30)
            assert _ask(reader) == [f"a/{j}:note {j}" for j in range(i, i + 3)]
        b.append(notes(1)).result(30)
        assert _ask(reader) == ["b/0:note 0"]
        assert _ask(reader) == []
    assert reader.communicate(timeout=30)[1] == ""


def test_tail_hands_out_each_event_once(store: Store, notes: Any) -> None:
    """Polls give what is new, across lanes, segments and writers; `cut` is what was handed out."""
    with store.tail() as tail:
        assert tail.poll() == []
        seen = []
        for i in range(12):
            with store.writer("ab"[i % 2], AppendSettings(segment_bytes=1500)) as writer:
                writer.append(notes(2, 2 * i)).result(30)
                writer.append(notes(1, 100 + i)).result(30)
            seen += tail.poll()
            assert tail.cut() == store.head()
        assert tail.poll() == []
    assert len(seen) == 36
    by_lane = sorted((e.lane, e.seq, e.record.error) for e in seen)  # type: ignore[union-attr]
    assert by_lane == [(e.lane, e.seq, e.record.error) for e in store.events()]  # type: ignore[union-attr]


def test_tail_starts_at_a_cut(story_store: Store) -> None:
    """Events before the start are skipped; lanes the start does not name come from their first event."""
    tail = story_store.tail({"serve": 16})
    assert [(e.lane, e.seq) for e in tail.poll()] == [
        *[("serve", 16), ("serve", 17)],
        *[("train", i) for i in range(8)],
    ]


def test_a_tail_that_was_stopped_goes_on(story_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event this release cannot read raises FormatError; nothing is lost by it, if it is read later."""
    from rollbook.store.events import codec

    tail = story_store.tail()
    with monkeypatch.context() as patch:
        patch.setattr(codec, "RECORDS", {})
        with pytest.raises(FormatError):
            tail.poll()
        assert tail.cut() == {}
    assert [(e.lane, e.seq) for e in tail.poll()] == [(e.lane, e.seq) for e in story_store.events()]


def test_files_of_other_columns_are_refused(story_store: Store) -> None:
    """A segment whose schema is not this release's is a FormatError."""
    from rollbook.store.wal.files import Watermark
    from rollbook.store.wal.frame import EMPTY_CHAIN, HEADER_FRAME, encode_frame

    payload = pa.schema([pa.field("other", pa.int64())]).serialize()
    data = b"".join(bytes(b) for b in encode_frame(HEADER_FRAME, payload, 0, 0, EMPTY_CHAIN)[0])
    folder: Path = story_store.path / "lanes" / "serve"
    (folder / "00000001.wal").write_bytes(data)
    (folder / "WATERMARK").write_bytes(Watermark(1, len(data), 1).pack())
    with pytest.raises(FormatError, match="other columns"):
        list(story_store.events({"serve": 1}))


def test_a_missing_segment_is_damage_to_a_reader(store: Store, notes: Any) -> None:
    """A reader of a lane whose first segment is gone says so as CorruptionError."""
    for i in range(2):
        with store.writer("a") as writer:
            writer.append(notes(1, i)).result(30)
    (store.path / "lanes" / "a" / "00000001.wal").unlink()
    with pytest.raises(CorruptionError, match=r"event 0 of lane .a. is in no segment"):
        list(store.events())
