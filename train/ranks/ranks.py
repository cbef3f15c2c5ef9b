"""The ranks of a training: rank 0 leads, the others do their part of what it asks of all.

Rank 0 alone has the log and decides what comes next. It tells the others by a key of the store
at which all met: they may wait there for as long as there is nothing to do. What is computed
goes over the process group, gloo on CPUs and nccl on GPUs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch

from rollbook.store.errors import RankError, RankLostError
from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import sent_algorithm
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.model import cpu_device
from rollbook.train.model.model import Build
from rollbook.train.model.reshard import check_layout, stages_of
from rollbook.train.model.shape import ModelShape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.ranks.launch import FollowerRanks, Launch, launch_here
from rollbook.train.ranks.launcher import Place, meet_at
from rollbook.train.ranks.meeting import FOREVER, Meeting, presence_key, sign_objects
from rollbook.train.ranks.part import Part
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.spread import SpreadPolicy

STREAM = "stream"
"""The method of a part whose result is gone through on every rank."""
EACH = "each"
"""The method of a part whose result waits for every rank."""
START_S = 300.0
"""Longest wait for all ranks to have started."""
LOOK_S = 0.05
T = TypeVar("T")
KEPT_GROUPS = (
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
)
"""What `destroy_model_parallel` of megatron-core 0.16.1 leaves in place."""


class _CommandPickler(pickle.Pickler):
    """Pickles what rank 0 tells the others. Algorithms go by their keys: the receiver imports its
    own parts."""

    def reducer_override(self, obj: object) -> Any:
        """How an object is unpickled."""
        if isinstance(obj, Algorithm):
            return sent_algorithm, (obj.model_dump(mode="json"),)
        return NotImplemented


def _in_words(what: tuple[Any, ...]) -> bytes:
    buffer = io.BytesIO()
    _CommandPickler(buffer).dump(what)
    return buffer.getvalue()


def _forget_groups() -> None:
    """End the existing process groups, Megatron's first.

    They are in reference cycles with models, and each has threads, which are busy once its other
    ranks are gone.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        for name in KEPT_GROUPS:
            setattr(parallel_state, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def _join(meeting: Meeting, rank: int, count: int, parallel: ParallelConfig, device: torch.device) -> None:
    """Make the process group, and Megatron's groups in it. Every rank calls it."""
    import torch.distributed as dist

    if device.type == "cpu":
        cpu_device.install()
    from megatron.core import parallel_state

    _forget_groups()
    sign_objects(meeting.signer)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=meeting.of_group,
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=parallel.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=parallel.timeout_s / 60,
    )


class Ranks:
    """The ranks that hold a training's policies: this process alone, or this one, as rank 0, and
    others.

    Args:
        count: of ranks; 1: this process alone.
        launch: how the others are started, or met.
    """

    def __init__(
        self,
        parallel: ParallelConfig | None = None,
        count: int = 1,
        launch: Launch = launch_here,
    ) -> None:
        self.parallel, self.count = parallel or ParallelConfig(), count
        self.copies = self.parallel.copies(count)
        self._said, self._joined, self._parts = 0, False, dict[str, Part]()
        self._launched: FollowerRanks | None = None
        self._meeting: Meeting | None = None
        self.on_this_host = launch is launch_here
        """Whether all ranks are processes of this host that this one starts."""
        if count > 1:
            self._meeting, self._launched = launch(count)

    @property
    def described(self) -> Json:
        """The layout as in a step's fingerprint."""
        return self.parallel.described(self.count)

    def policy(self, name: str, shape: ModelShape, optimizer: OptimizerConfig, how: Build) -> Policy:
        """A policy in training, its weights not yet in place. Arguments as of `TrainablePolicy`.

        Raises:
            ModelError: the model cannot be spread so.
            RankError: a rank does not come.
        """
        sizes = self.parallel
        how = replace(how, sequence=sizes.sequence, distributed_optimizer=sizes.distributed_optimizer)
        check_layout(shape, stages_of(shape, sizes)[0])
        if self.count == 1:
            return TrainablePolicy(shape, optimizer, how)
        if not self._joined:
            self._await_others()
            self._say(("join", self.parallel, how.device))
            with self._heard():
                _join(self._met, 0, self.count, self.parallel, how.device)
            self._joined = True
        wait_s = sizes.timeout_s
        self._say(("make", name, shape, optimizer, how, wait_s))
        with self._heard():
            part = self._parts[name] = Part.made(shape, optimizer, how, wait_s)
        return SpreadPolicy(part, functools.partial(self._ask, name))

    def _await_others(self) -> None:
        """Wait until every rank is there.

        Raises:
            RankError: one ended before, or does not come in time.
        """
        missing, store = {presence_key(rank) for rank in range(1, self.count)}, self._met.store
        until = time.monotonic() + START_S
        while missing := {key for key in missing if not store.check([key])}:
            ended = self._launched.ended() if self._launched else None
            if ended is not None or time.monotonic() > until:
                ranks = ", ".join(sorted(key.partition("/")[2] for key in missing))
                late = f"of {self.count} ranks these did not come within {START_S:g} s: {ranks}"
                raise RankError(ended or late)
            time.sleep(LOOK_S)
        self._met.agree(self.count)

    @property
    def _met(self) -> Meeting:
        """Where all ranks meet, if there are others."""
        assert self._meeting is not None
        return self._meeting

    def _ask(self, name: str, method: str, *args: Any, own: Callable[[], Any] | None = None) -> Any:
        """Have all ranks call a method of their parts; returns this rank's result."""
        with self._heard():
            for part in self._parts.values():
                part.drain()
        self._say(("call", name, method, args))
        with self._heard():
            result = own() if own else getattr(self._parts[name], method)(*args)
        if method == EACH:
            return functools.partial(self._waited, result)
        return self._streamed(result) if method == STREAM else result

    def _waited(self, wait: Callable[[], T]) -> T:
        """The result of `wait`."""
        with self._heard():
            return wait()

    def _streamed(self, stream: Iterator[T]) -> Iterator[T]:
        """What other ranks send. If nobody reads it to the end, the next call reads the rest."""
        with self._heard():
            while (item := next(stream, None)) is not None:  # `yield from` would close the stream with this
                yield item

    def _say(self, what: tuple[Any, ...]) -> None:
        with self._heard():
            self._met.say(f"said/{self._said}", _in_words(what))
        self._said += 1

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """Turn an error of the process group into one that names the rank to blame.

        Raises:
            RankLostError: a rank ended or hangs.
        """
        try:
            yield
        except RuntimeError as error:
            if not _is_group_error(error):
                raise
            why = self._launched.last_words() if self._launched else None
            raise RankLostError(
                why or f"another rank ended, or was waited for in vain ({error}): see what it printed"
            ) from error

    def close(self) -> None:
        """Let the other ranks go, and end those that do not."""
        if self._meeting is None:
            return
        with contextlib.suppress(RuntimeError):
            self._meeting.say(f"said/{self._said}", _in_words(("end",)))
        if self._launched is not None:
            self._launched.close()
        self._leave()
        self._meeting = None

    def _leave(self) -> None:
        """Forget the groups, so that this process may be alone again."""
        self._parts.clear()
        if self._joined:
            _forget_groups()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_group_error(error: RuntimeError) -> bool:
    """Whether an error comes from the process group: gloo's have no type of their own."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(
        words in str(error)
        for words in ("gloo", "Connection closed", "Connection reset", "Timed out", "Broken pipe")
    )


def follow(meeting: Meeting, rank: int, count: int) -> None:
    """Do this rank's part of what rank 0 asks of all, until it lets go."""
    parts: dict[str, Part] = {}
    number, store = 0, meeting.store
    _import_all()
    gc.freeze()
    gc.enable()
    meeting.come(rank)
    while True:
        key = f"said/{number}"
        store.wait([key], FOREVER)
        what = pickle.loads(meeting.heard(key))
        if store.add(f"read/{number}", 1) == count - 1:  # all have heard it
            store.delete_key(key)
            store.delete_key(f"read/{number}")
        number += 1
        match what:
            case ("join", parallel, device):
                _join(meeting, rank, count, parallel, _own_device(device, rank))
            case ("make", name, shape, optimizer, how, wait_s):
                own = replace(how, device=_own_device(how.device, rank))
                parts[name] = Part.made(shape, optimizer, own, wait_s)
            case ("call", name, method, given):
                result = getattr(parts[name], method)(*given)
                if method == STREAM:
                    for _ in result:
                        pass
            case ("end",):
                return


def _import_all() -> None:
    """Import what a step needs before this rank announces itself: the others wait long for it to
    come, but within a step no longer than `timeout_s`."""
    if not torch.cuda.is_available():
        cpu_device.install()
    for name in ("core.models.gpt", "core.optimizer", "core.pipeline_parallel"):
        importlib.import_module(f"megatron.{name}")
    importlib.import_module("rollbook.train.model.layer")


def follow_at(place: Place, secret: str) -> None:
    """Follow rank 0, as the rank that a launcher started."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    follow(meet_at(place, secret), place.rank, place.count)


def _own_device(device: torch.device, rank: int) -> torch.device:
    """A rank's own device: the GPU of this host with its number."""
    if device.type != "cuda":
        return device
    local = int(os.environ.get("LOCAL_RANK", rank % max(torch.cuda.device_count(), 1)))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
