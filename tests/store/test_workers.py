"""Work in slices, here and by a real Ray: `samples`, `export`, `score` and `replay run` give the same.

Ray is started once, for all tests that are marked `ranks`.
"""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from tests.fakes.processes.ray_nodes import ray_nodes
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of
from tests.fakes.stories.scattered import seal_in_units

from rollbook import store as rb
from rollbook.store import Store, workers
from rollbook.store.errors import ConfigError, WorkerLostError
from rollbook.store.events import RewardAssigned, RunOpened, TrajectoryAdopted
from rollbook.store.fold.trajectory import fold
from rollbook.store.interchange.export import export_store
from rollbook.store.interchange.selection import TrajectorySet, in_that_order, trajectories
from rollbook.store.settings import AppendSettings
from rollbook.store.workers import HERE, StoreThere, Workers, sliced, spread, store_there
from rollbook.train.select.samples import all_samples

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def mixed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with sealed units and a tail: a trajectory that another lane adopted, some that others judged,
    one that forked, and one that is open."""
    log = rb.open(tmp_path_factory.mktemp("mixed") / "store", create=True)
    forked = [fabric.T([5, 6], [7, 8]), fabric.T([9], [10, 11], 0), fabric.T([12], [13], 0)]
    sealed = fabric.events(
        [*fabric.teacher_records(18), *fabric.records("forked", forked), *fabric.rollout_records(6, 4)]
    )
    moved = fabric.events(fabric.records("moved", forked[:2]))
    live = fabric.events(
        [*fabric.records("open", forked, finished=False), *fabric.teacher_records(20, "late")]
    )
    with log.writer("serve", AppendSettings(segment_bytes=1)) as writer:
        for start in range(0, len(sealed), 20):
            writer.append(sealed[start : start + 20]).result(30)
        writer.append(moved[:3]).result(30)
    seal_in_units(log, "serve", at_once=4)
    with log.writer("serve") as writer:
        writer.append(live).result(30)
    adopted = TrajectoryAdopted("moved", "serve", moved[2].event_id)
    fabric.append(log, [adopted], "other")
    with log.writer("other") as writer:
        writer.append(moved[3:]).result(30)
    for lane in ("a-judge", "z-judge"):
        late = [RewardAssigned(name, None, 0.5, lane) for name in ("moved", "forked", "open", "late3")]
        fabric.append(log, late, lane)
    return log.path


@pytest.fixture
def mixed(mixed_path: Path) -> Store:
    """That store, which is only read."""
    return rb.open(mixed_path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a node, a CPU each."""
    with ray_nodes({}) as nodes:
        yield nodes


def test_results_come_in_order_as_they_are_asked_for() -> None:
    """What a slice raises is raised in its place."""
    seen: list[int] = []

    def slices() -> Iterator[int]:
        for number in (4, 2, 0):
            seen.append(number)
            yield number

    with spread(partial(partial, operator.truediv, 8), HERE) as results:
        given = results(slices())
        assert (next(given), seen) == (2.0, [4])
        assert next(given) == 4.0
        with pytest.raises(ZeroDivisionError):
            next(given)
    assert list(sliced("abcde", 2)) == ["ab", "cd", "e"]


def test_samples_are_those_of_all_trajectories(mixed: Store, cli: Cli) -> None:
    """Printed slice by slice, they are the list of all; and so with a table, a run, and nothing at all."""
    every = all_samples(fold(mixed.events()).values())
    assert len(every) > 3 * workers.TRAJECTORIES
    whole = orjson.dumps([sample.as_json() for sample in every], option=orjson.OPT_INDENT_2).decode()
    assert cli("samples", "--store", mixed.path, "--json") == (0, f"{whole}\n", "")
    _, table, _ = cli("samples", "--store", mixed.path)
    names = [line.split()[0] for line in table.splitlines()[1:] if line.strip()]
    assert names == [sample.name for sample in every]
    assert cli("samples", "--store", mixed.path, "--json", "--as-of", "serve=1") == (0, "[]\n", "")


def test_the_order_of_exports_is_known_before(mixed: Store) -> None:
    """With the events of each, for several lanes and where there is nothing."""
    for selection in (
        TrajectorySet(mixed, mixed.head()),
        TrajectorySet(mixed, mixed.head(), "demo", "teacher"),
        TrajectorySet(mixed, {}),
    ):
        counts: list[int] = []
        given = [t.opened.trajectory_id for t in trajectories(selection, counts.append)]
        order = in_that_order(selection)
        assert [*order] == given
        assert sum(order.values()) == sum(counts)


def test_a_host_without_the_store(mixed: Store, tmp_path: Path) -> None:
    """Whoever has none, another one, or not all of it is told what to do."""
    there = store_there(mixed, mixed.head(), Workers(2))
    assert there.open()[1] == mixed.head()
    elsewhere = store_there(mixed, mixed.head(), Workers(2, tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nowhere on host .*is no store: .* name it by --ray-store"):
        elsewhere.open()
    other = rb.open(tmp_path / "other", create=True)
    with pytest.raises(ConfigError, match=r"other on host .* is another store"):
        replace(there, folder=other.path).open()
    with pytest.raises(ConfigError, match=r"does not have all of the store: cut .* holds 999999"):
        StoreThere(mixed.path, mixed.store_id, "serve=999999").open()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["samples", "--ray-store", "there"], "add --ray N"),
        (["samples", "--ray", "-1"], "greater than or equal to 0"),
        (["samples", "--ray", "2", "--recipe", "r.toml"], "reads no token"),
        (["export", "--to", "o", "--format", "jsonl", "--ray-store", "there"], "add --ray N"),
        (["replay", "run", "--ray", "2", "--jobs", "2"], "name one of the two"),
    ],
    ids=["store", "less than none", "recipe", "export", "jobs"],
)
def test_options_that_do_not_go_together(mixed: Store, cli: Cli, words: list[str], message: str) -> None:
    """Are told before anything is read, or Ray is started."""
    code, out, err = cli(*words, "--store", mixed.path)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", "").split())


# By a real Ray ------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.usefixtures("cluster")
def test_samples_by_ray(mixed: Store, cli: Cli) -> None:
    """Are the same, on a terminal and for machines."""
    for words in (["--json"], [], ["--trajectory", "moved", "--json"]):
        here = cli("samples", "--store", mixed.path, *words)
        assert cli("samples", "--store", mixed.path, *words, "--ray", 2) == here
        assert here[0] == 0


@pytest.mark.ranks
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("format_", ["parquet", "jsonl", "datasets"])
def test_exports_by_ray(mixed: Store, cli: Cli, tmp_path: Path, format_: str) -> None:
    """Are the same files, byte for byte."""
    command = ("export", "--store", mixed.path, "--format", format_, "--to")
    told = [cli(*command, tmp_path / "one", "--json")]
    told += [cli(*command, tmp_path / "two", "--json", "--ray", 2)]
    assert [code for code, *_ in told] == [0, 0]
    one, two = (orjson.loads(out) for _, out, _ in told)
    assert one["rows"] == two["rows"]
    assert _files(tmp_path / "one") == _files(tmp_path / "two") != {}


def _files(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.ranks
@pytest.mark.torch
@pytest.mark.usefixtures("cluster")
def test_scores_by_ray(mixed: Store, cli: Cli, tmp_path: Path) -> None:
    """Are the same rewards in the same order, once each."""
    from transformers import AutoModelForSequenceClassification

    config = fabric.tiny_config(num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    given = {}
    for name, more in (("one", []), ("two", ["--ray", 2])):
        log = rb.open(shutil.copytree(mixed.path, tmp_path / name))
        words = ("score", tmp_path / "model", "--store", log.path, "--run", "demo", "--source", "judge")
        code, out, err = cli(*words, "--json", *more)
        assert code == 0, err
        assert orjson.loads(out)["scored"] > 60
        again = orjson.loads(cli(*words, "--json", *more)[1])
        assert (again["scored"], again["already_there"]) == (0, orjson.loads(out)["scored"])
        opened = [record for record in records_of(log, RunOpened) if record.command == "score"]
        given[name] = [r for r in records_of(log, RewardAssigned) if r.source == "judge"], opened
    assert given["two"] == given["one"]


@pytest.mark.ranks
@pytest.mark.torch
@pytest.mark.usefixtures("cluster")
def test_a_stretch_by_ray(trained: Callable[..., Store], cli: Cli) -> None:
    """Is proven the same, and where a step differs the same one is named."""
    from tests.replay.conftest import Tamper

    log = trained()
    command = ("replay", "run", "--store", log.path, "--json")
    here = cli(*command)
    assert here[0] == 0
    assert cli(*command, "--ray", 2) == here
    Tamper.event(
        log, "step.committed", lambda r: replace(r, digests=r.digests | {"losses": "0" * 64}), step=5
    )
    here = cli(*command)
    assert (here[0], orjson.loads(here[1])["steps"][5]["verdict"]) == (1, "differs")
    assert cli(*command, "--ray", 2) == here


@pytest.mark.ranks
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_is_killed_is_made_anew(
    mixed: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of an export: its bytes are the same. One that may not be made anew is an error, and
    nothing is left behind, nor printed."""
    monkeypatch.setattr("rollbook.store.interchange.export.sliced", partial(sliced, size=2))
    export_store(mixed.path, tmp_path / "one", "jsonl")
    killed = _Killing()
    export_store(mixed.path, tmp_path / "two", "jsonl", progress=killed, workers=Workers(2))
    assert killed.pids
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    monkeypatch.setattr(workers, "RESTARTS", 0)
    with pytest.raises(WorkerLostError, match="a worker of Ray was lost"):
        export_store(mixed.path, tmp_path / "three", "jsonl", progress=_Killing(), workers=Workers(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    assert capsys.readouterr().out == ""


class _Killing:
    """A progress that kills the workers at the first sign of it."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def __call__(self, what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
        return nullcontext(self._advance)

    def _advance(self, count: int) -> None:
        if not self.pids:
            for process in psutil.process_iter(["cmdline"]):
                if "SliceWorker" in " ".join(process.info["cmdline"] or []):
                    self.pids.append(process.pid)
                    process.kill()


@pytest.mark.ranks
@pytest.mark.usefixtures("cluster")
def test_work_that_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is tried again a few times, and then is one error; an error of work is raised as it is, and finds the
    variables that workers were given."""
    monkeypatch.setattr(workers, "RESTARTS", 1)
    with (
        spread(partial(getattr, os, "_exit"), Workers(1)) as results,
        pytest.raises(WorkerLostError, match=r"each of 1 times .* Ray says:"),
    ):
        list(results([1]))
    with spread(partial(getattr, os, "getenv"), Workers(1, environment={"OWN": "yes"})) as found:
        assert list(found(["OWN", "OWNED"])) == ["yes", None]
    with spread(partial(getattr, operator, "neg"), Workers(2)) as negative:
        assert list(negative(range(100))) == [-number for number in range(100)]
        assert list(negative([])) == []
        with pytest.raises(TypeError, match="bad operand"):
            list(negative([1, "no number", 2]))


@pytest.mark.ranks
@pytest.mark.usefixtures("cluster")
def test_there_is_no_room_or_no_store(
    mixed: Store, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error says what a worker takes and what there is, or where Ray has a worker without the store."""
    import ray

    code, _, err = cli("samples", "--store", mixed.path, "--ray", 1, "--ray-store", tmp_path / "nowhere")
    assert code == 2
    assert "is no store: workers read the store by its folder" in err
    with spread(partial(getattr, operator, "neg"), Workers(2)) as held:
        while ray.available_resources().get("CPU"):
            assert list(held(range(8))) == [-number for number in range(8)]
        monkeypatch.setattr(workers, "ROOM_S", 1.0)
        with (
            spread(partial(getattr, operator, "neg"), Workers(1)) as none,
            pytest.raises(ConfigError, match=r"no room for a worker .* takes a CPU, .* 0 of 2 CPUs"),
        ):
            list(none([1]))
