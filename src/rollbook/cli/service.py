"""`rollbook service`: clients train from a base model, each with a loop of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rollbook.cli.groups import group_with
from rollbook.cli.options import AsJson, StoreOption
from rollbook.cli.terminal import Console, draw_table, print_json, say

service_app = typer.Typer(
    cls=group_with("serve", words=True),
    no_args_is_help=True,
    help="Serve training to clients of the Tinker API: they own data, losses and the loop.\n\n"
    "A file alone is served: rollbook service service.toml --store runs.",
)

EngineKey = Annotated[
    str | None, typer.Option(envvar="ROLLBOOK_ENGINE_KEY", help="The --api-key of a sampler's server.")
]
AdminKey = Annotated[
    str | None, typer.Option(envvar="ROLLBOOK_ENGINE_ADMIN_KEY", help="Its --admin-api-key.")
]


@service_app.command("serve")
def service(
    config: Annotated[Path, typer.Argument(help="TOML file: the base model, and how it computes.")],
    store: StoreOption,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8090,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys (rollbook keys): a writer's is a tenant's.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="ROLLBOOK_API_KEYS", help="An operator's key.")
    ] = None,
    engine_key: EngineKey = None,
    engine_admin_key: AdminKey = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set threads=4.")] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print what holds, defaults included, and serve nothing.")
    ] = False,
) -> None:
    """Serve training to clients of the Tinker API: they own data, losses and the loop.

    Every request is an event before it is answered, so a crash loses none and does
    none twice, and a model is the same bits afterwards. What is served: docs/service.md.

    rollbook service service.toml --store runs
    """
    from rollbook.edge.keys import keys_of
    from rollbook.ingest.secrets import engine_key_of
    from rollbook.service.config import load_service_config
    from rollbook.store.config import toml_lines
    from rollbook.store.open import open_store

    settings = load_service_config(config, set_ or [])
    if show_config:
        say(toml_lines(settings.model_dump(mode="json")))
        return

    from rollbook.service.serve import serve_service

    def announce(url: str) -> None:
        say(f"{settings.base_name} can be trained at {url}: have clients set TINKER_BASE_URL={url}")
        sys.stdout.flush()  # a program may wait for it

    known = keys_of(api_key or (), keys, os.environ)
    own = engine_key_of(engine_key, os.environ), engine_key_of(engine_admin_key, os.environ, admin=True)
    serve_service(settings, open_store(store, create=True), host, port, known, announce, own)


@service_app.command()
def worker(
    config: Annotated[Path, typer.Argument(help="TOML file of the service.")],
    store: StoreOption,
    ray: Annotated[
        int, typer.Option(min=0, help="Have Ray place so many on the nodes of its cluster; 0: train here.")
    ] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set threads=4.")] = None,
) -> None:
    """Train for a service whose processes share a store: on this host, or on another that has its folder.

    What a worker has begun and not done when it ends, another one does.

    rollbook service worker service.toml --store runs
    """
    import signal
    import threading

    from rollbook.service.config import load_service_config
    from rollbook.service.serve import work
    from rollbook.store.open import open_store

    settings, ending = load_service_config(config, set_ or []), threading.Event()

    def announce() -> None:
        say(f"{settings.base_name} is trained {f'by {ray} workers of Ray' if ray else 'here'}")
        sys.stdout.flush()  # a program may wait for it

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    if not ray:
        work(settings, open_store(store, create=True), announce, ending.wait)
        return

    from rollbook.service.ray_workers import work_on_ray

    work_on_ray(settings, open_store(store, create=True).path, ray, ending.wait, announce)


@service_app.command()
def status(store: StoreOption, json: AsJson = False) -> None:
    """What clients made, what waits, and how long operations took, by the log: of a service that runs or not.

    A row for each model, and one for what is sampled in each session. Times are
    of the last 1,000 operations of each, from accepted to ended.
    """
    from rollbook.service.status import status_of
    from rollbook.store.ids import now_us
    from rollbook.store.open import open_store

    rows = [asdict(row) for row in status_of(open_store(store), now_us())]
    if json:
        print_json(rows)
        return
    if not rows:
        say("no client has made anything yet")
        return
    draw_table(Console(), [*rows[0]], [tuple(map(_shown, row.values())) for row in rows])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "" if value is None else str(value)
