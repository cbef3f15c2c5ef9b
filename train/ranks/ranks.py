"""The ranks of a training: rank 0 leads, the others do their part of what it asks of all.

Rank 0 alone has the log and decides what comes next. It tells the others by a key of the store
at which all met: they may wait there for as long as there is nothing to do. What is computed
goes over the process group, gloo on CPUs and nccl on GPUs.

A policy whose weights are spread over ranks, used as one: each call has rank 0 ask all ranks.

Ranks that a launcher such as torchrun or Slurm starts: their places, their secret, and where they meet.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from rollbook.engines.weights.digests import Look, Tensors
from rollbook.store.errors import ConfigError, NotAStoreError, RankError, RankLostError
from rollbook.store.events import Json
from rollbook.store.marker import read_marker
from rollbook.store.secret import store_secret
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import sent_algorithm
from rollbook.train.batches.batch import MicroBatch, evenly
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.parallel import ParallelConfig
from rollbook.train.interface import LOOPBACK, choose_interface, stay_on_this_host
from rollbook.train.model import cpu_device
from rollbook.train.model.lora import check_factors, merged
from rollbook.train.model.model import Build
from rollbook.train.model.reshard import Work, check_layout, joined, stages_of
from rollbook.train.model.shape import ModelShape
from rollbook.train.model.weight_names import checked, fuse_experts, parts
from rollbook.train.ranks.backend import Kind, TrainablePolicy
from rollbook.train.ranks.kept_digests import Digest, KeptDigests
from rollbook.train.ranks.launch import FollowerRanks, Launch, launch_here
from rollbook.train.ranks.meeting import (
    FOREVER,
    SECRET,
    Meeting,
    MeetingPoint,
    meet,
    presence_key,
    sign_objects,
    take_secret,
)
from rollbook.train.ranks.part import Part
from rollbook.train.ranks.policy import LossOf, Policy, Read

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


class Ranks(contextlib.AbstractContextManager["Ranks"]):
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
        self._sent, self._joined, self._parts = 0, False, dict[str, Part]()
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
            self._met.say(f"said/{self._sent}", _in_words(what))
        self._sent += 1

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
            self._meeting.say(f"said/{self._sent}", _in_words(("end",)))
        if self._launched is not None:
            self._launched.close()
        self._leave()
        self._meeting = None

    def _leave(self) -> None:
        """Forget the groups, so that this process may be alone again."""
        self._parts.clear()
        if self._joined:
            _forget_groups()

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


class Ask(Protocol):
    """Has all ranks call a method of their parts, and returns rank 0's result.

    On rank 0, `own` is called instead of the method, where rank 0 has more to pass to it than
    the others.
    """

    def __call__(self, method: str, *args: Any, own: Callable[[], Any] | None = None) -> Any: ...


class SpreadPolicy:
    """A policy whose weights are spread over ranks, of which this process is rank 0. As `Policy`.

    Args:
        ask: has all ranks call a method of their parts.
    """

    def __init__(self, part: Part, ask: Ask) -> None:
        self._part, self._ask = part, ask
        self.shape, self.device, self.lora = part.shape, part.policy.device, part.policy.lora
        self._digests = KeptDigests()
        self._others = False
        """Whether others are in the place of its own weights, which come without factors."""

    def load_weights(self, tensors: Tensors) -> None:
        """Put Hugging Face weights in place, on each rank its part. As `Policy`.

        Raises:
            ModelError: they are another architecture's.
        """
        self._digests.changed("state")  # the float32 weights that it may have
        self._spread("weights", checked(tensors, self.shape))

    def _spread(self, kind: Kind, tensors: Mapping[str, torch.Tensor]) -> None:
        self._digests.changed("weights")
        names = [name for weight in self._part.named(kind) for name in weight.huggingface]
        own = {name: tensors[name].contiguous() for name in names}
        specs = [(n, tuple(t.shape), t.dtype) for n, t in own.items()]
        self._ask("take", kind, specs, own=lambda: self._part.spread(kind, own))

    def load_adapter(self, tensors: Tensors) -> None:
        """Put low-rank factors in place, on each rank its part. As `Policy`."""
        assert self.lora is not None
        check_factors(tensors, self.shape, self.lora)
        self._digests.changed("state")
        self._spread("adapter", tensors)

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under Hugging Face names, one at a time, gathered from the ranks. As `Policy`."""
        own = self._stream("weights")
        if self.lora is None or self._others:
            return own
        return merged(own, self.adapter(), self.shape, self.lora)

    def adapter(self) -> Tensors:
        """The low-rank factors, under PEFT's names, gathered from the ranks."""
        return {} if self.lora is None else dict(self._stream("adapter"))

    def _stream(self, kind: Kind) -> Iterator[tuple[str, torch.Tensor]]:
        each = (
            zip(weight.huggingface, parts(weight, shards, self.shape), strict=True)
            for weight, _, shards in self._ask("stream", kind)
        )
        yield from fuse_experts((named for pair in each for named in pair), self.shape)

    def weights(self) -> Tensors:
        """The weights under Hugging Face names."""
        return dict(self.stream_weights())

    def stream_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The accumulated gradients, before clipping, one at a time."""
        for weight, _, shards in self._ask("stream", "gradients"):
            yield weight.megatron, joined(weight, shards, self.shape)

    def optimizer_state(self) -> Tensors:
        """Moments and step counts, `parameter.field`."""
        return dict(self._stream_state())

    def _stream_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight, field, shards in self._ask("stream", "state"):
            whole = shards[0] if not shards[0].dim() else joined(weight, shards, self.shape)
            yield f"{weight.megatron}.{field}", whole

    def each(self, work: Work[T], *, meanwhile: bool = False) -> Callable[[], list[T]]:
        """Have each rank call a function with its own pieces. As `Policy`."""
        wait: Callable[[], list[T]] = self._ask("each", work, meanwhile)
        return wait

    def load_optimizer_state(self, state: Tensors) -> None:
        """Put an optimizer state in place, on each rank its part."""
        self._digests.changed("state")
        number = {weight.megatron: at for at, weight in enumerate(self._part.named("state"))}
        split = [(key.rpartition("."), value.contiguous()) for key, value in state.items()]
        own = [(number[name], field, value) for (name, _, field), value in split]
        specs = [(at, f, tuple(t.shape), t.dtype) for at, f, t in own]
        self._ask("take_state", specs, own=lambda: self._part.spread_state(own))

    def weights_digest(self, look: Look | None = None, *, tree: bool = True) -> Digest:
        """Digest of the weights, as in checkpoints and engines. Arguments as of `Policy`."""
        return self._digests.of("weights", self.stream_weights, look, tree=tree)

    def optimizer_digest(self, *, tree: bool = True) -> Digest:
        """Digest of the optimizer state. Arguments as of `Policy`."""
        return self._digests.of("state", self._stream_state, tree=tree)

    def seed_step(self, seed: int) -> None:
        """Set every random generator of all ranks for a step."""
        self._ask("seed_step", seed)

    def learning_rate(self, step: int, steps: int | None = None) -> float:
        """Learning rate of the phase's step (from 0), by Megatron's schedule."""
        return self._part.policy.learning_rate(step, steps)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_of: LossOf[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """Accumulate the gradients of all micro-batches, each copy those of its share; returns what
        is kept of each."""
        return self._pass_over(micro_batches, loss_of, shares, backward=True)

    def forward(
        self, micro_batches: Sequence[MicroBatch], read: Read[T], shares: Sequence[int] | None = None
    ) -> list[T]:
        """A forward pass only; returns what is read of each micro-batch."""
        return self._pass_over(micro_batches, read, shares, backward=False)

    def _pass_over(
        self, micro_batches: Sequence[MicroBatch], work: Any, shares: Sequence[int] | None, *, backward: bool
    ) -> list[T]:
        copies = self._part.copies
        counts = shares or [len(some) for some in evenly(micro_batches, copies)]
        remaining = iter(micro_batches)
        own = [[next(remaining) for _ in range(count)] for count in counts]
        own += [[] for _ in range(copies - len(own))]
        results: list[T] = self._ask(
            "pass_over", work, backward, own=lambda: self._part.pass_over(work, backward, own)
        )
        return results

    @contextlib.contextmanager
    def using(self, weights: Tensors) -> Iterator[None]:
        """A context in which other weights are in place of its own, on all ranks, for forward
        passes.

        Raises:
            ModelError: they are another architecture's.
        """
        self._ask("put_aside")
        self._others = True
        try:
            self._spread("weights", checked(weights, self.shape))
            yield
        finally:
            self._others = False
            self._digests.changed("weights")
            self._ask("put_back")

    def offload(self) -> None:
        """Release the memory that all ranks hold, until `onload`."""
        self._ask("offload")

    def onload(self) -> None:
        """Allocate it again; gradients are lost."""
        self._ask("onload")

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together, without taking a step."""
        return float(torch.stack([gradient.norm() for _, gradient in self.stream_gradients()]).norm())

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip and take one step; returns the gradient norm before clipping."""
        self._digests.changed("weights", "state")
        norm: float = self._ask("optimizer_step", learning_rate)
        return norm


FEWEST_CHARACTERS = 32
"""Of a secret that somebody made."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among ranks that a launcher started, and where they meet.

    Args:
        one_host: all of them are on this host.
    """

    rank: int
    count: int
    local_rank: int
    host: str
    port: int
    one_host: bool = False


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun, Slurm or another launcher gives this process in its environment;
    None if it is not one of several ranks.

    Raises:
        ConfigError: there are several ranks, and nothing says where they meet.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "RANK" not in environment and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    rank, count, local = (environment.get(name) for name in names)
    if rank is None or count is None or int(count) == 1:
        return None
    host = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    port = environment.get("MASTER_PORT")
    if host is None or port is None:
        raise ConfigError(
            f"rank {rank} of {count} ({names[0]}, {names[1]}): MASTER_ADDR and MASTER_PORT do not "
            "say where they meet: set both to an address of rank 0's host and a free port there"
        )
    one_host = environment.get("LOCAL_WORLD_SIZE") == count or environment.get("SLURM_NNODES") == "1"
    return Place(int(rank), int(count), int(local or 0), host, int(port), one_host)


def shared_secret(place: Place, store: Path) -> str:
    """The secret that the ranks of a launcher share: the one in the environment, or the store's.

    Raises:
        ConfigError: there is neither, or it is short enough to be guessed.
    """
    if os.environ.get(SECRET):
        secret = take_secret()
        if len(secret) < FEWEST_CHARACTERS:
            raise ConfigError(
                f"{SECRET} has {len(secret)} characters: take {FEWEST_CHARACTERS} or more that nobody "
                "guesses, such as those of `openssl rand -hex 32`"
            )
        return secret
    try:
        read_marker(store)
    except NotAStoreError as error:
        raise ConfigError(
            f"rank {place.rank} of {place.count} does not see the store {store}, by whose secret ranks know "
            f"each other: set {SECRET} on every host to one text, such as that of `openssl rand -hex 32`"
        ) from error
    return store_secret(store, "ranks").hex()


def meet_at(place: Place, secret: str) -> Meeting:
    """The meeting of a launcher's ranks: at the launcher's store, or at one that rank 0 serves."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    if place.one_host:
        stay_on_this_host()
    else:
        choose_interface(place.host)
    host = LOOPBACK if place.one_host and not served else place.host
    met = meet(MeetingPoint(host, place.port, secret), leads=place.rank == 0 and not served)
    # Ranks that torchrun starts again find what was said to earlier ones.
    return met.within(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if served else met


def meet_others(place: Place, secret: str, count: int) -> tuple[Meeting, None]:
    """As rank 0, meet others that the launcher starts. As `Launch`."""
    return meet_at(place, secret), None
