"""The reference of an algorithm: when it is renewed, and how it runs in processes of its own.

Every so many steps the policy's newest version becomes the reference. The manifest of each step
holds the version that it used, so a replay needs nothing else. Source: the hard update of
Gorbatovski et al. 2024 (arXiv:2404.09656), there for DPO; `ref_update_interval` of TRL's
`ref_model_sync_steps`.

In processes of its own the reference scores samples while the policy computes. It is one copy of
the model, laid out over its ranks as the policy is, so its numbers are, to the bit, those that
the policy's process gives with the reference's weights in place: a replay needs no second
process.

    python -m rollbook.train.step.reference HOST PORT RANK COUNT LEADER
"""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollbook.store.errors import ConfigError, ModelError, RankLostError
from rollbook.store.fold.history import CommittedStep
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.checkpoints.checkpoint import weights_named
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.interface import LOOPBACK
from rollbook.train.model.model import Build
from rollbook.train.model.shape import ModelShape
from rollbook.train.ranks.follow import end_with
from rollbook.train.ranks.launch import Follower
from rollbook.train.ranks.meeting import FOREVER, Meeting, MeetingPoint, meet, new_secret, take_secret
from rollbook.train.ranks.ranks import START_S, Ranks
from rollbook.train.step.predictions import logprobs_of


def steps_since(algorithm: Algorithm, steps: Sequence[CommittedStep]) -> int:
    """How many of a training's committed steps began with the reference's version or a later one.

    Args:
        algorithm: of the next step, with the reference in force.
    """
    return sum(step.planned.policy_version >= (algorithm.reference or 0) for step in steps)


def reference_line(policy: str) -> str:
    """The name under which the log has the references of a policy, as a line of weights of its own."""
    return f"{policy}.reference"


def policy_of(line: str) -> str:
    """The policy that a line of weights belongs to; for a line of references, the policy whose
    references they are."""
    return line.removesuffix(".reference")


PROGRAM = ("-m", "rollbook.train.step.reference")
CLOSE_S = 5.0
"""Longest wait for it to end by itself."""
LOOK_S = 0.005
VISIBLE = "CUDA_VISIBLE_DEVICES"


class ReferenceProcess:
    """The reference, as a process of this host, which starts the other ranks of its copy of the
    model.

    Args:
        how: the policy computes; so does the reference.
        parallel: how a copy of the model is laid out.
        taken: ranks of the training, each of which has a GPU where it computes on them.

    Raises:
        ConfigError: they leave none.
    """

    def __init__(self, shape: ModelShape, how: Build, parallel: ParallelConfig, taken: int) -> None:
        # The secret is of these two processes, so that what is signed by it was not said before.
        self._meeting = meet(MeetingPoint(LOOPBACK, 0, new_secret()), leads=True)
        self._asked, self._within_s = 0, parallel.timeout_s
        wanted = parallel.model_ranks
        environment = None
        if how.device.type == "cuda":
            environment = os.environ | {VISIBLE: spare_gpus(os.environ, taken, wanted)}
        self._process = Follower(self._meeting.point, 0, wanted, environment, PROGRAM)
        self._say(shape, how, parallel)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def logprobs(
        self, checkpoint: Path, digest: str, micro_batches: Sequence[MicroBatch]
    ) -> Callable[[], list[torch.Tensor]]:
        """Have it compute the logprobs of micro-batches, each [B, T - 1], by the weights of a checkpoint;
        what gives them, once they are asked for.

        Args:
            digest: of the weights, as the log has it.

        What is given raises:
            RankLostError: the process ended, or does not answer.
            ModelError: the checkpoint is damaged.
        """
        return functools.partial(self._answer, self._say(checkpoint, digest, micro_batches))

    def _say(self, *what: Any) -> int:
        self._meeting.say(f"asked/{self._asked}", pickle.dumps(what))
        self._asked += 1
        return self._asked - 1

    def _answer(self, number: int) -> Any:
        key = f"answered/{number}"
        until = time.monotonic() + self._within_s + (START_S if number == 1 else 0)
        while not self._meeting.store.check([key]):
            if (ended := self._process.ended()) is not None:
                raise RankLostError(f"the reference's process {ended[1]}")
            if time.monotonic() > until:
                self._process.dump()
                time.sleep(1)
                where = "\n".join(self._process.where()) or "  (it did not say)"
                raise RankLostError(f"the reference's process hangs; it is in:\n{where}")
            time.sleep(LOOK_S)  # torch tells standard error of each wait for a key that ends without it
        values, error = pickle.loads(self._meeting.heard(key))
        self._meeting.store.delete_key(key)
        if error is not None:
            raise ModelError(error)
        return values

    def close(self) -> None:
        """End it."""
        self._say()
        self._process.close(CLOSE_S)


def spare_gpus(environment: Mapping[str, str], taken: int, wanted: int) -> str:
    """The GPUs of this host that a training leaves free, in the form of `CUDA_VISIBLE_DEVICES`.

    Raises:
        ConfigError: there are fewer than wanted.
    """
    named = environment.get(VISIBLE)
    there = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    left = there[taken : taken + wanted]
    if len(left) < wanted:
        raise ConfigError(
            f"reference_apart: the training takes {taken} of this host's {len(there)} GPUs, and its "
            f"reference wants {wanted} of its own: start fewer ranks (--ranks), or leave reference_apart out"
        )
    return ",".join(left)


def serve(meeting: Meeting) -> None:
    """Build the model that the first message describes; then answer requests until there are no
    more."""
    shape, how, parallel = _next(meeting, 0)
    with Ranks(parallel, parallel.model_ranks) as ranks:
        policy = ranks.policy("reference", shape, OptimizerConfig(), how)
        held, number = None, 1
        while request := _next(meeting, number):
            checkpoint, digest, micro_batches = request
            values, failed = None, None
            try:
                if held != digest:
                    policy.load_weights(weights_named(checkpoint, digest))
                    held = digest
                values = [logprobs.cpu() for logprobs in policy.forward(micro_batches, logprobs_of)]
            except ModelError as error:
                failed = str(error)
            meeting.say(f"answered/{number}", pickle.dumps((values, failed)))
            number += 1


def _next(meeting: Meeting, number: int) -> Any:
    key = f"asked/{number}"
    meeting.store.wait([key], FOREVER)
    what = pickle.loads(meeting.heard(key))
    meeting.store.delete_key(key)
    return what


def main(host: str, port: int, _rank: int, _count: int, leader: int) -> None:
    """Serve the process that started this one."""
    end_with(leader)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    serve(meet(MeetingPoint(host, port, take_secret()), leads=False))


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
