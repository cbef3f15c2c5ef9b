"""`rollbook replay rollout`: its options. What it does is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import AsJson, StoreOption

Named = Annotated[str, typer.Argument(help="The client's name of it, our id, or the id's end.")]
OfPolicy = Annotated[
    str | None,
    typer.Option(help="Version whose weights sample, from its checkpoint: 12; of another policy: NAME:12."),
]
Model = Annotated[
    Path | None, typer.Option(help="Instead of --policy: a model directory; for sglang its tokenizer.")
]
First = Annotated[int | None, typer.Option(min=1, help="First turn that is sampled again, as `show` counts.")]
Last = Annotated[int | None, typer.Option(min=1, help="Last turn that is sampled again.")]
Continue = Annotated[
    bool, typer.Option("--continue", help="Go on from the new replies; else each request is as recorded.")
]
OfRun = Annotated[
    str | None, typer.Option("--run", help="Run of the trajectory, where several have one of the name.")
]
PolicyRun = Annotated[
    str | None,
    typer.Option(help="Run of the version, which the replay is recorded in; default: the trajectory's."),
]
Seed = Annotated[int | None, typer.Option(help="Draw anew, by this seed; default: the recorded ones.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Take the most probable token each time.")]
OfEngine = Annotated[str, typer.Option(help="embedded, sglang or scripted.")]
Url = Annotated[str | None, typer.Option(help="For sglang: the address; key: ROLLBOOK_ENGINE_KEY.")]
Script = Annotated[str | None, typer.Option(help="For scripted: file.py:function or file.jsonl.")]
Device = Annotated[str, typer.Option(help="For embedded: cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="For embedded: torch threads on the CPU.")]
Lane = Annotated[str, typer.Option(help="Lane to write; one process each.")]


def rollout(
    trajectory: Named,
    store: StoreOption,
    policy: OfPolicy = None,
    model: Model = None,
    from_turn: First = None,
    until_turn: Last = None,
    continue_: Continue = False,
    run: OfRun = None,
    policy_run: PolicyRun = None,
    seed: Seed = None,
    greedy: Greedy = False,
    engine: OfEngine = "embedded",
    engine_url: Url = None,
    script: Script = None,
    device: Device = "cpu",
    threads: Threads = None,
    lane: Lane = "replay",
    json: AsJson = False,
) -> None:
    """Sample a recorded trajectory again, with other weights or the same, as a new one of split replay.

    Each recorded request is sent again with exactly its token ids, and each
    new reply compared with the recorded one. With --continue the first
    request is, and the new reply is followed by the messages that the agent
    sent then: a user's always, a tool's result only for the same call.
    The recorded trajectory stays as it is, and replays are never trained on.

    Exit code 1: a turn with the same prompt, weights and draws has other
    tokens. With other weights or draws the code is 0.

    rollbook replay rollout task-7 --policy 12 --store runs
    rollbook replay rollout task-7 --policy 12 --from-turn 3 --continue --greedy --store runs
    rollbook replay rollout task-7 --model ./my-model --store runs --json
    """
    from rollbook.cli.replay.rollout_report import run_rollout, weights_of
    from rollbook.replay.rollouts.source import Draws

    weights = weights_of(policy, policy_run, model, engine, engine_url, script, device, threads)
    turns, draws = (from_turn, until_turn), Draws(seed, greedy)
    raise typer.Exit(run_rollout(store, trajectory, run, weights, turns, continue_, draws, lane, json))
