"""`rollbook serve`: a file of settings, an option for each of its keys, and what is printed once it listens.

The options are made from `ServeSettings`.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from rollbook.cli.options import STORE_VARIABLE
from rollbook.cli.terminal import Console, LogFormatter, say
from rollbook.ingest.settings import ServeSettings, as_toml, load_settings
from rollbook.store.config import described

if TYPE_CHECKING:
    from rollbook.ingest.serve.serve import Started

GIVEN = ("COMMANDLINE", "ENVIRONMENT")
"""Where an option's value comes from if it overrules the file."""
SECRET_OPTIONS: Mapping[str, tuple[type, str, str]] = {
    "engine_key": (str, "ROLLBOOK_ENGINE_KEY", "The engine's API key."),
    "engine_admin_key": (
        str,
        "ROLLBOOK_ENGINE_ADMIN_KEY",
        "For sglang with --admin-api-key: that key.",
    ),
    "api_key": (list[str], "ROLLBOOK_API_KEYS", "An operator's key; let in only who has one."),
}
"""Option -> its type, variable and help. They are no keys of the file."""


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with a parameter for each setting and secret."""
    parameters = [
        _parameter("ctx", typer.Context),
        _parameter(
            "config",
            Annotated[Path | None, typer.Argument(help="TOML file of settings.", show_default=False)],
            None,
        ),
        *(_option(name, text) for name, text in described(ServeSettings).items()),
        *(
            _parameter(name, Annotated[kind | None, typer.Option(envvar=variable, help=text)], None)
            for name, (kind, variable, text) in SECRET_OPTIONS.items()
        ),
        _parameter(
            "show_config",
            Annotated[bool, typer.Option("--show-config", help="Print what holds, and serve nothing.")],
            False,
        ),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _option(name: str, text: str) -> inspect.Parameter:
    """The option of a key. Its default is only shown, because a settings file may set another value."""
    field = ServeSettings.model_fields[name]
    variable = STORE_VARIABLE if name == "store" else None
    kind, default = _kind(field.annotation), field.get_default()
    if field.is_required() or default == ():
        kind, default = kind | None, None
    option = typer.Option(envvar=variable, help=text)
    return _parameter(name, Annotated[kind, option], default)


def _kind(annotation: Any) -> Any:
    """The option's type, given the setting's type."""
    if get_origin(annotation) is tuple:
        return list[str]
    plain = [arg for arg in get_args(annotation) if arg is not type(None)]
    optional = len(plain) < len(get_args(annotation))
    if optional:
        return (str if get_origin(plain[0]) is dict else plain[0]) | None
    return annotation


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@_with_options
def serve(ctx: typer.Context, config: Path | None, show_config: bool, **values: Any) -> None:
    """Record agents: OpenAI's and Anthropic's APIs, and all that passes becomes durable events.

    An agent changes one line: base_url="http://127.0.0.1:8000/t/ANY-ID/v1" (Anthropic: without /v1).
    Options overrule CONFIG; its keys are in docs/serving.md.
    """
    given = {
        name: _as_setting(name, value)
        for name, value in values.items()
        if name not in SECRET_OPTIONS and _is_given(ctx, name)
    }
    settings = load_settings(config, given)
    if show_config:
        say(as_toml(settings))
        return
    # Modules, what was recorded and conversations are long-lived, without cycles: look less often for some.
    gc.set_threshold(50_000, 20, 50)
    from rollbook.ingest.secrets import secrets_of
    from rollbook.ingest.serve.serve import serve as run_server
    from rollbook.store.errors import FencedError

    secrets = secrets_of(
        settings,
        os.environ,
        socket.gethostname(),
        engine_key=values["engine_key"],
        engine_admin_key=values["engine_admin_key"],
        api_keys=values["api_key"] or (),
    )
    try:
        run_server(settings, secrets, announce)
    except FencedError as error:
        # As another process, of the same number: nothing of what this one held is left in it.
        logging.getLogger(__name__).warning("%s; this proxy begins again", error)
        os.execv(sys.executable, sys.orig_argv)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in GIVEN


def _as_setting(name: str, value: Any) -> Any:
    """An option's value in the form of the settings file."""
    if name == "engine_ask":
        from rollbook.ingest.fields import json_object

        return json_object(value.encode())
    return value


def announce(started: Started) -> None:
    """Print the address for agents, and the detected settings, on standard error."""
    if logging.lastResort is not None:  # a line is one line, without the secrets that a message may repeat
        logging.lastResort.setFormatter(LogFormatter())
    console = Console(stderr=True)
    console.tell("recording run ", (started.run, "bold"), f" into {started.store} (lane {started.lane})")
    console.tell("point an agent here: base_url = ", (f"{started.url}/t/ANY-ID/v1", "bold"))
    for lane, count in started.adopted.items():
        console.print(f"adopted {count} open trajectories of lane {lane}, whose process is gone")
    if started.truncated_bytes:
        console.print(f"recovered: cut off {started.truncated_bytes} bytes of a write that never finished")
    if started.exposed:
        text = "listening beyond this host, and everybody may come in: set --keys or --api-key"
        console.tell((text, "yellow"))
    if started.upstream is not None:
        console.tell("passing on to ", (started.upstream, "bold"), ", token ids kept where it returns them")
    if started.reply_format is not None:
        console.print(f"replies are read as {started.reply_format}")
    if started.refused:
        console.tell((f"turns are never extended, each is a root: {started.refused}", "yellow"))
    for note in started.notes:
        console.tell((note, "yellow"))
