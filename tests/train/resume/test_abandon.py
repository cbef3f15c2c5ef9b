"""`rollbook train --abandon-after`: a run goes on from a checkpoint where it can no longer be resumed."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of
from tests.fakes.stories.versions import fold_versions

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ReplayError, TrainError
from rollbook.store.events import (
    CheckpointWritten,
    PolicyPublished,
    SampleDropped,
    StepAbandoned,
    StepCommitted,
    StepPlanned,
)
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.testing.ledger import TRAINED, WAITING, fold_ledger
from rollbook.train.checkpoints.checkpoint import read_checkpoint
from rollbook.train.loop.trainer import Trainer

Stores = Callable[..., Store]


def _stop(log: Store, settings: Any, after: int) -> None:
    """Train, and be killed once step `after` is committed: no checkpoint is written on the way out."""

    class Killed(BaseException):
        pass

    def dying(self: Trainer) -> None:
        publish(self)
        if self.step == after:
            raise Killed

    publish = Trainer.publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "publish", dying)
        with pytest.raises(Killed):
            fabric.train(log, settings)


def _go_back(cli: Any, tmp_path: Path, log: Store, settings: Any, version: int) -> str:
    """`rollbook train CONFIG --abandon-after VERSION`; what it says."""
    (tmp_path / "train.toml").write_text(fabric.toml(settings))
    command = ("train", tmp_path / "train.toml", "--store", log.path, "--abandon-after", version)
    code, _, err = cli(*command)
    assert code == 0, err
    return str(err)


def _terms(log: Store) -> dict[str, int]:
    """Term -> tokens, of which the fold and the view must say the same."""
    folded: Counter[str] = Counter()
    for (_, (term, _)), entry in fold_ledger(log.events()).entries.items():
        folded[term] += entry.tokens
    rows = rb.connect(log.path).execute("SELECT term, sum(tokens) FROM ledger GROUP BY term").fetchall()
    assert {term: tokens for term, tokens in rows if tokens} == +folded
    return dict(folded)


@pytest.fixture(scope="module")
def gone_back_path(recorded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine steps, of which those after version 4 were taken twice: stopped at 6, and back to 4.

    Copy it; never write.
    """
    log = rb.open(shutil.copytree(recorded_path, tmp_path_factory.mktemp("gone-back") / "store"))
    _stop(log, fabric.config(fabric.SFT), 6)
    with contextlib.redirect_stderr(io.StringIO()) as err:
        fabric.train(log, fabric.config(fabric.SFT), abandon_after=4)
    assert "abandoned 2 steps (4 to 5), which made versions 5 to 6" in err.getvalue()
    assert "from version 4, as version 7" in err.getvalue()
    assert "going on after 4 of 9 steps" in err.getvalue()
    return log.path


@pytest.fixture
def gone_back(gone_back_path: Path, tmp_path: Path) -> Store:
    """A copy of the store that went back."""
    return rb.open(shutil.copytree(gone_back_path, tmp_path / "gone-back"))


def test_it_ends_with_the_weights_of_a_run_that_never_stopped(gone_back: Store, trained: Stores) -> None:
    """The same batches on the same weights and optimizer state, under new numbers."""
    plans, commits = records_of(gone_back, StepPlanned), records_of(gone_back, StepCommitted)
    assert [(p.step, p.attempt, p.policy_version) for p in plans] == [
        *((step, 1, step) for step in range(6)),
        *((step, 1, step + 1) for step in range(6, 11)),
    ]
    assert [c.policy_version for c in commits] == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    whole = trained()
    kept = [plan.samples for plan in [*plans[:4], *plans[6:]]]
    assert kept == [plan.samples for plan in records_of(whole, StepPlanned)[:9]]
    assert [p.learning_rate for p in [*plans[:4], *plans[6:]]] == [
        p.learning_rate for p in records_of(whole, StepPlanned)[:9]
    ]
    for stage in ("weights", "optimizer"):
        assert commits[-1].digests[stage] == records_of(whole, StepCommitted)[8].digests[stage]


def test_what_the_log_says_of_it(gone_back: Store) -> None:
    """Each step by an event, with the checkpoint under its new number, which nothing disputes."""
    assert records_of(gone_back, StepAbandoned) == [
        StepAbandoned(4, 1, "actor", 5, 4, 7),
        StepAbandoned(5, 1, "actor", 6, 4, 7),
    ]
    written = {c.policy_version: c for c in records_of(gone_back, CheckpointWritten)}
    assert list(written) == [0, 4, 7, 11, 12]
    assert written[7].path == "checkpoints/demo/actor/v00000007"
    for name in ("weights_digest", "optimizer_digest", "phase"):
        assert getattr(written[7], name) == getattr(written[4], name)
    assert read_checkpoint(gone_back.path / written[7].path).optimizer is not None
    published = {p.policy_version: p for p in records_of(gone_back, PolicyPublished)}
    assert (published[7].parent_version, published[7].weights_digest) == (4, written[4].weights_digest)
    folded = fold_versions(gone_back.events())
    assert folded.disputed == {}
    assert folded.newest("demo", "actor") == 12
    steps = "SELECT step, status, output_version FROM steps ORDER BY step"
    rows = rb.connect(gone_back.path).execute(steps).fetchall()
    assert [row for row in rows if row[1] != "committed"] == [(4, "abandoned", 5), (5, "abandoned", 6)]
    assert [row[0] for row in rows if row[1] == "committed"] == [0, 1, 2, 3, 6, 7, 8, 9, 10]


@pytest.mark.more
def test_replay_of_what_counts_and_of_what_does_not(
    gone_back: Store, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Steps before and after replay bit for bit; of the others it is said that they were abandoned."""
    for step, base in ((3, 0), (6, 7), (8, 7)):
        replayed = replay_step(gone_back, step)
        assert (replayed.bit_for_bit, replayed.from_version) == (True, base)
    with pytest.raises(ReplayError, match=r"step 5 of run 'demo' was abandoned: .* version 4, .* version 7"):
        replay_step(gone_back, 5)
    code, _, err = cli("replay", "step", 4, "--store", gone_back.path)
    assert (code, "was abandoned" in err) == (2, True)


def test_what_was_consumed_is_waiting_again(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """In both ledgers; then it is consumed once more, so that all of it was consumed exactly once."""
    log, settings = recorded(), fabric.config(fabric.GRPO, checkpoint_every=1)
    before = _terms(log)
    _stop(log, settings, 2)
    used = [p.samples for p in records_of(log, StepPlanned)]
    first, second = (sum(_lengths(log, refs).values()) for refs in used)
    assert _terms(log) == before | {TRAINED: first + second, WAITING: before[WAITING] - first - second}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_step", lambda *_: pytest.fail("no step is to be taken"))
        with pytest.raises(pytest.fail.Exception):
            fabric.train(log, settings, abandon_after=1)
    assert _terms(log) == before | {TRAINED: first, WAITING: before[WAITING] - first}
    fabric.train(log, settings)
    live = [s.planned.samples for _, s in sorted(fabric.steps_of(log).steps.items())]
    assert live[:2] == used
    names = Counter(ref["turn_id"] for refs in live for ref in refs)
    assert set(names.values()) == {1}
    assert _terms(log) == {TRAINED: before[WAITING], "kept out": before["kept out"]}


def _lengths(log: Store, refs: list[dict[str, str]]) -> dict[str, int]:
    """Turn -> its sampled tokens, of all turns of the samples' trajectories."""
    trajectories = log.trajectories()
    return {
        turn.turn_id: len(turn.completed.completion_ids)
        for name in {ref["trajectory_id"] for ref in refs}
        for turn in trajectories[name].turns.values()
        if turn.completed is not None
    }


def test_said_again_it_changes_nothing(
    gone_back: Store, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A batch job that is started again with the same command goes on; the new number means the new steps."""
    before = gone_back.head()
    err = _go_back(cli, tmp_path, gone_back, fabric.config(fabric.SFT), 4)
    assert "were abandoned before, and training goes on from it as version 7" in err
    assert len(records_of(gone_back, StepAbandoned)) == 2
    assert gone_back.head()["train"] == before["train"] + 1, "only run.opened"
    err = _go_back(cli, tmp_path, gone_back, fabric.config(fabric.SFT), 12)
    assert "no step was committed after version 12" in err
    _go_back(cli, tmp_path, gone_back, fabric.config(fabric.SFT), 7)
    assert [(r.policy_version, r.goes_on_as) for r in records_of(gone_back, StepAbandoned)[2:]] == [
        (version, 13) for version in (8, 9, 10, 11, 12)
    ]
    err = _go_back(cli, tmp_path, gone_back, fabric.config(fabric.SFT), 4)
    assert "goes on from it as version 13" in err


def test_further_back_than_before(
    gone_back: Store, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """To version 0: the number under which 4 went on is on no line either."""
    _go_back(cli, tmp_path, gone_back, fabric.config(fabric.SFT, steps=2), 0)
    history = fabric.steps_of(gone_back)
    assert {c.policy_version for c in history.checkpoints} == {0, 13, 15}
    assert [s.committed.policy_version for s in history.steps.values()] == [14, 15]
    assert history.steps[11].planned.samples == records_of(gone_back, StepPlanned)[0].samples
    assert replay_step(gone_back, 12).bit_for_bit
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT, steps=3)))
    command = ("train", tmp_path / "train.toml", "--store", gone_back.path)
    code, _, err = cli(*command, "--abandon-after", 4)
    assert code == 2
    assert "no checkpoint of version 4 of policy 'actor' that this CONFIG can go on from" in err
    assert "it can from: 0, 13, 15" in err


def test_no_such_checkpoint(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """The versions that it can go on from are named, and nothing is written."""
    log = recorded()
    fabric.train(log, fabric.config(fabric.SFT, steps=6))
    before = log.head()
    (tmp_path / "train.toml").write_text(fabric.toml(fabric.config(fabric.SFT)))
    code, _, err = cli("train", tmp_path / "train.toml", "--store", log.path, "--abandon-after", 5)
    assert code == 2
    assert "no checkpoint of version 5 of policy 'actor' that this CONFIG can go on from" in err
    assert "it can from: 0, 4, 6" in err
    assert log.head() == before


def test_a_machine_that_computes_otherwise(
    recorded: Stores,
    cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resume that fails says how to go on, and that goes on, there and without the error."""
    log, settings = recorded(), fabric.config(fabric.SFT)
    _stop(log, settings, 6)
    run_step = sys.modules["rollbook.train.resume.restore"].run_step

    def noisy(policy: Any, settings: Any, batch: Any, **options: Any) -> Any:
        for micro in batch.micro_batches:
            micro.temperatures[:] *= 1.001
        return run_step(policy, settings, batch, **options)

    monkeypatch.setattr("rollbook.train.resume.restore.run_step", noisy)
    with pytest.raises(TrainError, match="without the steps since: --abandon-after 4"):
        fabric.train(log, settings)
    _go_back(cli, tmp_path, log, settings, 4)
    assert len(fabric.steps_of(log).steps) == 9


def test_a_used_trajectory_was_erased(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """The steps since the checkpoint cannot be run again, so they are given up, and its sample is dropped."""
    log, settings = recorded(), fabric.config(fabric.GRPO, checkpoint_every=100)
    _stop(log, settings, 2)
    used = records_of(log, StepPlanned)[1].samples[0]["trajectory_id"]
    erase_trajectory(log, used, "a customer asked")
    with pytest.raises(TrainError, match=f"trajectory {used}, .*: --abandon-after 0"):
        fabric.train(log, settings)
    _go_back(cli, tmp_path, log, settings, 0)
    live = [s.planned.samples for s in fabric.steps_of(log).steps.values()]
    assert len(live) == 3
    assert used not in {ref["trajectory_id"] for refs in live for ref in refs}
    assert {(d.trajectory_id, d.rule) for d in records_of(log, SampleDropped)} == {(used, "erased")}


@pytest.mark.more
def test_another_configuration_from_there(
    recorded: Stores, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A lower learning rate from version 4: a training of its own, with an optimizer that begins."""
    log = recorded()
    _stop(log, fabric.config(fabric.SFT), 6)
    lower = fabric.config(fabric.SFT, steps=2, optimizer={"lr": 1e-4})
    with pytest.raises(TrainError, match=r"no checkpoint of version 6 .*--abandon-after .*: 0, 4\)"):
        fabric.train(log, lower)
    _go_back(cli, tmp_path, log, lower, 4)
    plans = records_of(log, StepPlanned)[6:]
    assert [(p.policy_version, p.optimizer["lr"]) for p in plans] == [(7, 1e-4), (8, 1e-4)]
    commits = records_of(log, StepCommitted)
    assert plans[0].input_digests["input_weights"] == commits[3].digests["weights"]
    assert plans[0].input_digests["input_optimizer"] != commits[3].digests["optimizer"]
    assert replay_step(log, 7).bit_for_bit


def test_an_erasure_says_what_it_ends(recorded: Stores, cli: Callable[..., tuple[int, str, str]]) -> None:
    """The steps and the resume that need it; only with --yes is it done, and then once more without."""
    log, settings = recorded(), fabric.config(fabric.GRPO, checkpoint_every=2)
    _stop(log, settings, 3)
    plans = records_of(log, StepPlanned)
    names = [plan.samples[0]["trajectory_id"] for plan in plans]
    command = ("store", "erase", "--store", log.path, "--reason", "asked", "--trajectory")
    before = log.head()
    code, out, err = cli(*command, names[0])
    assert (code, out) == (2, "")
    assert "would end the replay of 2 steps (0-1), of policy 'actor' in run 'demo'. Nothing was erased" in err
    code, _, err = cli(*command, names[1])
    assert (code, "the replay of step 1, of" in err) == (2, True)
    assert log.head() == before
    code, out, err = cli(*command, names[1], "--yes")
    assert (code, f"erased the text and tokens of trajectory {names[1]}" in out) == (0, True)
    assert cli(*command, names[1])[0] == 0, "it ends nothing that it has not ended before"
    assert cli(*command, "g5.0", "--keep-tokens")[0] == 0
    assert cli(*command, "teach3")[0] == 0, "no step needs it"


def test_an_erasure_that_ends_a_resume(recorded: Stores, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Steps since the last checkpoint have to be run again to go on; the remedy names its version."""
    log, settings = recorded(), fabric.config(fabric.GRPO, checkpoint_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "publish", lambda self: None)
        _stop(log, settings, 2)
    name = records_of(log, StepPlanned)[0].samples[0]["trajectory_id"]
    code, _, err = cli("store", "erase", "--store", log.path, "--reason", "asked", "--trajectory", name)
    assert code == 2
    assert "would end the replay of 2 steps (0-1) and going on with the training where it is" in err
    assert "it would have to go back, by --abandon-after 0" in err
