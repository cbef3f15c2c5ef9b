"""One side of the benchmark of training, in a separate process: it takes a step on each request.

    python -m rollbook.bench.train_sides SIDE MODEL [DEVICE DTYPE SAMPLES MOST]

Answers each line of standard input with a line of JSON. The samples are the same for all sides.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from rollbook.train.clock import clock, timed
from rollbook.train.select.samples import Sample

if TYPE_CHECKING:
    import torch

THREADS, LR = 2, 1e-4
VOCAB, WIDTH, LONGEST = 8192, 256, 1024
SAMPLES, MOST, ROWS = 32, 2048, 4
"""Samples of a step; tokens of a packed micro-batch; samples of a padded one."""
OURS, PADDED, BARE = "rollbook", "rollbook_padded", "rollbook_without_digests"
RECOMPUTED = "rollbook_recomputed"
ONE_RANK, TWO_RANKS = "one_rank", "two_ranks"
"""Of one thread each."""
LARGE, LARGE_SAMPLES = "rollbook_100m", 16
"""A step of the larger model, on a few of the samples: a whole step of them takes minutes."""
PLAIN, PLAIN_PACKED = "transformers", "transformers_packed"

Step = Callable[[], float]
"""Takes an optimizer step; its loss."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a Qwen3 model.

    Attributes:
        vocab: its tokens; None: those of the samples here.
    """

    width: int
    layers: int
    heads: int
    vocab: int | None = None


SMALL = Size(WIDTH, 4, 4)
"""6 million parameters."""
BIG = Size(768, 12, 12)
"""105 million."""


@dataclass(frozen=True, slots=True)
class Way:
    """How steps are taken.

    Attributes:
        threads: of torch, on the CPU.
        samples, most: of a step, and tokens of a packed micro-batch; None: SAMPLES, MOST.
        device, dtype: where, and the type of weights and activations.
    """

    packed: bool = True
    recompute: bool = False
    ranks: int = 1
    threads: int = THREADS
    samples: int | None = None
    most: int | None = None
    device: str = "cpu"
    dtype: str = "float32"


def samples(count: int | None = None) -> list[Sample]:
    """Samples with long-tailed lengths, as agents' are; half of the tokens are the policy's own,
    the others its input.

    Args:
        count: of them; the first ones are always the same. None: SAMPLES.
    """
    count = SAMPLES if count is None else count
    return [sample for draw in range(-(-count // SAMPLES)) for sample in _drawn(draw)][:count]


def _drawn(draw: int) -> list[Sample]:
    rng = np.random.default_rng(draw)
    drawn_samples = []
    for i, drawn in enumerate(rng.lognormal(5, 1, SAMPLES), draw * SAMPLES):
        length = int(np.clip(drawn, 16, LONGEST))
        mask = np.arange(length) % 64 >= 32
        tokens = rng.integers(0, VOCAB, length).astype(np.int32)
        zeros, ones = np.zeros(length, np.float32), np.ones(length, np.float32)
        versions = np.where(mask, 0, -1)
        name = f"t{i}"
        drawn_samples.append(
            Sample(
                *("bench", name, name, name, (name,), (length,), None, "train", tokens, mask, zeros),
                *(versions, ones, 0.0, {}),
            )
        )
    return drawn_samples


def make_model(folder: Path, size: Size = SMALL, dtype: str = "float32", device: str = "cpu") -> None:
    """Write a Qwen3 model, drawn on a device."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab or VOCAB,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        intermediate_size=4 * size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.width // size.heads,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        drawn = Qwen3ForCausalLM(config)
    drawn.to(getattr(torch, dtype)).save_pretrained(folder)


def _policy(model: Path, way: Way) -> tuple[Any, int]:
    """A policy, and how many copies of it there are."""
    import torch

    from rollbook.engines.weights.digests import read_weights
    from rollbook.train.config.config import OptimizerConfig
    from rollbook.train.model.model import Build
    from rollbook.train.model.shape import read_shape
    from rollbook.train.model.varlen import serves
    from rollbook.train.ranks.ranks import Ranks

    ranks, device = Ranks(count=way.ranks), torch.device(way.device)
    atexit.register(ranks.close)
    how = Build(1000, device, 0, way.threads, way.dtype, recompute=way.recompute)
    how = replace(how, flash=serves(device, how.type))
    policy = ranks.policy("actor", read_shape(model), OptimizerConfig(lr=LR), how)
    policy.load_weights(read_weights(model))
    return policy, ranks.copies


def ours(model: Path, way: Way) -> Step:
    """The trainer's own step of SFT, with the digests of its stages."""
    from rollbook.train.algorithms.sft import Sft
    from rollbook.train.batches.batch import build_batch, packed_partition, partition
    from rollbook.train.batches.experience import experience_of
    from rollbook.train.step.step import StepSettings, input_digests, run_step

    dataset = samples(way.samples)
    policy, copies = _policy(model, way)
    if way.packed:
        parts = packed_partition(dataset, way.most or MOST, policy.shape.work, 1, copies)
    else:
        parts = partition(len(dataset), ROWS)
    algorithm = Sft(name="sft", batch_size=len(dataset))
    settings = StepSettings(algorithm, LR)

    def step() -> float:
        input_digests(policy, 0, settings.trees)
        with timed("data"):
            batch = build_batch(experience_of(dataset, algorithm), parts, packed=way.packed)
        result = run_step(policy, settings, batch)
        result.evidence.described()
        return float(result.metrics["loss"])

    return step


def bare(model: Path, way: Way) -> Step:
    """The same step, packed, without digests, random states, metrics, and checks that numbers are finite."""

    from rollbook.train.algorithms.sft import Sft
    from rollbook.train.batches.batch import MicroBatch, build_batch, packed_partition
    from rollbook.train.batches.experience import experience_of
    from rollbook.train.step.predictions import Predictions

    dataset = samples(way.samples)
    policy, _ = _policy(model, way)
    parts = packed_partition(dataset, way.most or MOST, policy.shape.work, 1)
    algorithm = Sft(name="sft", batch_size=len(dataset))

    def step() -> float:
        batch = build_batch(experience_of(dataset, algorithm), parts, packed=True)

        def loss_of(logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            loss = -Predictions(logits, micro).logprobs().sum() / batch.trained_tokens
            return loss, loss.detach()

        sums: list[torch.Tensor] = policy.forward_backward(batch.micro_batches, loss_of)
        policy.optimizer_step(LR)
        return float(sum(sums))

    return step


def best_attention(device: str) -> str:
    """The attention of packed samples that transformers is given: the fastest that is installed."""
    there = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if there else "sdpa"


def plain(model: Path, way: Way) -> Step:
    """The step as one would write it with transformers: cross-entropy, AdamW, a clipped gradient.
    Padded micro-batches are of samples of similar lengths. A device is waited for once, for the loss."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(way.threads)
    attention = best_attention(way.device) if way.packed else "sdpa"
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, way.dtype), attn_implementation=attention
    ).to(way.device)
    weights, fused = policy.parameters(), way.device == "cuda" or None
    optimizer = torch.optim.AdamW(weights, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    dataset = sorted(samples(way.samples), key=len)
    total = sum(sample.trained for sample in dataset)
    if way.packed:
        micro_batches = _rows_of_packs(dataset, way.most or MOST)
    else:
        micro_batches = [dataset[i : i + ROWS] for i in range(0, len(dataset), ROWS)]

    def step() -> float:
        optimizer.zero_grad()
        losses = []
        for some in micro_batches:
            inputs, labels = _packed(some, ends=attention != "sdpa") if way.packed else _padded(some)
            placed = {
                name: value.to(way.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in inputs.items()
            }
            logits = policy(**placed, use_cache=False).logits[:, :-1].float().flatten(0, 1)
            flat = labels[:, 1:].reshape(-1).to(way.device, non_blocking=True)
            loss = torch.nn.functional.cross_entropy(logits, flat, reduction="sum") / total
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return float(torch.stack(losses).double().sum())

    return step


def _rows_of_packs(dataset: Sequence[Sample], most: int) -> list[list[Sample]]:
    """As many samples in a row as fit."""
    rows: list[list[Sample]] = [[]]
    for sample in dataset:
        if rows[-1] and sum(map(len, rows[-1])) + len(sample) > most:
            rows.append([])
        rows[-1].append(sample)
    return rows


def _packed(some: Sequence[Sample], *, ends: bool) -> tuple[dict[str, Any], Any]:
    """Samples in one row: positions restart at each, which tells transformers where they begin.

    Args:
        ends: say it beside them, too: else each layer would wait for the device to find out.
    """
    import torch

    tokens = torch.from_numpy(np.concatenate([s.tokens for s in some]).astype(np.int64))[None]
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in some]))[None]
    positions = torch.cat([torch.arange(len(s)) for s in some])[None]
    inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": positions}
    if ends:
        places = torch.from_numpy(np.cumsum([0, *map(len, some)]).astype(np.int32))
        longest = max(map(len, some))
        inputs |= {"cu_seq_lens_q": places, "cu_seq_lens_k": places}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    return inputs, tokens.where(mask, -100)


def _padded(some: Sequence[Sample]) -> tuple[dict[str, Any], Any]:
    import torch

    longest = max(map(len, some))
    tokens, labels = (torch.full((len(some), longest), fill) for fill in (0, -100))
    attended = torch.zeros_like(tokens)
    for row, sample in enumerate(some):
        ids, mask = torch.from_numpy(sample.tokens.astype(np.int64)), torch.from_numpy(sample.loss_mask)
        tokens[row, : len(ids)], attended[row, : len(ids)] = ids, 1
        labels[row, : len(ids)] = ids.where(mask, -100)
    return {"input_ids": tokens, "attention_mask": attended}, labels


SIDES: dict[str, tuple[Callable[[Path, Way], Step], Way]] = {
    OURS: (ours, Way()),
    PADDED: (ours, Way(packed=False)),
    RECOMPUTED: (ours, Way(recompute=True)),
    ONE_RANK: (ours, Way(threads=1)),
    TWO_RANKS: (ours, Way(threads=1, ranks=2)),
    LARGE: (ours, Way(samples=LARGE_SAMPLES)),
    BARE: (bare, Way()),
    PLAIN: (plain, Way(packed=False)),
    PLAIN_PACKED: (plain, Way()),
}
"""What makes a side's step, and the way that it takes it."""


def main() -> None:
    """Take steps until standard input ends."""
    side, model, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    import torch
    import transformers  # noqa: F401  (what is imported is not the model's memory)

    make, way = SIDES[side]
    if words:
        device, dtype, count, most = words
        way = replace(way, device=device, dtype=dtype, samples=int(count), most=int(most))
    on_cuda = way.device == "cuda"
    step: Step | None = None
    for line in sys.stdin:
        begun_with = _resident()
        step = step or make(model, way)
        begun = time.perf_counter()
        # A clock waits for the device wherever a part of a step ends, which is a cost of recording.
        with clock("manifest") if make is ours else contextlib.nullcontext() as counted:
            loss = step()
            if on_cuda:
                torch.cuda.synchronize()
        answer = {"seconds": time.perf_counter() - begun, "loss": loss, "resident": begun_with}
        answer |= {"manifest": counted.seconds["manifest"]} if counted else {}
        if on_cuda and orjson.loads(line).get("rest"):  # others take their turns, and need the memory
            torch.cuda.empty_cache()
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()


def _resident() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
