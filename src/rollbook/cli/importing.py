"""`rollbook import`: the shape of the rows, the first as they will be trained, and a summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from rollbook.cli.options import AsJson, LeaveOut, RowFormat, RowKeys, SkipBad, StoreOption, TemplateKwargs
from rollbook.cli.terminal import Console, print_json, say

if TYPE_CHECKING:
    from rollbook.ingest.datasets.importing import FirstLook, Pieces, Reading
    from rollbook.store.events import Json
    from rollbook.train.config.config import TrainConfig


Chats = Annotated[
    Path,
    typer.Argument(
        help='JSONL of {"messages": [...]}; with --model any file, folder or pattern of common shapes.'
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(help="Model folder whose tokenizer and chat template make tokens to train on."),
]
Show = Annotated[
    int | None, typer.Option(min=0, help="Show so many of the first samples, trained tokens marked.")
]


def import_(
    file: Chats,
    store: StoreOption,
    run: Annotated[str, typer.Option(help="Run to add the chats to.")],
    model: Model = None,
    lane: Annotated[str, typer.Option(help="Lane to write; one process each.")] = "import",
    split: Annotated[str, typer.Option(help="Split of chats that name none.")] = "teacher",
    skip_bad: SkipBad = False,
    leave_out: LeaveOut = "",
    format: RowFormat = "auto",
    key: RowKeys = None,
    chat_template_kwargs: TemplateKwargs = "",
    show: Show = None,
    json: AsJson = False,
) -> None:
    """Add chats, and with --model prompts with completions and preferences, as trajectories with tokens.

    It says which shape the rows have, and shows the first of them as it will be trained, before it writes.
    docs/importing.md has the shapes.

    rollbook import chats.jsonl.gz --store runs --run sft --model ./my-model
    rollbook import math.parquet --store runs --run sft --model ./my-model --key completion=solution
    """
    from rollbook.cli.progress import progress
    from rollbook.engines.hub import model_folder
    from rollbook.store.errors import InterchangeError
    from rollbook.store.interchange.importing import import_chats

    as_told: dict[str, Any] = {"lane": lane, "split": split, "progress": progress}
    if model is not None:
        from rollbook.ingest.datasets.importing import import_dataset

        first = (0 if json else 1) if show is None else show
        folder = model_folder(model, weights=False)
        reading = reading_of(format, key or [], first, leave_out, chat_template_kwargs)
        done = import_dataset(file, store, run, folder, skip_bad=skip_bad, reading=reading, **as_told)
    elif what := _of_rows(file, skip_bad, leave_out, format, key, show, chat_template_kwargs):
        raise InterchangeError(f"{what} needs --model DIR, whose tokenizer makes the tokens of its rows")
    else:
        done = import_chats(file, store, run, **as_told)
    print_json(done) if json else _sum_up(done, store)


TRAINED, CONTEXT = "bold green", "dim"
MARKS = ("{+", "+}")
"""Around what is trained, where there are no colours."""
SPLIT = "teacher"
"""Split of what is imported."""
PIECE = 600
"""Characters of a piece that are shown: of a longer one its beginning and its end."""


def training_data(
    file: Path,
    config: TrainConfig,
    store: Path,
    shape: str,
    keys: Sequence[str],
    *,
    skip_bad: bool,
    leave_out: str,
) -> Callable[[], None]:
    """A function that imports a file into the run of a training; what is there already stays.

    Raises:
        InterchangeError: an option cannot be used.
    """
    from rollbook.cli.progress import progress
    from rollbook.engines.hub import model_folder

    imitated = config.algorithm.needs.isdisjoint(("pairs", "rewards"))
    reading = replace(reading_of(shape, keys, 1, leave_out), imitated=imitated)
    splits = config.recipe.splits
    split = SPLIT if SPLIT in splits else splits[0]

    def bring() -> None:
        from rollbook.ingest.datasets.importing import import_dataset

        done = import_dataset(
            file,
            store,
            config.run,
            model_folder(config.model, weights=False),
            split=split,
            skip_bad=skip_bad,
            reading=reading,
            progress=progress,
        )
        _sum_up(done, store, sys.stderr)

    return bring


def _sum_up(done: Mapping[str, Any], store: Path, out: TextIO | None = None) -> None:
    """Print what was imported."""
    there = f"; {done['already_there']} were there already" if done["already_there"] else ""
    pairs = f", {done['preferences']} preferences" if done.get("preferences") else ""
    added = f"imported {done['added']} trajectories ({done['turns']} turns){pairs}"
    say(f"{added} into run {done['run']} of {store}{there}", out)
    for part, count in done.get("parts_left_out", {}).items():
        say(f"left out the {part} of {count} {'reply' if count == 1 else 'replies'}", out)
    if done.get("left_out"):
        say(f"left out {done['left_out']} rows, the first: {done['first_left_out']}", out)


def _of_rows(
    file: Path,
    skip_bad: bool,
    leave_out: str,
    shape: str,
    keys: Sequence[str] | None,
    show: int | None,
    kwargs: str,
) -> str | None:
    """The first option or kind of file of a command that only makes sense with --model, if there is any."""
    options = {"--skip-bad": skip_bad, "--leave-out": leave_out}
    options |= {"--format": shape != "auto", "--key": keys, "--show": show, "--chat-template-kwargs": kwargs}
    option = next((name for name, value in options.items() if value), None)
    if option is not None:
        return option
    if file.is_dir() or file.suffix in (".jsonl", ".ndjson", ""):
        return "a folder" if file.is_dir() else None
    return f"a file that ends with {file.suffix}"


def reading_of(shape: str, keys: Sequence[str], show: int, leave_out: str = "", kwargs: str = "") -> Reading:
    """How rows are read, and what is shown of them, by the options of a command.

    Raises:
        InterchangeError: an option says something else.
    """
    from rollbook.ingest.datasets.formats import AUTO, SHAPES
    from rollbook.ingest.datasets.importing import Reading
    from rollbook.store.errors import InterchangeError

    if shape not in (AUTO, *SHAPES):
        raise InterchangeError(f"--format {shape!r}: use one of {', '.join((AUTO, *SHAPES))}")
    pairs = [key.partition("=") for key in keys]
    for name, _, own in pairs:
        if not (name and own):
            raise InterchangeError(f"--key {name!r}: write NAME=KEY, such as completion=solution")
    template_kwargs = _object("--chat-template-kwargs", kwargs)
    return Reading(
        shape, {name: own for name, _, own in pairs}, show, _tell, _parts(leave_out), template_kwargs
    )


def _object(option: str, text: str) -> Json:
    """The JSON object that an option holds; empty where it was not given.

    Raises:
        InterchangeError: it is none.
    """
    import orjson

    from rollbook.store.errors import InterchangeError

    try:
        value = orjson.loads(text or b"{}")
    except orjson.JSONDecodeError as error:
        raise InterchangeError(f"{option} {text!r}: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise InterchangeError(f"{option} {text!r}: write a JSON object")
    return value


def _parts(leave_out: str) -> list[str]:
    """The parts of replies that `--leave-out` names.

    Raises:
        InterchangeError: one of them cannot be left out.
    """
    from rollbook.ingest.replies.written import LEFT_OUT
    from rollbook.store.errors import InterchangeError

    parts = [part.strip() for part in leave_out.split(",") if part.strip()]
    for part in parts:
        if part not in LEFT_OUT:
            raise InterchangeError(f"--leave-out {part!r}: choose from {', '.join(LEFT_OUT)}")
    return parts


def _tell(look: FirstLook) -> None:
    """Say on standard error which shapes were seen, and show the first samples."""
    console = Console(stderr=True)
    counts = ", ".join(f"{shape} ({count:,})" for shape, count in look.shapes.items())
    console.tell(f"shape of the rows: {counts}")
    coloured = console.is_terminal and not console.no_color
    for number, sample in enumerate(look.samples, 1):
        like = ("like this", TRAINED) if coloured else f"within {' '.join(MARKS)}"
        console.tell(f"sample {number}; what is trained stands ", like, ":")
        console.tell(*_drawn(sample, coloured=coloured))


def _drawn(sample: Pieces, *, coloured: bool) -> list[str | tuple[str, str]]:
    """A sample's text, what is trained in a colour or between marks."""
    drawn: list[str | tuple[str, str]] = []
    for text, trained in sample:
        left, half = len(text) - PIECE, PIECE // 2
        short = text if left <= 0 else f"{text[:half]} ... {left:,} characters more ... {text[-half:]}"
        if coloured:
            drawn.append((short, TRAINED if trained else CONTEXT))
        else:
            drawn.append(f"{MARKS[0]}{short}{MARKS[1]}" if trained else short)
    return drawn
