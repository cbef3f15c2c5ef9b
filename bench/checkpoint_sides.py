"""A training in a separate process that takes steps, writes checkpoints and resumes from one, on
request.

    python -m rollbook.bench.checkpoint_sides RANKS MODEL FOLDER

It shards matrices among its ranks. Answers each line of standard input with a line of JSON.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from rollbook.bench.train_sides import MOST, samples

SAMPLES, RUN = 4, "bench"
LR = 1e-4
SGD_LIKE: dict[str, Any] = {"lr": LR, "eps": 1.0, "clip_grad": 0.0}
"""Adam whose steps are proportional to gradients, so that layouts can be compared by their weights."""
WAYS: dict[str, dict[str, bool]] = {
    "whole": {},
    "overlapped": {"overlap": True},
    "sharded": {"sharded": True},
    "sharded, overlapped": {"overlap": True, "sharded": True},
}


class Side:
    """A training of SFT over ranks, its store, and its checkpoints."""

    def __init__(self, count: int, model: Path, folder: Path) -> None:
        import torch

        from rollbook import store
        from rollbook.store.fold.history import History
        from rollbook.train.config.config import OptimizerConfig
        from rollbook.train.config.parallel import ParallelConfig
        from rollbook.train.model.model import Build
        from rollbook.train.model.shape import read_shape
        from rollbook.train.ranks.ranks import Ranks

        self._model, self._folder, self._history = model, folder, History(RUN, "actor")
        self._log = store.open(folder / "store", create=True)
        self._ranks = Ranks(ParallelConfig(tensor=count), count)
        how = Build(1000, torch.device("cpu"), 0, 1)
        optimizer = OptimizerConfig(**SGD_LIKE)
        self._policy = self._ranks.policy("actor", read_shape(model), optimizer, how)

    def begin(self) -> dict[str, Any]:
        """Start from the model."""
        from rollbook.engines.weights.digests import read_weights

        self._policy.load_weights(read_weights(self._model))
        return {}

    def resume(self, path: str) -> dict[str, Any]:
        """Be ready for the next step after a checkpoint."""
        from rollbook.train.checkpoints.checkpoint import read_checkpoint

        held = read_checkpoint(Path(path))
        self._policy.load_weights(held.weights)
        self._policy.load_optimizer_state(held.optimizer or {})
        return {}

    def step(self) -> dict[str, Any]:
        """Take a step; its loss and gradient norm."""
        from rollbook.train.algorithms.sft import Sft
        from rollbook.train.batches.batch import build_batch, packed_partition
        from rollbook.train.batches.experience import experience_of
        from rollbook.train.step.step import StepSettings, run_step

        some = samples()[:SAMPLES]
        parts = packed_partition(some, MOST, self._policy.shape.work, 1, self._ranks.copies)
        algorithm = Sft(name="sft", batch_size=SAMPLES)
        batch = build_batch(experience_of(some, algorithm), parts, packed=True)
        loss = run_step(self._policy, StepSettings(algorithm, LR), batch).metrics["loss"]
        # The step's own norm is a float32 sum, whose rounding depends on how it is split among ranks.
        squares = [float(gradient.double().square().sum()) for _, gradient in self._policy.stream_gradients()]
        return {"loss": loss, "gradient_norm": math.sqrt(math.fsum(squares))}

    def write(self, way: str) -> dict[str, Any]:
        """Write a checkpoint; how long the training waited for it. During an overlapped one a step
        is taken."""
        from rollbook.store import Event
        from rollbook.store.events import Record
        from rollbook.train.config.config import parse_config
        from rollbook.train.publish.publish import Checkpointer, TrainedVersion

        values = {"run": RUN, "model": str(self._model), "steps": 1, "checkpoint": WAYS[way]}
        config = parse_config(values | {"algorithm": {"name": "sft"}}, way)
        with self._log.writer("train") as writer:

            def append(*records: Record) -> None:
                writer.append([Event(record, RUN) for record in records]).result()

            keeper = Checkpointer(config, self._log, self._history, append)
            meanwhile = config.checkpoint.overlap
            begun = time.perf_counter()
            keeper.write(TrainedVersion(self._policy, 1, self._model, "bench"), meanwhile=meanwhile)
            held = time.perf_counter() - begun
            if meanwhile:
                self.step()
            keeper.settle()
            keeper.close()
        return {"seconds": held, "path": str(self._log.path / self._history.checkpoints[-1].path)}

    def save(self, to: str) -> dict[str, Any]:
        """Write the weights into a file."""
        from safetensors.torch import save_file

        save_file({name: t.contiguous() for name, t in self._policy.stream_weights()}, to)
        return {}

    def remove(self, path: str) -> dict[str, Any]:
        """Remove a checkpoint."""
        shutil.rmtree(path)
        return {}

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()


def main() -> None:
    """Execute commands until standard input ends."""
    side = Side(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    acts: dict[str, Callable[..., dict[str, Any]]] = {
        "begin": side.begin,
        "resume": side.resume,
        "step": side.step,
        "write": side.write,
        "save": side.save,
        "remove": side.remove,
    }
    for line in sys.stdin:
        command = orjson.loads(line)
        answer = acts[command.pop("do")](**command)
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()
    side.close()


if __name__ == "__main__":
    main()
