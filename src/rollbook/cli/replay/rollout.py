"""`rollbook replay rollout`: a trajectory sampled again, and how its turns compare."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rollbook.cli.options import AsJson, Named, StoreOption
from rollbook.cli.terminal import Console, print_json, table_of

if TYPE_CHECKING:
    from rollbook.replay.rollouts.compare import SampledToken, TurnAgain
    from rollbook.replay.rollouts.rollout import Rollout, RolloutReplay, Weights
    from rollbook.store.log.store import Store

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
    from rollbook.cli.runs import of_run
    from rollbook.replay.rollouts.rollout import Rollout
    from rollbook.replay.rollouts.source import Draws
    from rollbook.store.open import open_store
    from rollbook.transcript.finding import find_trajectory

    weights = weights_of(policy, policy_run, model, engine, engine_url, script, device, threads)
    log = open_store(store)
    with of_run(log, run):
        opening = find_trajectory(log, log.head(), trajectory, run)
    turns, draws = (from_turn, until_turn), Draws(seed, greedy)
    again = Rollout(opening.trajectory_id, "continued" if continue_ else "repeated", *turns, draws)
    raise typer.Exit(run_rollout(log, again, weights, lane, json))


_POLICY = re.compile(r"(?:(?P<name>.+):)?(?P<version>[0-9]{1,18})")


def weights_of(
    policy: str | None,
    run: str | None,
    model: Path | None,
    engine: str,
    url: str | None,
    script: str | None,
    device: str,
    threads: int | None,
) -> Weights:
    """The weights and the engine that the options name.

    Raises:
        BadParameter: the policy is no version.
    """
    from rollbook.engines.address import EngineAddress
    from rollbook.engines.hub import model_folder
    from rollbook.replay.rollouts.rollout import Weights

    match = None if policy is None else _POLICY.fullmatch(policy)
    if policy is not None and match is None:
        raise typer.BadParameter(f"{policy!r}: give a version, such as 12, or NAME:12", param_hint="--policy")
    return Weights(
        version=None if match is None else int(match["version"]),
        policy="actor" if match is None or match["name"] is None else match["name"],
        run=run,
        model=None if model is None else model_folder(model, weights=engine == "embedded"),
        engine=engine,
        engine_urls=() if url is None else (EngineAddress.of(url),),
        script=script,
        device=device,
        threads=threads,
    )


def run_rollout(log: Store, rollout: Rollout, weights: Weights, lane: str, as_json: bool) -> int:
    """Replay a trajectory and print the comparison; the exit code, 1 if a turn that repeats differs."""
    from rollbook.replay.rollouts.rollout import replay_rollout

    result = replay_rollout(log, rollout, weights, lane)
    if as_json:
        fields = asdict(result)
        for values, turn in zip(fields["turns"], result.turns, strict=True):
            values |= {"same": turn.same, "repeatable": turn.repeatable}
        print_json(fields)
    else:
        _print(result)
    return 1 if result.differing else 0


def _print(result: RolloutReplay) -> None:
    console = Console()
    version = "weights of no version" if result.policy_version is None else f"version {result.policy_version}"
    console.tell(
        (result.trajectory, "bold"),
        f" of run {result.run}, {result.how} with {version} of policy {result.policy} ({result.engine})",
    )
    table = table_of(">turn", ">prompt", ">recorded", ">now", ">largest gap", no_wrap=True)
    table.add_column("tokens")
    for turn in result.turns:
        gap = "" if turn.largest_gap is None else f"{turn.largest_gap:.6f}"
        counts = (turn.prompt_tokens, turn.recorded_tokens, turn.new_tokens)
        table.add_row(str(turn.number), *map(str, counts), gap, _outcome(turn))
    console.print(table)
    if result.stopped is not None:
        console.tell(("stopped ", "yellow"), result.stopped)
    console.tell("recorded as ", (result.new_trajectory, "bold"), f" of run {result.new_run}, split replay")
    _print_verdict(console, result)


def _outcome(turn: TurnAgain) -> Text:
    if turn.same:
        return Text("same" if turn.same_prompt else "same, behind another prompt", "green")
    at = f"differ at {turn.differs_at}: recorded {_token(turn.recorded)}, now {_token(turn.new)}"
    return Text(at, "red" if turn.repeatable else "yellow")


def _token(token: SampledToken | None) -> str:
    if token is None:
        return "its end"
    logprob = "" if token.logprob is None else f" at {token.logprob:.4f}"
    return f"{token.text!r} ({token.token_id}){logprob}"


def _print_verdict(console: Console, result: RolloutReplay) -> None:
    repeatable = [turn for turn in result.turns if turn.repeatable]
    same = sum(turn.same for turn in result.turns)
    if not repeatable:
        why = "other weights" if not any(t.same_weights for t in result.turns) else "other draws or prompts"
        console.tell(f"{same} of {len(result.turns)} turns have the same tokens, with {why}")
    elif result.differing:
        numbers = ", ".join(str(turn.number) for turn in result.differing)
        console.tell("same prompt, weights and draws: ", ("differs", "bold red"), f" in turn {numbers}")
    else:
        what = f"same prompt, weights and draws in {len(repeatable)} of {len(result.turns)} turns: "
        console.tell(what, ("the same tokens", "bold green"))
