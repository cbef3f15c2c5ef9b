"""`rollbook show` finds what is meant, at any cut, in the log and in sealed files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer

from rollbook import store as rb
from rollbook.cli import app as cli
from rollbook.store import Event, Store
from rollbook.store.events import RewardAssigned, TrajectoryOpened
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import SealSettings
from rollbook.transcript.finding import NotFoundError, find_trajectory, near_names


@pytest.fixture
def show(
    told_tale: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `rollbook show ARGS --store DIR`: (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(
            sys, "argv", ["rollbook", "show", *map(str, args), "--store", str(told_tale.path)]
        )
        monkeypatch.setenv("COLUMNS", "140")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def test_by_name_or_id(show: Callable[..., tuple[int, str, str]]) -> None:
    """The client's name and our id lead to the same."""
    status, out, err = show("fix-readme")
    assert (status, err) == (0, "")
    assert out.startswith("trajectory  fix-readme  T-1 ")
    assert "├── 2  aaaa0002  extends 1  stop  8+4 tokens" in out
    assert show("T-1") == (status, out, err)


def test_json_is_one_object(show: Callable[..., tuple[int, str, str]]) -> None:
    """One object; one turn of it; with tokens if they are asked for."""
    value = orjson.loads(show("fix-readme", "--json")[1])
    assert (value["trajectory_id"], len(value["turns"])) == ("T-1", 7)
    assert "completion_ids" not in value["turns"][0]["answer"]
    [turn] = orjson.loads(show("fix-readme", "--json", "--turn", "2", "--tokens")[1])["turns"]
    assert (turn["turn_id"], turn["answer"]["completion_ids"]) == ("turn-aaaa0002", [9, 10, 11, 12])


def test_an_earlier_cut_shows_what_was_there(show: Callable[..., tuple[int, str, str]]) -> None:
    """At an earlier cut it is as it was: open, the second turn running, one reward fewer."""
    value = orjson.loads(show("fix-readme", "--json", "--as-of", "serve=5")[1])
    assert (value["status"], value["rewards"]) == ("open", [])
    assert [(t["status"], t["delivered"]) for t in value["turns"]] == [
        ("completed", "sent"),
        ("running", None),
    ]
    assert show("fix-readme", "--as-of", "serve=0")[0] == 2
    assert "the store has 24" in show("fix-readme", "--as-of", "serve=25")[2]


def test_one_turn_is_shown_by_number_or_id(show: Callable[..., tuple[int, str, str]]) -> None:
    """A turn by its number, its id, or the end of that."""
    for wanted in ("3", "turn-aaaa0003", "0003"):
        out = show("fix-readme", "--turn", wanted)[1]
        assert "\n3  aaaa0003  extends 1" in out
        assert "aaaa0002" not in out
    assert show("fix-readme", "--turn", "9")[2].startswith(
        "error: trajectory 'fix-readme' has no turn '9': give"
    )
    assert "has 7 turns 'aaaa000" not in show("fix-readme", "--turn", "x")[2]


def test_tokens_are_text_with_a_model_and_numbers_without(
    show: Callable[..., tuple[int, str, str]], tmp_path: Path, byte_level: Tokenizer
) -> None:
    """As text with a model, as numbers without one, not at all by default."""
    byte_level.save(str(tmp_path / "tokenizer.json"))
    assert "sampled" not in show("fix-readme")[1].split("fidelity")[1]
    assert "  sampled 9 10 [v4]11 12" in show("fix-readme", "--tokens")[1]
    assert "  sampled )*[v4]+," in show("fix-readme", "--model", tmp_path)[1]
    assert "  sampled " not in show("fix-readme", "--model", tmp_path, "--no-tokens")[1]
    assert "holds no tokenizer.json" in show("fix-readme", "--model", tmp_path / "none")[2]


# Finding --------------------------------------------------------------------------------------------


def _open(log: Store, lane: str, *openings: tuple[str, str, str]) -> None:
    with log.writer(lane) as writer:
        writer.append([Event(TrajectoryOpened(i, name), run) for i, name, run in openings]).result(30)


def test_an_unknown_name_suggests_near_names(show: Callable[..., tuple[int, str, str]]) -> None:
    """The error for an unknown name suggests similar names and says how to list all."""
    status, out, err = show("fix-raedme")
    assert (status, out) == (2, "")
    assert err == (
        "error: no trajectory 'fix-raedme' among 1; near names: fix-readme; "
        "list them: rollbook sql 'select run, trajectory from trajectories'\n"
    )
    assert show("fix-readme", "--run", "other")[2] == "error: no run 'other'; there are: demo\n"


def test_near_names_hold_the_text_or_resemble_it() -> None:
    """Those that hold the text come first, then by likeness; five at most, and none that is unlike."""
    names = ["alpha", "alphabet", "beta", "a-7", "alhpa", *(f"task-{i}" for i in range(9))]
    assert near_names("ALPHA", names) == ["alpha", "alphabet", "alhpa"]
    assert near_names("task", names) == [f"task-{i}" for i in range(5)]
    assert near_names("zzz", names) == []


def _seal(log: Store, lane: str) -> None:
    with log.writer(lane):  # the segment before is closed
        pass
    list(seal_closed(log.path, lane, SealSettings()))
    remove_sealed_wal(log.path, lane, current_units(log.path, lane), 0)
    assert not list(log.path.glob(f"lanes/{lane}/00000001.wal"))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_cut_hides_what_came_later(store: Store, sealed: bool) -> None:
    """A trajectory that was opened after the cut is not there, in the log as in a sealed unit."""
    _open(store, "a", ("01-abcdef", "one", "r1"), ("02-abcdef", "two", "r1"))
    if sealed:
        _seal(store, "a")
    assert find_trajectory(store, {"a": 1}, "one").run == "r1"
    with pytest.raises(NotFoundError, match="no trajectory 'two' among 1"):
        find_trajectory(store, {"a": 1}, "two")


def test_an_ambiguous_name_needs_a_run(store: Store) -> None:
    """A name may be in several runs, an id's end may be that of several; whole ones go before ends."""
    _open(store, "a", ("01-abcdef", "one", "r1"), ("02-abcdef", "two", "r1"), ("03-xyzxyz", "one", "r2"))
    _open(store, "b", ("04-000000", "abcdef", "r3"))
    cut = store.head()

    def found(wanted: str, run: str | None = None) -> str:
        return find_trajectory(store, cut, wanted, run).trajectory_id

    assert (found("two"), found("one", "r2"), found("xyzxyz"), found("03-xyzxyz")) == (
        *("02-abcdef", "03-xyzxyz", "03-xyzxyz", "03-xyzxyz"),
    )
    assert found("abcdef") == "04-000000"
    with pytest.raises(NotFoundError, match="named 'one', in runs r1, r2: name one with --run"):
        found("one")
    with pytest.raises(
        NotFoundError, match="2 trajectories are meant by 'abcdef', such as 01-abcdef, 02-abcdef"
    ):
        found("abcdef", "r1")
    with pytest.raises(NotFoundError, match="no trajectory 'xyz'"):
        found("xyz")


def test_sealing_changes_nothing_that_is_shown(
    told_tale: Store, show: Callable[..., tuple[int, str, str]]
) -> None:
    """Sealing changes nothing that is shown, nor does an event of another lane that came later."""
    before = show("fix-readme", "--json")[1]
    _seal(told_tale, "serve")
    assert show("fix-readme", "--json")[1] == before
    with told_tale.writer("judge") as writer:
        writer.append([Event(RewardAssigned("T-1", None, 0.5, "another"), "demo")]).result(30)
    rewards = orjson.loads(show("fix-readme", "--json")[1])["rewards"]
    assert [r["source"] for r in rewards] == ["agent", "another", "judge"]
    assert orjson.loads(show("fix-readme", "--json", "--as-of", "serve=24")[1])["rewards"] == [
        rewards[0],
        rewards[2],
    ]


def test_a_trajectory_among_many_is_shown_without_torch(
    store: Store, long_tale: Callable[..., list[Event]], run_python: Callable[..., tuple[int, str, str]]
) -> None:
    """128 turns of 100 tokens among 3,000 others: nothing that is heavy is imported for them."""
    with store.writer("serve") as writer:
        for i in range(47):
            writer.append(long_tale(64, key=f"F-{i}"))
        writer.append(long_tale(128, 50, 50)).result(60)
    code = (
        "import sys\nfrom rollbook.cli.show.command import show\nfrom pathlib import Path\n"
        "show('long-L-1', Path(sys.argv[1]), tokens=True)\n"
        "heavy = {'torch', 'transformers', 'megatron'} & set(sys.modules)\n"
        "print('DONE', sorted(heavy))\n"
    )
    status, out, err = run_python(code, store.path)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "DONE []"
    assert "128  00000127  extends 127  stop" in out


def test_show_changes_no_file_of_the_store(
    told_tale: Store, show: Callable[..., tuple[int, str, str]]
) -> None:
    """`rollbook show` changes no file of the store."""
    before = sorted((p, p.stat().st_mtime_ns) for p in told_tale.path.rglob("*"))
    show("fix-readme")
    assert sorted((p, p.stat().st_mtime_ns) for p in told_tale.path.rglob("*")) == before
    assert rb.open(told_tale.path).head() == {"serve": 24}
