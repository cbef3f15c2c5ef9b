"""A training that goes wrong from one step on: its optimizer uses another learning rate than it
records.

    python -m rollbook.bench.replay_fault CONFIG STORE STEP

Everything else is `rollbook train`, and no record shows the fault: only the steps' results do.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollbook.cli.train.training import run_train
from rollbook.train.config.files import load_config
from rollbook.train.loop import trainer
from rollbook.train.step.step import StepResult, StepSettings, run_step

TIMES = 1.001
"""What the learning rate becomes."""


def main() -> None:
    """Train, with a wrong learning rate from a step on."""
    config, log, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

    def wrongly(policy: Any, settings: StepSettings, batch: Any, **options: Any) -> StepResult:
        if settings.version >= first:
            settings = replace(settings, learning_rate=settings.learning_rate * TIMES)
        return run_step(policy, settings, batch, **options)

    trainer.run_step = wrongly  # type: ignore[attr-defined]
    run_train(load_config(config, []), log, "cut", "head", "train", None, None)


if __name__ == "__main__":
    main()
