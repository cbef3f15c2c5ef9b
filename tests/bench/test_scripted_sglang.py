"""The scripted SGLang over real HTTP: the shapes of 0.5.23, what ends a request, pauses, weight versions."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from rollbook.bench.scripted.job import Answer, Failure, Options, draft, hashed, in_turn, logprobs_of
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.testing.asgi import serving

SOURCE = Path(__file__).resolve().parents[2] / "src"
SLOW = Answer(range(100, 110), first_s=0.02, token_s=0.03)


class Peer:
    """A scripted server in a thread, and what asks it."""

    def __init__(self, app: ScriptedSGLang, url: str) -> None:
        self.app, self.client = app, httpx.Client(base_url=url, timeout=20)

    def generate(self, ids: Sequence[int] = (1, 2, 3), **body: Any) -> httpx.Response:
        """POST /generate."""
        body = {"input_ids": list(ids), "return_logprob": True} | body
        return self.client.post("/generate", json=body)

    def chunks(self, **body: Any) -> list[Any]:
        """The data of a streamed /generate; the end mark is checked and left out."""
        reply = self.generate(stream=True, **body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        *parts, done, rest = reply.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [orjson.loads(part.removeprefix("data: ")) for part in parts]

    def post(self, path: str, **body: Any) -> Any:
        """A control route's answer, which must be 200."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json() if reply.content[:1] == b"{" else reply.content

    def start(self, **body: Any) -> Callable[[], httpx.Response]:
        """Begin a /generate in a thread; calling the result waits for its answer."""
        got: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: got.append(self.generate(**body)))
        before = len(self.app.running)
        thread.start()
        while len(self.app.running) == before:
            time.sleep(0.002)

        def wait() -> httpx.Response:
            thread.join(10)
            return got[0]

        return wait

    def until(self, count: int) -> None:
        """Wait until the one running request has so many tokens."""
        [job] = self.app.running.values()
        while job.made < count:
            time.sleep(0.002)


Make = Callable[..., Peer]


@pytest.fixture
def peer() -> Iterator[Make]:
    """Makes servers; ends them."""
    with ExitStack() as stack:

        def make(*answers: Any, script: Any = None, **options: Any) -> Peer:
            app = ScriptedSGLang(script or in_turn(answers), Options(log=100, **options))
            return Peer(app, stack.enter_context(serving(app)))

        yield make


def test_the_shape_of_an_answer(peer: Make) -> None:
    """Ids, id triples, spans over the output and counts; what is read equals what the server remembers."""
    reply = peer([7, 8, 9]).generate(rid="r", sampling_params={"max_new_tokens": 5}).json()
    meta = reply["meta_info"]
    assert reply["output_ids"] == [7, 8, 9]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 3,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs_of([7, 8, 9]), [7, 8, 9])],  # noqa: B905
        "output_token_logprobs_length": 3,
        "reasoning_tokens": 0,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_versions": [{"version": "default", "start": 0, "end": 3}],
    }


def test_what_was_seen_can_be_asked_for(peer: Make) -> None:
    """`seen`, here or over HTTP, holds request and answer; it is bounded."""
    server = peer([7], [8, 9])
    server.generate([1, 2], rid="a", return_logprob=False)
    server.generate([3], rid="b", sampling_params={"max_new_tokens": 1})
    seen = server.client.get("/scripted/seen").json()
    assert seen == list(server.app.seen)
    assert [(s["rid"], s["input_ids"], s["output_ids"]) for s in seen] == [
        ("a", [1, 2], [7]),
        ("b", [3], [8]),
    ]
    assert seen[1]["finish_reason"] == {"type": "length", "length": 1}
    assert ScriptedSGLang().seen.maxlen == 0


def test_what_ends_an_answer() -> None:
    """A stop id before the length, kept in the ids; ignore_eos; the length; a stop string by its text."""

    def ends(params: dict[str, Any], eos: set[int] = frozenset()) -> tuple[list[int], Any]:  # type: ignore[assignment]
        drafted = draft(
            Answer([5, 6, 7, 8]), params, frozenset(eos), lambda ids: "".join("abcdefghij"[i] for i in ids)
        )
        assert drafted.logprobs == logprobs_of(drafted.ids)
        return drafted.ids, drafted.finish

    assert ends({"stop_token_ids": [7]}) == ([5, 6, 7], {"type": "stop", "matched": 7})
    assert ends({}, {6}) == ([5, 6], {"type": "stop", "matched": 6})
    assert ends({"ignore_eos": True}, {6}) == ([5, 6, 7, 8], {"type": "stop", "matched": 8})
    assert ends({"max_new_tokens": 2}, {8}) == ([5, 6], {"type": "length", "length": 2})
    assert ends({"max_new_tokens": 2, "stop_token_ids": [6]}) == ([5, 6], {"type": "stop", "matched": 6})
    assert ends({"stop": "gh", "stop_token_ids": [8]}) == ([5, 6, 7], {"type": "stop", "matched": "gh"})
    assert ends({"stop": ["zz", "f"]}) == ([5], {"type": "stop", "matched": "f"})


def test_the_default_script_can_be_computed_again(peer: Make) -> None:
    """The same prompt gives the same ids and logprobs, here and there; another gives others."""
    script = hashed(16, 1000, stop_id=2)
    server = peer(script=script, eos_ids=frozenset([2]))
    outputs = [server.generate(ids).json()["output_ids"] for ids in ([1, 2], [1, 2], [1, 3])]
    assert outputs[0] == outputs[1] == list(script([1, 2], {}).ids) != outputs[2]
    assert all(ids[-1] == 2 and 2 not in ids[:-1] for ids in outputs)


@pytest.mark.parametrize("incremental", [False, True])
def test_chunks_are_cumulative_or_incremental(peer: Make, incremental: bool) -> None:
    """Cumulative by default, or only what is new; spans and the finish reason come with the last one."""
    chunks = peer(range(10, 15), incremental=incremental, interval=2).chunks()
    wanted = [[10, 11], [12, 13], [14]] if incremental else [[10, 11], [10, 11, 12, 13], [10, 11, 12, 13, 14]]
    assert [c["output_ids"] for c in chunks] == wanted
    assert [[t[1] for t in c["meta_info"]["output_token_logprobs"]] for c in chunks] == wanted
    assert [c["meta_info"]["completion_tokens"] for c in chunks] == [2, 4, 5]
    assert [c["meta_info"]["finish_reason"] for c in chunks] == [None, None, {"type": "stop", "matched": 14}]
    assert ["weight_versions" in c["meta_info"] for c in chunks] == [False, False, True]


def test_an_aborted_request_returns_what_there_is(peer: Make) -> None:
    """The request returns what there is, whole or streamed; an id that nobody has is no error."""
    server = peer(SLOW)
    for stream in (False, True):
        wait = server.start(rid="one-1", stream=stream)
        server.until(2)
        assert server.post("/abort_request", rid="one-2") == b""
        assert server.app.running
        assert server.post("/abort_request", rid="one-1") == b""
        reply = wait()
        last = orjson.loads(reply.text.split("\n\n")[-3].removeprefix("data: ")) if stream else reply.json()
        assert last["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "Aborted",
            "status_code": None,
            "err_type": None,
        }
        count = len(last["output_ids"])
        assert 2 <= count < 10
        assert last["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    assert server.app.running == {}


def test_weights_that_change_in_the_middle(peer: Make) -> None:
    """Paused in place, the version changed, continued: the spans say which tokens came of which weights."""
    server = peer(SLOW, weight_version="v1")
    wait = server.start()
    server.until(3)
    assert server.post("/pause_generation", mode="in_place")["status"] == "ok"
    assert server.client.post("/flush_cache").status_code == 400
    server.post("/update_weight_version", new_version="v2", abort_all_requests=False)
    [job] = server.app.running.values()
    before = job.made
    time.sleep(0.15)
    assert job.made == before
    assert server.post("/continue_generation")["status"] == "ok"
    meta = wait().json()["meta_info"]
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": before},
        {"version": "v2", "start": before, "end": 10},
    ]
    assert meta["weight_version"] == server.client.get("/model_info").json()["weight_version"] == "v2"


def test_a_script_changes_the_weights(peer: Make) -> None:
    """After as many tokens as it says, for later requests too."""
    server = peer(Answer(range(6), versions=((2, "b"), (4, "c"))), [1], interval=3)
    spans = server.chunks()[-1]["meta_info"]["weight_versions"]
    assert [(s["version"], s["start"], s["end"]) for s in spans] == [
        ("default", 0, 2),
        ("b", 2, 4),
        ("c", 4, 6),
    ]
    assert server.generate().json()["meta_info"]["weight_version"] == "c"


def test_each_pause_mode_treats_running_requests_as_sglang_does(peer: Make) -> None:
    """`abort` ends what runs; `retract` keeps it and lets the cache be flushed; new requests wait in both."""
    server = peer(SLOW, SLOW, Answer([1]))
    wait = server.start()
    server.until(1)
    server.post("/pause_generation", mode="retract")
    assert server.client.get("/flush_cache").status_code == 200
    server.post("/continue_generation")
    meta = wait().json()["meta_info"]
    assert (meta["num_retractions"], meta["completion_tokens"]) == (1, 10)
    wait = server.start()
    server.until(1)
    server.post("/pause_generation")
    assert wait().json()["meta_info"]["finish_reason"]["type"] == "abort"
    held = server.start(rid="held")
    server.post("/abort_request", rid="held")  # the real one does not hear of it either
    time.sleep(0.05)
    assert list(server.app.running) == ["held"]
    server.post("/continue_generation")
    assert held().json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}


def test_an_abort_in_place_shows_with_the_next_step(peer: Make) -> None:
    """Nothing moves while generation is paused in place; a retracted request ends at once."""
    server = peer(SLOW)
    for mode in ("in_place", "retract"):
        wait = server.start(rid="x")
        server.until(1)
        server.post("/pause_generation", mode=mode)
        server.post("/abort_request", rid="x")
        time.sleep(0.1)
        assert list(server.app.running) == (["x"] if mode == "in_place" else [])
        server.post("/continue_generation")
        assert wait().json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_planned_failures_come_before_and_within_a_stream(peer: Make, stream: bool) -> None:
    """A 500, a 400, and a connection that ends: before the first token, and after three in a stream."""
    kinds = ("error", "refuse")
    server = peer(*(Answer(range(9), failure=Failure(0, kind, "no")) for kind in kinds))  # type: ignore[arg-type]
    replies = [server.generate(stream=stream) for _ in kinds]
    assert [(r.status_code, r.json()) for r in replies] == [
        (s, {"error": {"message": "no"}}) for s in (500, 400)
    ]
    dropping = peer(*(Answer(range(9), failure=Failure(after, "drop")) for after in (0, 3)))
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            dropping.generate(stream=stream)
    assert [s["output_ids"] for s in dropping.app.seen] == [[], [0, 1, 2]]


def test_an_error_in_a_stream(peer: Make) -> None:
    """What has come is kept; the error is data."""
    *chunks, last = peer(Answer(range(9), failure=Failure(2))).chunks()
    assert [c["output_ids"] for c in chunks] == [[0]]
    assert last["error"] == {
        "message": "the script says so",
        "type": "invalid_request_error",
        "code": 500,
        "retryable": False,
    }


def test_a_client_that_goes(peer: Make) -> None:
    """Its request is ended."""
    server = peer(SLOW)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/generate", json={"input_ids": [1]}, timeout=0.1)
    for _ in range(500):
        if server.app.seen:
            break
        time.sleep(0.002)
    assert server.app.seen[0]["finish_reason"]["type"] == "abort"
    assert len(server.app.seen[0]["output_ids"]) < 10


def test_what_it_says_of_itself_and_refuses(peer: Make) -> None:
    """Health, model and version; bad bodies and unknown routes are the client's fault."""
    server = peer([1], model_path="m", weight_version="3")
    assert [server.client.get(path).status_code for path in ("/health", "/health_generate")] == [200, 200]
    info = server.client.get("/model_info").json()
    assert (info["model_path"], info["weight_version"], info["is_generation"]) == ("m", "3", True)
    assert server.client.get("/server_info").json()["version"] == "0.5.23"
    assert server.generate([]).status_code == 400
    assert server.client.post("/generate", content=b"{").status_code == 400
    assert server.client.post("/nothing").status_code == 404


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """It prints its address, answers from a script file, and reads text with a tokenizer."""
    script = tmp_path / "answers.py"
    script.write_text(
        "from rollbook.bench.scripted.job import Answer\n"
        "def make(path):\n    return lambda ids, params: Answer([len(ids), len(path.read_text())])\n"
    )
    words = [sys.executable, "-m", "rollbook.bench.scripted.serve", "--script", f"{script}:make"]
    words += ["--given", str(script), "--weight-version", "7", "--incremental-streaming-output"]
    process = subprocess.Popen(words, env={"PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        reply = httpx.post(f"{url}/generate", json={"input_ids": [1, 2]}).json()
        assert reply["output_ids"] == [2, len(script.read_text())]
        assert reply["meta_info"]["weight_version"] == "7"
        assert httpx.get(f"{url}/server_info").json()["incremental_streaming_output"] is True
    finally:
        process.terminate()
        process.wait(60)
