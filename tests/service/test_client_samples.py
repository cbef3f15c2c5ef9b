"""The pinned client, unmodified, samples: from the base model and from adapters."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.service.conftest import BASE, Service, printed

from rollbook import store as rb
from rollbook.replay.step.step import replay_step
from rollbook.store.events import StepPlanned

pytestmark = [pytest.mark.service, pytest.mark.timeout(480)]


def test_a_snapshot_samples_the_weights_that_it_names(service: Service) -> None:
    """Whatever is trained later; and its logprobs are the trainer's, of prompts too."""
    came = service.run("sample", base=BASE)
    assert came["base"] == came["fresh"]
    assert came["third"] == came["again"] == came["third later"]
    assert len({str(came[name]) for name in ("fresh", "third", "sixth")}) == 3
    scores, count = came["scores"], len(came["prompt"])
    assert scores[0] is None
    assert np.abs(np.array(scores[1:]) - came["trainer"]).max() < 1e-5
    first = came["first"]
    with rb.connect(service.store) as connection:
        [row] = connection.execute(
            """SELECT prompt_delta, completion_ids, logprobs, policy_version, finish_reason, delivered
               FROM turns JOIN trajectories USING (trajectory_id) WHERE trajectory_id = ?""",
            [first["id"]],
        ).fetchall()
    assert row[:2] == (came["prompt"], first["tokens"])
    assert row[2] == pytest.approx(first["logprobs"], abs=0)
    assert row[3:5] == (3, "length")
    assert row[5]
    tempered = np.array(first["logprobs"]) * 0.9
    differences = tempered - np.array(came["trainer"][count - 1 :])
    assert np.abs(differences).max() < 3  # of another temperature: near, and not the same
    assert np.abs(differences).max() > 1e-4


@pytest.mark.parametrize("rank", [4, 0])
def test_a_trainer_of_bfloat16_is_sampled_in_float32(service_at: Callable[..., Service], rank: int) -> None:
    """Adapters and whole models: of the weights that were saved, with the trainer's logprobs to its rounding;
    and the last step replays bit for bit."""
    service = service_at("narrow", "--set", "dtype=bfloat16", "--set", "full=1")
    came = service.run("sample", base=BASE, rank=rank)
    assert came["third"] == came["again"] == came["third later"]
    assert len({str(came[name]) for name in ("fresh", "third", "sixth")}) == 3
    gaps = np.abs(np.array(came["scores"][1:]) - came["trainer"])
    assert 1e-5 < gaps.max() < 0.1
    service.stop()
    [run] = {event.run for event in service.log.events() if isinstance(event.record, StepPlanned)}
    assert replay_step(service.log, 5, run).bit_for_bit


def test_how_a_sequence_ends(service: Service) -> None:
    """At a token, at a number of tokens; without stops it goes on; greedy is top-k of one."""
    came = service.run("stops", base=BASE)
    free, ended = came["free"], came["ids"][0]
    assert (len(free["tokens"]), free["reason"]) == (24, "length")
    end = free["tokens"].index(came["at"]) + 1
    assert (ended["tokens"], ended["reason"]) == (free["tokens"][:end], "stop")
    assert came["greedy"][0] == came["greedy"][1] == came["first"][0]
    assert came["prompt"][0] is None
    assert came["prompt top"][0] is None
    assert [len(row) for row in came["prompt top"][1:]] == [2, 2, 2]
    tokens, logprobs = came["sequence"]
    for token, logprob, top in zip(tokens, logprobs, came["top"], strict=True):
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert all(abs(value - logprob) < 1e-5 for id_, value in top if id_ == token)


def test_a_policy_learns_by_its_own_samples(service: Service) -> None:
    """What is rewarded becomes more likely; every sequence is a trajectory of the version that it was sampled
    by. Sampler and trainer agree, so that each ratio is 1 and the advantages of a group add up to 0."""
    came = service.run("reinforce", base=BASE)
    assert came["after"] > came["before"] + 0.02
    assert max(map(abs, came["losses"])) < 1e-3
    with rb.connect(service.store) as connection:
        rows = connection.execute(
            """SELECT policy_version, count(*), count(DISTINCT "group"),
                      bool_and(trajectories.status = 'truncated')
               FROM turns JOIN trajectories USING (trajectory_id)
               WHERE len(completion_ids) > 1 GROUP BY 1 ORDER BY 1"""
        ).fetchall()
        [[published]] = connection.execute(
            "SELECT count(DISTINCT weights_digest) FROM policies WHERE run LIKE '%.train.0'"
        ).fetchall()
    assert rows == [*((version, 16, 1, True) for version in range(6)), (6, 2, 1, True)]
    assert published == 7


def test_a_killed_service_samples_the_same(service: Service, service_at: Callable[..., Service]) -> None:
    """The client goes on without noticing, and its curve is that of a service that lived."""
    expected = service.run("reinforce", base=BASE)
    killed = service_at("killed")
    program, pauses = killed.begin("reinforce", base=BASE), random.Random(5)
    for _ in range(4):
        time.sleep(1.0 + pauses.random())
        killed.kill()
        killed.start()
    came = printed(program)
    ids = [one.pop("id") for one in [*came["last"], *expected["last"]]]
    assert came == expected
    assert len(set(ids)) == 4
