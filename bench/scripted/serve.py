"""A scripted SGLang as a process: its command line, and how it ends with its parent."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson

from rollbook.bench.scripted.asgi import run_alone
from rollbook.bench.scripted.job import Options, Script, hashed, in_turn
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.bench.scripted.weights import Fault
from rollbook.bench.tied import end_with_parent
from rollbook.engines.scripted import load_script
from rollbook.ingest.tokens.message_form import conversation_digest


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollbook.bench.scripted.serve")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--script", help="file.py:name or module:name of (input_ids, params) -> Answer")
    parser.add_argument("--given", type=Path, help="what to call that with first, to get the script")
    parser.add_argument("--replies", type=Path, help="JSON: a list of lists of ids, answered in turn")
    parser.add_argument("--length", type=int, default=32, help="tokens of the hashed script")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--stop-id", type=int, help="the hashed script's last id, and an end-of-turn id")
    parser.add_argument("--eos-id", type=int, action="append", default=[])
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--model-path", default="scripted")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, for text and stop strings")
    parser.add_argument("--images", action="store_true", help="claim to understand them")
    parser.add_argument("--log", type=int, default=0, help="requests shown by GET /scripted/seen")
    parser.add_argument("--weights", default="", help="keep checksums of the weights, in this torch type")
    parser.add_argument("--fault", action="append", default=[], help="JSON: the fields of a Fault")
    return parser.parse_args(words)


def _script(args: argparse.Namespace) -> Script:
    if args.script:
        script: Any = load_script(args.script, conversation_digest)
        return script(args.given) if args.given else script  # type: ignore[no-any-return]
    if args.replies:
        return in_turn(orjson.loads(args.replies.read_bytes()))
    return hashed(args.length, args.vocabulary, args.stop_id)


def main(words: list[str] | None = None) -> None:
    """Serve until the parent ends or a request asks for the end; the address is the one line of stdout."""
    args = _arguments(words)
    end_with_parent()
    stops = [] if args.stop_id is None else [args.stop_id]
    options = Options(
        model_path=args.model_path,
        weight_version=args.weight_version,
        eos_ids=frozenset([*args.eos_id, *stops]),
        incremental=args.incremental_streaming_output,
        interval=args.stream_interval,
        images=args.images,
        tokenizer=args.tokenizer,
        log=args.log,
        weights=args.weights,
    )
    app = ScriptedSGLang(_script(args), options)
    for fault in args.fault:
        app.faults.add(Fault(**orjson.loads(fault)))
    run_alone(app, args.port, args.host)


if __name__ == "__main__":
    main()
