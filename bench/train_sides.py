"""One side of the benchmark of training, in a separate process: it takes a step on each request.

    python -m rollbook.bench.train_sides SIDE MODEL

Answers each line of standard input with a line of JSON. The samples are the same for all sides.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """How the trainer takes its steps."""

    packed: bool = True
    recompute: bool = False
    ranks: int = 1
    threads: int = THREADS
    samples: int = SAMPLES


def samples() -> list[Sample]:
    """Samples with long-tailed lengths, as agents' are; half of the tokens are the policy's own,
    the others its input."""
    rng = np.random.default_rng(0)
    drawn_samples = []
    for i, drawn in enumerate(rng.lognormal(5, 1, SAMPLES)):
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


def make_model(folder: Path, size: Size = SMALL) -> None:
    """Write a Qwen3 model."""
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
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _policy(model: Path, way: Way) -> tuple[Any, int]:
    """A policy, and how many copies of it there are."""
    import torch

    from rollbook.engines.weights.digests import read_weights
    from rollbook.train.config.config import OptimizerConfig
    from rollbook.train.model.model import Build
    from rollbook.train.model.shape import read_shape
    from rollbook.train.ranks.ranks import Ranks

    ranks = Ranks(count=way.ranks)
    atexit.register(ranks.close)
    how = Build(1000, torch.device("cpu"), 0, way.threads, recompute=way.recompute)
    policy = ranks.policy("actor", read_shape(model), OptimizerConfig(lr=LR), how)
    policy.load_weights(read_weights(model))
    return policy, ranks.copies


def ours(model: Path, way: Way) -> Step:
    """The trainer's own step of SFT, with the digests of its stages."""
    from rollbook.train.algorithms.sft import Sft
    from rollbook.train.batches.batch import build_batch, packed_partition, partition
    from rollbook.train.batches.experience import experience_of
    from rollbook.train.step.step import StepSettings, input_digests, run_step

    dataset = samples()[: way.samples]
    policy, copies = _policy(model, way)
    if way.packed:
        parts = packed_partition(dataset, MOST, policy.shape.work, 1, copies)
    else:
        parts = partition(len(dataset), ROWS)
    algorithm = Sft(name="sft", batch_size=len(dataset))
    settings = StepSettings(algorithm, LR)

    def step() -> float:
        input_digests(policy, 0)
        with timed("data"):
            batch = build_batch(experience_of(dataset, algorithm), parts, packed=way.packed)
        result = run_step(policy, settings, batch)
        result.evidence.described()
        return float(result.metrics["loss"])

    return step


def bare(model: Path) -> Step:
    """The same step without digests, random states, metrics, and checks that numbers are finite."""

    from rollbook.train.algorithms.sft import Sft
    from rollbook.train.batches.batch import MicroBatch, build_batch, packed_partition
    from rollbook.train.batches.experience import experience_of
    from rollbook.train.step.predictions import Predictions

    dataset = samples()
    policy, _ = _policy(model, Way())
    parts = packed_partition(dataset, MOST, policy.shape.work, 1)
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


def plain(model: Path, *, packed: bool) -> Step:
    """The step as one would write it with transformers: cross-entropy, AdamW, a clipped gradient.
    Padded micro-batches are of samples of similar lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    dataset = sorted(samples(), key=len)
    total = sum(sample.trained for sample in dataset)
    micro_batches = (
        _rows_of_packs(dataset) if packed else [dataset[i : i + ROWS] for i in range(0, SAMPLES, ROWS)]
    )

    def step() -> float:
        optimizer.zero_grad()
        loss_sum = 0.0
        for some in micro_batches:
            inputs, labels = _packed(some) if packed else _padded(some)
            logits = policy(**inputs, use_cache=False).logits[:, :-1]
            flat = labels[:, 1:].reshape(-1)
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), flat, reduction="sum") / total
            torch.autograd.backward(loss)
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss_sum

    return step


def _rows_of_packs(dataset: Sequence[Sample]) -> list[list[Sample]]:
    """As many samples in a row as fit."""
    rows: list[list[Sample]] = [[]]
    for sample in dataset:
        if rows[-1] and sum(map(len, rows[-1])) + len(sample) > MOST:
            rows.append([])
        rows[-1].append(sample)
    return rows


def _packed(some: Sequence[Sample]) -> tuple[dict[str, Any], Any]:
    """Samples in one row: positions restart at each, which tells transformers where they begin."""
    import torch

    tokens = torch.from_numpy(np.concatenate([s.tokens for s in some]).astype(np.int64))[None]
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in some]))[None]
    positions = torch.cat([torch.arange(len(s)) for s in some])[None]
    return {"input_ids": tokens, "position_ids": positions}, tokens.where(mask, -100)


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


SIDES: dict[str, Callable[[Path], Step]] = {
    OURS: lambda model: ours(model, Way()),
    PADDED: lambda model: ours(model, Way(packed=False)),
    RECOMPUTED: lambda model: ours(model, Way(recompute=True)),
    ONE_RANK: lambda model: ours(model, Way(threads=1)),
    TWO_RANKS: lambda model: ours(model, Way(threads=1, ranks=2)),
    LARGE: lambda model: ours(model, Way(samples=LARGE_SAMPLES)),
    BARE: bare,
    PLAIN: lambda model: plain(model, packed=False),
    PLAIN_PACKED: lambda model: plain(model, packed=True),
}


def main() -> None:
    """Take steps until standard input ends."""
    side, model = sys.argv[1], Path(sys.argv[2])
    import torch  # noqa: F401  (what is imported is not the model's memory)
    import transformers  # noqa: F401

    step: Step | None = None
    for _ in sys.stdin:
        begun_with = _resident()
        step = step or SIDES[side](model)
        begun = time.perf_counter()
        with clock("manifest") as counted:
            loss = step()
        answer = {"seconds": time.perf_counter() - begun, "loss": loss, "resident": begun_with}
        answer["manifest"] = counted.seconds["manifest"]
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()


def _resident() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
