"""`rollbook run` over two hosts of a store, without a folder that both see: the proxy on one, on the
other the trainer and rollouts, which Ray places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.processes.online_run import Run
from tests.fakes.processes.ray_nodes import ray_nodes

from rollbook import store as rb
from rollbook.bench.cluster_stage import closed, say_in_medium
from rollbook.replay.stretch.stretch import history_of, prove_stretch
from rollbook.store.config import toml_text
from rollbook.store.events import StepCommitted
from rollbook.store.hosts.join import join
from rollbook.store.settings import OwnMediumSettings
from rollbook.testing.ledger import fold_ledger

pytestmark = pytest.mark.ranks
STEPS = 3


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, Run]]:
    """Two hosts with the same CONFIG, each with a folder of the store."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(tmp_path))
    settings = OwnMediumSettings(url=f"file://{tmp_path}/medium", ack="medium")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = Run(tmp_path / "a"), Run(tmp_path / "b")
    config = (first.folder / "online.toml").read_text().replace("steps = 100000", f"steps = {STEPS}")
    for run in (first, second):
        (run.folder / "online.toml").write_text(config)
    log = rb.open(first.store, create=True)
    (first.store / "store.toml").write_text(toml_text({"medium": settings.table()}))
    say_in_medium(log, settings)
    join(second.store, f"{settings.url}/{log.store_id}", settings)
    with ray_nodes({}):
        yield first, second


def test_a_run_over_hosts(pair: tuple[Run, Run]) -> None:
    """Each writes its own part of one log: both have all of it, it balances, and the host that did not train
    replays every step."""
    recording, training = pair
    proxy = recording.start("--only", "proxy")
    trained = training.start("--ray", "--only", "trainer", "--only", "rollouts")
    try:
        assert trained.wait(240) == 0, training.said()[-3000:]
        proxy.terminate()
        assert proxy.wait(60) == 143
    finally:
        for child in (proxy, trained):
            child.kill()
            child.wait()
    logs = [recording.log(), training.log()]
    try:
        whole = [{(e.lane, e.seq): (e.event_id, repr(e.record)) for e in log.events()} for log in logs]
        assert whole[0] == whole[1]
        makers = {e.lane.partition(".")[0] for e in logs[0].events_of({StepCommitted.KIND}, logs[0].head())}
        assert makers == {"train"}
        assert {lane.partition(".")[0] for lane in logs[0].own_lanes()} >= {"serve"}
        assert not any(fold_ledger(logs[0].events()).unaccounted().values())
        history = history_of(logs[0], "sums", "actor")
        proved = prove_stretch(logs[0], history, 0, STEPS - 1)
        assert [p.replay is not None and p.replay.bit_for_bit for p in proved.steps] == [True] * STEPS
    finally:
        for log in logs:
            closed(log)
