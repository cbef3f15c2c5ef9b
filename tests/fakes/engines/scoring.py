"""A server that answers questions for logprobs of given tokens as an SGLang does, by transformers.

tests/sglang/test_teacher.py asks a real one the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch

from rollbook.engines.weights.digests import checksums, read_weights


class ScoringServer:
    """What is behind the address.

    Attributes:
        model: its folder; another one is a server that was started again with other weights.
        asked: how many questions for logprobs it answered.
    """

    def __init__(self, model: Path) -> None:
        self.model, self.asked, self.text, self._lock = model, 0, "token {}", Lock()

    def answer(self, route: str, body: Any) -> Any:
        """To a request."""
        if route == "/weights_checker":
            rank = {"parallelism_info": [{"tp_rank": 0, "tp_size": 1}]}
            return {"ranks": [rank | {"checksums": checksums(read_weights(self.model))}]}
        assert route == "/generate"
        assert body["sampling_params"]["max_new_tokens"] == 0
        ids = body["input_ids"]
        values = [None, *self._logprobs(ids)]
        texts = [self.text.format(i) if body.get("return_text_in_logprobs") else None for i in ids]
        entries = [list(entry) for entry in zip(values, ids, texts, strict=True)]
        return {"text": "", "meta_info": {"input_token_logprobs": entries, "weight_version": "default"}}

    def _logprobs(self, ids: list[int]) -> list[float]:
        from transformers import AutoModelForCausalLM

        with self._lock, torch.no_grad():
            self.asked += 1
            model = AutoModelForCausalLM.from_pretrained(self.model).eval()
            values = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return values[range(len(ids) - 1), ids[1:]].tolist()


@contextmanager
def scoring_server(model: Path) -> Iterator[tuple[ScoringServer, str]]:
    """Context: such a server, and its address."""
    behind = ScoringServer(model)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Answer."""
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = json.dumps(behind.answer(self.path, json.loads(body or b"null"))).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Not told."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield behind, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
