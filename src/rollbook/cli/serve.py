"""`rollbook serve` and its options."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.options import StoreOption


class OnStoreFailure(StrEnum):
    """What a proxy that only records does where it cannot."""

    pass_ = "pass"
    refuse = "refuse"


class Reasoning(StrEnum):
    """What a reply's reasoning that a client drops means."""

    restore = "restore"
    respect = "respect"


class Rewrites(StrEnum):
    """What is done where a chat template rewrites earlier turns."""

    faithful = "faithful"
    preserve = "preserve"


class Unfinished(StrEnum):
    """What is done after a turn without an end-of-turn token."""

    root = "root"
    close = "close"


def serve(  # size: one option a line
    store: StoreOption,
    model: Annotated[
        Path | None, typer.Option(help="Model directory; for sglang its tokenizer and template do.")
    ] = None,
    engine: Annotated[str, typer.Option(help="embedded, sglang, upstream or scripted.")] = "embedded",
    engine_url: Annotated[
        list[str] | None,
        typer.Option(help="For sglang and upstream: the address; several SGLang servers: once each."),
    ] = None,
    engine_key: Annotated[
        str | None, typer.Option(envvar="ROLLBOOK_ENGINE_KEY", help="The engine's API key.")
    ] = None,
    engine_admin_key: Annotated[
        str | None,
        typer.Option(envvar="ROLLBOOK_ENGINE_ADMIN_KEY", help="For sglang with --admin-api-key: that key."),
    ] = None,
    engine_ask: Annotated[
        str | None,
        typer.Option(help='For upstream: JSON to ask for besides, such as {"return_token_ids": true}.'),
    ] = None,
    script: Annotated[str | None, typer.Option(help="For scripted: file.py:function or file.jsonl.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    run: Annotated[str, typer.Option(help="Run to record into.")] = "default",
    lane: Annotated[str, typer.Option(help="Lane to write; one process each.")] = "serve",
    policy: Annotated[str, typer.Option(help="Name of the line of weights served.")] = "actor",
    device: Annotated[str, typer.Option(help="For embedded: cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="For embedded: torch threads on the CPU.")] = None,
    images: Annotated[bool, typer.Option(help="For sglang: its model takes images.")] = False,
    routed_experts: Annotated[
        bool, typer.Option(help="For sglang with --enable-return-routed-experts: keep each token's experts.")
    ] = False,
    image_host: Annotated[
        list[str] | None,
        typer.Option(help="Fetch linked images from this host; other links pass on."),
    ] = None,
    reply_format: Annotated[
        str, typer.Option(help="How replies are read: auto (by the chat template), hermes, qwen_coder, ...")
    ] = "auto",
    reasoning: Annotated[
        Reasoning,
        typer.Option(help="Reasoning that a client drops: restore it, or respect the removal."),
    ] = Reasoning.restore,
    history: Annotated[
        Rewrites, typer.Option(help="Where the template rewrites earlier turns: a root, or preserve them.")
    ] = Rewrites.faithful,
    unfinished: Annotated[
        Unfinished, typer.Option(help="After a turn that was cut off: a root, or close it and go on.")
    ] = Unfinished.root,
    hold_s: Annotated[float, typer.Option(help="Longest wait for an engine whose weights change.")] = 110.0,
    abandon_s: Annotated[
        float, typer.Option(help="Finish trajectories not heard of for so long, as aborted; 0: never.")
    ] = 0.0,
    keys: Annotated[
        Path | None,
        typer.Option(help="File of keys, each with a role: see `rollbook keys`. Read again as it changes."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="ROLLBOOK_API_KEYS", help="An operator's key; let in only who has one."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Name that requests may be meant for, beside this host's own.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose web pages may send requests; others are refused.")
    ] = None,
    forwarded_from: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy before this one: its X-Forwarded-For counts."),
    ] = None,
    pass_path: Annotated[
        list[str] | None,
        typer.Option(help="For upstream with --engine-key: pass this too, such as 'POST /v1/rerank'."),
    ] = None,
    on_store_failure: Annotated[
        OnStoreFailure, typer.Option(help="For upstream: what cannot be recorded passes, or is refused.")
    ] = OnStoreFailure.pass_,
    redact: Annotated[
        list[str] | None,
        typer.Option(help="Take out of conversations, too: known (key formats), or a regular expression."),
    ] = None,
    max_body_mb: Annotated[
        float, typer.Option(help="Largest request body, and n times it: more is a 413, or a 400.")
    ] = 64.0,
    max_bodies_mb: Annotated[
        float, typer.Option(help="Memory for all bodies that are read and answered at once; others wait.")
    ] = 512.0,
    body_timeout_s: Annotated[
        float, typer.Option(help="Longest silence of a client in the middle of its body; then a 408.")
    ] = 30.0,
    max_reply_mb: Annotated[
        float, typer.Option(help="For upstream: largest reply that is recorded; larger ones pass alone.")
    ] = 64.0,
    max_running: Annotated[int, typer.Option(help="Most requests answered at once; more get a 429.")] = 4096,
    max_connections: Annotated[
        int | None, typer.Option(help="Most connections at once; else as many as descriptors allow.")
    ] = None,
    max_consumers: Annotated[
        int, typer.Option(help="Most readers of /v1/events at once; more get a 503.")
    ] = 64,
    memory_mb: Annotated[
        float, typer.Option(help="Memory of open trajectories; beyond it they are read back when asked for.")
    ] = 512.0,
    admission: Annotated[
        bool,
        typer.Option(help="Hold new trajectories that would be too old before an online training uses them."),
    ] = True,
    seal: Annotated[
        bool, typer.Option(help="Seal closed segments beside it, in a process of low priority.")
    ] = True,
) -> None:
    """Record agents: OpenAI's and Anthropic's APIs, and all that passes becomes durable events.

    An agent changes one line: base_url="http://127.0.0.1:8000/t/ANY-ID/v1" (Anthropic: without /v1).
    """
    from rollbook.cli.started import announce
    from rollbook.ingest.engines.address import EngineAddress
    from rollbook.ingest.http.keys import keys_of
    from rollbook.ingest.http.options import ProxyOptions
    from rollbook.ingest.http.web_pages import own
    from rollbook.ingest.recording.redact import Redactor
    from rollbook.ingest.requests.fields import json_object
    from rollbook.ingest.serve.options import ServeOptions, engine_key_of
    from rollbook.ingest.serve.serve import serve as run_server
    from rollbook.ingest.tokens.bridge import TreePolicy

    proxy = ProxyOptions(
        keys=keys_of(api_key or (), keys, os.environ),
        own=own(host, socket.gethostname(), allow_host or (), allow_origin or ()),
        on_store_failure=on_store_failure.value,
        max_body_bytes=int(max_body_mb * 2**20),
        max_bodies_bytes=int(max_bodies_mb * 2**20),
        body_timeout_s=body_timeout_s,
        max_reply_bytes=int(max_reply_mb * 2**20),
        max_running=max_running,
        max_connections=max_connections,
        max_consumers=max_consumers,
        memory_bytes=int(memory_mb * 2**20),
        abandoned_s=abandon_s,
        admission=admission,
        image_hosts=tuple(image_host or ()),
        redactor=Redactor(redact or ()),
    )
    options = ServeOptions(
        store=store,
        model=model,
        engine=engine,
        script=script,
        host=host,
        port=port,
        run=run,
        lane=lane,
        policy=policy,
        device=device,
        threads=threads,
        seal=seal,
        engine_urls=tuple(EngineAddress.of(url) for url in engine_url or ()),
        engine_key=engine_key_of(engine_key, os.environ),
        engine_admin_key=engine_key_of(engine_admin_key, os.environ, admin=True),
        engine_ask=json_object(engine_ask.encode()) if engine_ask else None,
        images=images,
        routed_experts=routed_experts,
        reply_format=reply_format,
        tree=TreePolicy(reasoning.value, history.value, unfinished.value),
        hold_s=hold_s,
        forwarded_from=tuple(forwarded_from or ()),
        pass_paths=tuple(pass_path or ()),
        proxy=proxy,
    )
    run_server(options, announce)
