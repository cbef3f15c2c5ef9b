"""Erasing a trajectory: no byte of its text is left anywhere, and nothing else changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.fakes.stories.records import turn_completed

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.errors import CorruptionError, LaneLockedError, UpkeepError
from rollbook.store.events.routed_experts import pack
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.log.reader import LaneReader
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.leases import lease_units
from rollbook.store.sealed.parquet import same_bits
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import all_units, current_units
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_store

SECRET = "XQ7-the-secret-ZK9"
SHARED = "a long system prompt that every agent shares " * 300
PROMPT, COMPLETION = (71_001, 71_002, 71_003), (71_004, 71_005)
"""Token ids of the trajectory to erase, which occur nowhere else."""
SMALL = AppendSettings(linger_ms=0, body_bytes=4096)


def _trajectory(name: str, prompt: tuple[int, ...], completion: tuple[int, ...], text: str) -> list[Any]:
    """A finished trajectory of three turns that says `text` wherever a trajectory can say something."""
    first = [{"role": "system", "content": SHARED}, {"role": "user", "content": f"{text} please"}]
    then = [{"role": "user", "content": f"{text} " * 1500}]  # a body of its own
    tools = [{"type": "function", "function": {"name": "f", "description": f"{text} " * 900}}]
    request = {"temperature": 1.0, "tools": tools, f"field {text}": True}
    ask = (request, f"model-{text}", {"max_new_tokens": 2, "seed": 0}, {f"field {text}": False}, "key")
    whole = (*prompt, *completion, 9)

    def done(turn: str, delta: tuple[int, ...], sent: tuple[int, ...]) -> Any:
        return turn_completed(
            name,
            turn,
            policy_version=3,
            prompt_ids=np.array(delta, np.int32),
            completion_ids=np.array(completion, np.int32),
            logprobs=np.array([-0.0, -1.5], np.float32),
            version_spans=(kinds.VersionSpan("actor", 3, 0, 2),),
            prompt_length=len(sent),
            prompt_sha256=prompt_sha256(np.array(sent, np.int32)),
            reply={"role": "assistant", "content": f"it is {text}"},
            logprob_semantics={"temperature": 1.0},
        )

    return [
        kinds.TrajectoryOpened(name, f"name-{name}", "g", f"task {text}", "train", {"label": text}),
        kinds.TurnRequested(name, f"{name}.0", "r", None, "first_turn", None, 0, first, *ask),
        done(f"{name}.0", prompt, prompt),
        kinds.TurnDelivered(name, f"{name}.0", "sent"),
        kinds.TurnRequested(name, f"{name}.1", "r", f"{name}.0", None, f"{name}.0", 2, then, *ask),
        done(f"{name}.1", (9,), whole),
        kinds.TurnDelivered(name, f"{name}.1", "sent"),
        kinds.TurnRequested(name, f"{name}.2", "r", None, "first_turn", None, 0, first, *ask),
        kinds.TurnFailed(name, f"{name}.2", f"refused: {text}"),
        kinds.RewardAssigned(name, None, 0.5),
        kinds.TrajectoryFinished(name, "completed", True),
    ]


def _append(log: Store, records: list[Any], lane: str = "serve") -> None:
    """Append to a fresh segment of a lane; the lane's last segment is closed by the next one."""
    with log.writer(lane, SMALL) as writer:
        for i in range(0, len(records), 3):
            writer.append([Event(record, "demo") for record in records[i : i + 3]]).result(30)


def _tell(log: Store) -> None:
    """A trajectory with the secret between others, over three segments and two lanes, some of it sealed."""
    secret = _trajectory("bad", PROMPT, COMPLETION, SECRET)
    _append(log, [*_trajectory("a", (1, 2, 3), (4, 5), "words of a"), *secret[:5]])
    _append(log, [*secret[5:], *_trajectory("b", (1, 2, 4), (5, 5), "words of b")])
    _append(
        log,
        [kinds.LabelAdded("bad", None, "note", f"judge saw {SECRET}"), kinds.RewardAssigned("a", None, 2)],
        "judge",
    )
    seal(log, "serve")
    _append(log, _trajectory("c", (7,), (8, 8), "words of c"))


def seal(log: Store, *lanes: str) -> None:
    """Seal what is closed, each segment as a unit of its own, with what is derived from it."""
    for lane in lanes:
        for unit in seal_closed(log.path, lane, SealSettings()):
            build_derived(log.path, unit)


def _leaks(log: Store, *needles: bytes) -> list[str]:
    """Files of the store that hold one of the needles, as they are or as the values in a Parquet file."""
    leaks = []
    for path in sorted(p for p in log.path.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if path.suffix == ".parquet":
            data += b"".join(_values(pq.read_table(path)))
            data += repr(pq.read_metadata(path).to_dict()).encode()
        if any(needle in data for needle in needles):
            leaks.append(str(path.relative_to(log.path)))
    return leaks


def _values(table: pa.Table) -> Iterator[bytes]:
    for column in table.columns:
        for chunk in column.chunks:
            yield from (b.to_pybytes() for b in chunk.buffers() if b is not None)


def _needles() -> list[bytes]:
    ids = [np.array(ids, "<i4").tobytes() for ids in (PROMPT, COMPLETION)]
    return [SECRET.encode(), *ids]


def _rows_of_others(log: Store, cut: dict[str, int]) -> pa.Table:
    """Rows of the log that erasing `bad` must not touch."""
    table = log.table(cut).combine_chunks()
    texts = table["extra"].to_pylist()
    ids = table["trajectory_id"].to_pylist()
    keep = [
        t != "bad" and not (k == "body.stored" and SECRET in text)
        for t, k, text in zip(ids, table["kind"].to_pylist(), texts, strict=True)
    ]
    return table.filter(pa.array(keep))


def _change_of(log: Store, cut: dict[str, int], rows: pa.Table) -> str | None:
    """What is not as it was of these rows of a cut, looked up by their places; None if nothing."""
    table = log.table(cut).combine_chunks()
    places = set(zip(rows["lane"].to_pylist(), rows["seq"].to_pylist(), strict=True))
    there = [p in places for p in zip(table["lane"].to_pylist(), table["seq"].to_pylist(), strict=True)]
    return same_bits(rows, table.filter(pa.array(there)))


@pytest.fixture(scope="module")
def log_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store as `log`; only read it."""
    store = rb.open(tmp_path_factory.mktemp("told") / "store", create=True)
    _tell(store)
    return store.path


@pytest.fixture
def log(log_once: Path, tmp_path: Path) -> Store:
    """A store in which the trajectory `bad` says a secret everywhere, beside others that do not."""
    return rb.open(shutil.copytree(log_once, tmp_path / "store"))


def test_no_byte_of_it_is_left(log: Store) -> None:
    """After the erasure no file holds the secret's text or tokens; before it many did."""
    assert len(_leaks(log, SECRET.encode())) >= 4
    assert len(_leaks(log, *_needles()[1:])) >= 2
    report = erase_trajectory(log, "name-bad", "a key leaked")
    assert _leaks(log, *_needles()) == []
    assert (report.trajectory_id, report.run, report.tokens_kept) == ("bad", "demo", False)
    assert (report.events, report.finished, report.shared_bodies) == (9, True, 1)
    assert report.bodies >= 2
    assert [u.rpartition("/")[0] for u in report.units] == ["judge", "serve", "serve"]


def test_nothing_else_changes(log: Store) -> None:
    """All rows of other trajectories, the shared bodies too, are the same bit for bit at the same places."""
    before = log.head()
    rows, others = _rows_of_others(log, before), {t: log.trajectories()[t] for t in "abc"}
    erase_trajectory(log, "bad", "a key leaked")
    assert _change_of(log, before, rows) is None
    assert log.table(before).num_rows == sum(before.values())
    after = log.trajectories()
    for name, known in others.items():
        turn = known.turns[f"{name}.1"]
        assert after[name].messages(after[name].turns[f"{name}.1"]) == known.messages(turn)
        assert after[name].turns[f"{name}.1"].requested.request == turn.requested.request
    assert after["a"].messages(after["a"].turns["a.0"])[0]["content"] == SHARED


def test_what_an_erased_trajectory_still_says(log: Store) -> None:
    """Ids, places, times, rewards, lengths and spans stay; text and tokens are the forms for what is gone."""
    before = {e.event_id: e for e in log.events()}
    erase_trajectory(log, "bad", "a key leaked")
    after = {e.event_id: e for e in log.events() if e.run == "demo"}
    for event_id, event in before.items():
        seen = after[event_id]
        assert (seen.lane, seen.seq, seen.kind, seen.time_us) == (
            event.lane,
            event.seq,
            event.kind,
            event.time_us,
        )
    bad = log.trajectories()["bad"]
    first, second, failed = bad.turns.values()
    assert (bad.opened.name, bad.opened.task, bad.opened.labels) == ("name-bad", None, {"erased": True})
    assert bad.reward() == 0.5
    assert bad.finished == kinds.TrajectoryFinished("bad", "completed", True)
    assert first.tokens_erased
    assert bad.prompt_ids(second).tolist() == [-1] * 6
    done = second.completed
    assert done is not None
    assert (done.prompt_ids.tolist(), done.completion_ids.tolist(), done.logprobs) == ([-1], [-1, -1], None)
    assert (done.prompt_length, done.prompt_sha256, done.version_spans[0].end) == (6, "", 2)
    assert (done.reply, done.flags) == ({"erased": True}, ["text_erased", "tokens_erased"])
    assert bad.messages(second) == [{"erased": True}] * 3
    assert second.requested.request == {"erased": True}
    assert failed.failed == kinds.TurnFailed("bad", "bad.2", "erased")
    [label] = [e.record.value for e in log.events() if isinstance(e.record, kinds.LabelAdded)]
    assert label == {"erased": True}


def test_sql_shows_an_erased_trajectory_without_text(log: Store) -> None:
    """The views have its rows: no text, ids of -1, lengths as before, and the event that says why."""
    erase_trajectory(log, "bad", "a key leaked")
    sql = rb.connect(log.path)
    rows = sql.execute(
        "select content, completion_length, prompt_length, reply->>'$.erased', list_contains("
        "flags::varchar[], 'tokens_erased') from turns "
        "where trajectory = 'name-bad' and status = 'completed' order by seq"
    ).fetchall()
    assert rows == [(None, 2, 3, "true", True), (None, 2, 6, "true", True)]
    tokens = sql.execute("select token_id, logprob from tokens where trajectory_id = 'bad'").fetchall()
    assert tokens == [(-1, None)] * 4
    query = "select trajectory_id, extra->>'$.reason', extra->>'$.events' from events where kind = ?"
    assert sql.execute(query, ["trajectory.erased"]).fetchall() == [("bad", "a key leaked", "9")]
    assert sql.execute("select task, reward from trajectories where trajectory = 'name-bad'").fetchall() == [
        (None, 0.5)
    ]


def test_keeping_the_tokens(log: Store) -> None:
    """With --keep-tokens the ids and logprobs stay bit for bit; erasing again without it takes them too."""
    before = log.trajectories()["bad"].turns["bad.1"].completed
    erase_trajectory(log, "bad", "a name", keep_tokens=True)
    assert _leaks(log, SECRET.encode()) == []
    bad = log.trajectories()["bad"]
    turn = bad.turns["bad.1"]
    assert before is not None
    assert turn.completed is not None
    assert turn.completed.logprobs is not None
    assert before.logprobs is not None
    assert turn.completed.logprobs.tobytes() == before.logprobs.tobytes()
    assert bad.prompt_ids(turn).tolist() == [*PROMPT, *COMPLETION, 9]  # and its sha256 fits
    assert (turn.tokens_erased, turn.completed.flags) == (False, ["text_erased"])
    erase_trajectory(log, "bad", "the tokens too")
    assert _leaks(log, *_needles()) == []
    kept = [e.record.tokens_kept for e in log.events() if isinstance(e.record, kinds.TrajectoryErased)]
    assert kept == [True, False]


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_routed_experts_go_with_the_tokens(tmp_path: Path, keep_tokens: bool) -> None:
    """They tell of the tokens, also where they stand apart as a body; another trajectory's stay."""
    chosen = np.random.default_rng(0).integers(0, 128, (40, 48, 8))
    experts = {name: pack(np.roll(chosen, shift), 0) for shift, name in enumerate(("ours", "other"))}
    store = rb.open(tmp_path / "store", create=True)
    with store.writer("serve", SMALL) as writer:
        for name, packed in experts.items():
            records = _trajectory(name, PROMPT, COMPLETION, SECRET)
            records = [
                replace(r, routed_experts=packed) if hasattr(r, "finish_reason") else r for r in records
            ]
            writer.append([Event(r, "run") for r in records]).result(30)
    erase_trajectory(store, "ours", "test", keep_tokens=keep_tokens)
    seen = {}
    for name, packed in experts.items():
        trajectory = store.trajectory(name)
        assert trajectory is not None
        done = [turn.completed for turn in trajectory.turns.values() if turn.completed is not None]
        seen[name] = {completed.routed_experts == packed for completed in done}
    assert seen == {"ours": {keep_tokens}, "other": {True}}
    assert bool(_leaks(store, experts["ours"]["data"][:64].encode())) == keep_tokens


def test_asking_again_changes_nothing(log: Store) -> None:
    """A second erasure rewrites nothing and adds no event; nor does a weaker one."""
    erase_trajectory(log, "bad", "a key leaked")
    units = {lane: current_units(log.path, lane) for lane in ("serve", "judge")}
    head = log.head()
    for keep in (False, True):
        assert erase_trajectory(log, "bad", "again", keep_tokens=keep).units == ()
    assert log.head() == head
    assert {lane: current_units(log.path, lane) for lane in ("serve", "judge")} == units


def test_manifests_and_the_lane_go_on(log: Store, notes: Callable[..., list[Event]]) -> None:
    """The rewritten unit names the erasure, order and chain are unbroken, and writers go on."""
    before = current_units(log.path, "serve")[0]
    erase_trajectory(log, "bad", "a key leaked")
    unit = current_units(log.path, "serve")[0]
    assert [(e.trajectory_id, e.tokens_kept) for e in unit.erased] == [("bad", False)]
    assert (unit.segments, unit.chain_before) == (before.segments, before.chain_before)
    assert unit.generation == before.generation + 1
    assert all_units(log.path, "serve").count(unit) == 1
    head = log.head()["serve"]
    with log.writer("serve") as writer:
        assert writer.append(notes(1)).result(30) == head


def test_readers_that_have_it_open(log: Store) -> None:
    """A lease keeps nothing; memory that is mapped stays with its reader, and a reader that goes on does."""
    batches = LaneReader(log.path, "serve").poll()
    first = next(batches)
    _, lease = lease_units(log.path, ["serve"])
    held = log.table()
    with lease:
        erase_trajectory(log, "bad", "a key leaked")
        assert _leaks(log, *_needles()) == []
    assert SECRET in "".join(held["extra"].to_pylist())
    rest = [*first["seq"].to_pylist(), *(seq for batch in batches for seq in batch["seq"].to_pylist())]
    assert rest == list(range(log.head()["serve"]))


def test_merged_units_stay_erased(log: Store) -> None:
    """Compaction carries the erasure along, and asking again finds nothing."""
    erase_trajectory(log, "bad", "a key leaked")
    for i in range(3):
        _append(log, _trajectory(f"more{i}", (7,), (8, 8), "words"))
        Sealer(log).run_once()
    [unit] = [u for u in current_units(log.path, "serve") if u.first == 1]
    assert unit.last > 3
    assert {e.trajectory_id for e in unit.erased} == {"bad"}
    assert erase_trajectory(log, "bad", "again").units == ()
    assert _leaks(log, *_needles()) == []
    assert [v.fault for v in verify_store(log)] == [None] * len(log.lanes())


def test_an_open_segment_of_a_live_writer(store: Store) -> None:
    """Events in a segment that is still written are not erased: the error says where, and until when."""
    _append(store, _trajectory("a", (1,), (2, 2), "a"))
    secret = [Event(record, "demo") for record in _trajectory("bad", PROMPT, COMPLETION, SECRET)]
    with store.writer("serve", SMALL) as writer:
        writer.append(secret).result(30)
        files = {p: p.stat().st_mtime_ns for p in store.path.rglob("*.wal") if p.parent.name == "serve"}
        with pytest.raises(LaneLockedError, match=r"lane 'serve'.*within 60 s.*Nothing was erased"):
            erase_trajectory(store, "bad", "too early")
        assert {
            p: p.stat().st_mtime_ns for p in store.path.rglob("*.wal") if p.parent.name == "serve"
        } == files
        assert store.trajectories()["bad"].opened.task == f"task {SECRET}"
    erase_trajectory(store, "bad", "the writer is gone")
    assert _leaks(store, *_needles()) == []


def test_a_live_writer_whose_segment_has_rolled(store: Store) -> None:
    """Once the segment is closed its writer may go on: it is neither stopped nor disturbed."""
    short = AppendSettings(linger_ms=0, segment_bytes=1)
    secret = [Event(record, "demo") for record in _trajectory("bad", PROMPT, COMPLETION, SECRET)]
    with store.writer("serve", short) as writer:
        writer.append(secret).result(30)
        later = Event(kinds.RewardAssigned("a", None, 1.0, "judge"), "demo")
        writer.append([later]).result(30)
        erase_trajectory(store, "bad", "in the middle")
        assert _leaks(store, *_needles()) == []
        writer.append([Event(kinds.RewardAssigned("bad", None, 2.0, "judge"), "demo")]).result(30)
    assert store.trajectories()["bad"].reward("judge") == 2.0


def test_what_recipes_count_by_goes_with_the_tokens(store: Store) -> None:
    """The source of a reward and of a preference stays while the tokens do; a label's name never does."""
    named = [
        kinds.RewardAssigned("bad", None, 1.0, SECRET),
        kinds.PreferenceAdded("bad", "a", None, SECRET),
        kinds.LabelAdded("bad", None, SECRET, 1, SECRET),
    ]
    _append(store, [*_trajectory("bad", PROMPT, COMPLETION, "words"), *named])
    erase_trajectory(store, "bad", "asked", keep_tokens=True)
    rewards, preferences, labels = (
        [e.record for e in store.events() if isinstance(e.record, type(record))] for record in named
    )
    assert (rewards[-1].source, preferences[-1].source) == (SECRET, SECRET)
    assert (labels[-1].name, labels[-1].source) == ("erased", "erased")
    erase_trajectory(store, "bad", "asked")
    assert _leaks(store, SECRET.encode()) == []


def test_an_ambiguous_name_needs_a_run(log: Store) -> None:
    """An unknown name, and one that two runs have, are told apart; --run decides."""
    with pytest.raises(UpkeepError, match="no trajectory 'nope'"):
        erase_trajectory(log, "nope", "x")
    with log.writer("other") as writer:
        writer.append([Event(kinds.TrajectoryOpened("x", "name-a"), "second")]).result(30)
    with pytest.raises(UpkeepError, match="in runs demo, second: name one with --run"):
        erase_trajectory(log, "name-a", "x")
    assert erase_trajectory(log, "name-a", "x", run="second").trajectory_id == "x"


def test_a_damaged_unit_stops_it_before_it_begins(log: Store) -> None:
    """Where one of the units cannot be read, none is rewritten."""
    seal(log, "judge")
    with log.writer("judge"):
        pass
    seal(log, "judge")
    [damaged] = current_units(log.path, "serve")
    path = log.path / "sealed" / "serve" / damaged.name / "turns.parquet"
    data = bytearray(path.read_bytes())
    # In the first pages, where every byte counts; the middle of so small a file may be one of the footer's.
    for place in range(64, 96):
        data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"turns\.parquet"):
        erase_trajectory(log, "bad", "x")
    units = [u for lane in ("judge", "serve") for u in current_units(log.path, lane)]
    assert [(u.generation, u.erased) for u in units] == [(1, ())] * len(units)


KILLED = """
import os, signal, sys
from rollbook import store as rb
from rollbook.store.upkeep.erase import erase_trajectory

path, limit = sys.argv[1], int(sys.argv[2])
log = rb.open(path)
left = limit

def count(event, args):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
erase_trajectory(log, "bad", "a key leaked")
print("done", limit - left)
"""


@pytest.mark.crashes
def test_a_killed_erasure_is_finished_by_asking_again(
    log: Store, tmp_path: Path, run_python: Callable[..., tuple[int, str, str]]
) -> None:
    """Killed at any change it makes to the folder, it is finished by asking again; the rest is the same."""
    before = log.head()
    rows = _rows_of_others(log, before)
    code, out, err = run_python(KILLED, shutil.copytree(log.path, tmp_path / "whole"), 10**6)
    assert code == 0, err
    changes = int(out.split()[1])
    assert changes > 20
    for limit in range(1, changes + 1, max(changes // 7, 1)):
        copy = rb.open(shutil.copytree(log.path, tmp_path / f"at-{limit}"))
        assert run_python(KILLED, copy.path, limit)[0] == -9
        assert copy.trajectories()["b"].messages  # readable in between
        erase_trajectory(copy, "bad", "finished")
        assert _leaks(copy, *_needles()) == [], limit
        assert _change_of(copy, before, rows) is None, limit
        erased = [e.record for e in copy.events() if isinstance(e.record, kinds.TrajectoryErased)]
        assert erased[-1].events == 9
        assert [v.fault for v in verify_store(copy)] == [None] * len(copy.lanes()), limit
