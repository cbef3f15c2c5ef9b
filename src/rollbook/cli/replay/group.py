"""`rollbook replay`: its commands, in the order of its help."""

from __future__ import annotations

import typer

from rollbook.cli.groups import Announced, group_of

COMMANDS = {
    "open": Announced(
        "replay.bundle:open_bundle",
        "Check every byte of a bundle, and replay its step: bit for bit, or the first stage that differs.",
    ),
    "serve": Announced(
        "replay.serve:replay_serve",
        "Answer an agent from recorded trajectories, without an engine. See docs/cassettes.md.",
    ),
    "step": Announced(
        "replay.step:replay_step",
        "Re-run a past optimizer step from the log and compare every stage bit for bit.",
    ),
    "rollout": Announced(
        "replay.rollout:rollout",
        "Sample a recorded trajectory again, with other weights or the same, as a new one of split replay.",
    ),
    "run": Announced(
        "replay.stretch:replay_run",
        "Prove a stretch of a training: replay every step of it, from checkpoint to checkpoint.",
    ),
    "weights": Announced(
        "replay.stretch:replay_weights",
        "Rebuild a version that no checkpoint has, and prove each step's digests on the way.",
    ),
    "bisect": Announced("replay.bisect:replay_bisect", "Find the first bad step of a training."),
    "what-if": Announced(
        "replay.what_if:what_if",
        "Take a recorded step by another recipe, algorithm, optimizer or reward, beside what was recorded.",
    ),
    "export": Announced("replay.bundle:export_app", "Write what a replay needs to one file, for others."),
}

replay_app = typer.Typer(
    cls=group_of(COMMANDS), no_args_is_help=True, help="Re-run what the log says happened, and compare."
)
