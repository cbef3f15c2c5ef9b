"""Fixtures of the ingest tests: small models, a desk that takes turns in process, a real server."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tests.fakes.clients.exchange import Exchange
from tests.fakes.engines.played import PlayedEngine
from tests.fakes.processes.warm import WarmProcess
from tests.fakes.proxies.settings import proxy_parts
from tests.fakes.upstreams.server import HttpUpstream
from tests.ingest.tokens.corpus import chat_templates, qwen_tokenizer, real_chat_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollbook import store
from rollbook.engines.engine import Generation
from rollbook.ingest.endpoints.chat import API as CHAT_API
from rollbook.ingest.fields import OpenTrajectory
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.replies.choose import FAMILIES
from rollbook.ingest.serve.proxy import build_app
from rollbook.ingest.tokens.bridge import Bridges, TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall
from rollbook.store.events import VersionSpan, token_ids
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.testing.asgi import free_port

SOURCE = Path(__file__).resolve().parents[2] / "src"

# In the style of Qwen2.5: tools in the system message, tool results gathered in one user turn.
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role in ('system', 'developer') and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content }}
{%- for call in (m.tool_calls or []) %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Qwen3: thinking is dropped from every turn before the last user message.
REWRITING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- set text = m.content %}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}
{%- set text = '<think>' + m.reasoning_content + '</think>' + text %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As DeepSeek V3: call arguments are concatenated, so they must be a string.
STRING_ARGUMENTS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in (m.tool_calls or []) %}
{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Llama 3.1: a message with calls does not show its content, so a sentinel in it is not rendered.
HIDES_CONTENT = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.tool_calls %}{{- m.tool_calls[0].function.arguments | tojson }}{%- else %}
{{- m.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# A turn ends with a line feed, an ordinary byte that merges with its neighbours.
NOT_ATOMIC = """\
{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""

# As Qwen3-VL: parts one after another, an image as a marker.
SEES = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for part in m.content %}{{- part.text if part.type == 'text' else '<image>' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "sees": SEES,
    "chatml": CHATML,
    "rewriting": REWRITING,
    "no_system": NO_SYSTEM,
    "string_arguments": STRING_ARGUMENTS,
    "hides_content": HIDES_CONTENT,
    "not_atomic": NOT_ATOMIC,
}

WORDS = "What is the weather in Paris today? Add 37 and 58.\n\n{'city': 1}\n\n  calling the tool now\n\n"

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with ChatML's control tokens and ordinary tool markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, WORDS.replace(" ", "  ")], trainer)
    return tokenizer


def write_text_model(folder: Path, template: str, end: str = "<|im_end|>") -> Path:
    """A model directory without weights: enough to serve a script."""
    tokenizer = make_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id(end)]
    if end == "<|im_end|>":
        stops.append(tokenizer.token_to_id("<|endoftext|>"))
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": stops}))
    (folder / "config.json").write_bytes(orjson.dumps({"max_position_embeddings": 32768}))
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": end}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model directories without weights, by the name of their template."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            end = "Ċ" if name == "not_atomic" else "<|im_end|>"
            folder = tmp_path_factory.mktemp(f"model-{name}")
            made[name] = write_text_model(folder, TEMPLATES[name], end)
        return made[name]

    return get


@pytest.fixture(scope="session")
def chat(text_model: Callable[[str], Path]) -> Callable[[str], ChatTokenizer]:
    """Chat tokenizers, by the name of their template."""
    made: dict[str, ChatTokenizer] = {}

    def get(name: str = "chatml") -> ChatTokenizer:
        if name not in made:
            made[name] = load_chat_tokenizer(text_model(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny Qwen3, random weights and all."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from rollbook.demo.model import make_model

    folder = tmp_path_factory.mktemp("tiny-model")
    make_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    """Two tools."""
    return TOOLS


# A desk: turns taken in process, by an engine that samples ids no tokenizer would give ----------


@dataclass
class NoisyEngine:
    """Answers with a script's text in ids that are mostly not the tokenizer's, with made-up logprobs."""

    tokenizer: ChatTokenizer
    answers: Callable[[Any, Any], Any]
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    version: int = 3
    name: str = "noisy"
    honoured: frozenset[str] = frozenset({"temperature", "seed", "logprobs"})
    takes_images: bool = False
    sent: list[np.ndarray] = field(default_factory=list)
    made: list[Generation] = field(default_factory=list)

    async def start(self, activated: Any) -> None:
        """Nothing to get ready."""

    async def close(self) -> None:
        """Nothing to stop."""

    def policy_version(self) -> int | None:
        """The version it claims."""
        return self.version

    def control(self) -> None:
        """No routes."""

    def ids_of(self, text: str) -> list[int]:
        """Ids of the text cut at random places, so that they are rarely canonical."""
        ids: list[int] = []
        while text:
            size = self.rng.randint(1, 5)
            ids += self.tokenizer.encode(text[:size]).tolist()
            text = text[size:]
        return ids

    def failure(self) -> str | None:
        """It never ends."""
        return None

    async def ready(self) -> None:
        """It always is."""

    async def abort(self, request_id: str) -> None:
        """It runs to its end."""

    async def generate(
        self, prompt: Any, sampling: Any, on_tokens: Any = lambda ids, logprobs: None
    ) -> Generation:
        """The script's answer: a text, or (text, finish, last id or None)."""
        self.sent.append(prompt.ids)
        answer = self.answers(prompt.messages, prompt.tools)
        if asyncio.iscoroutine(answer):
            answer = await answer
        stop = self.tokenizer.stop_ids[0]
        text, finish, last = answer if isinstance(answer, tuple) else (answer, "stop", stop)
        ids = self.ids_of(text) + ([] if last is None else [last])
        logprobs = np.array([-self.rng.random() for _ in ids], np.float32)
        spans = (VersionSpan("actor", self.version, 0, len(ids)),)
        made = Generation(token_ids(ids), logprobs, spans, finish, {"kind": "sampled", "temperature": 0.5})
        self.made.append(made)
        return made


@functools.cache
def _tested(tokenizer: ChatTokenizer, policy: TreePolicy | None) -> Bridges:
    return Bridges.tested(tokenizer, policy)


def bridges_of(tokenizer: ChatTokenizer, policy: TreePolicy | None = None) -> Bridges:
    """A tokenizer's bridges, tested once: the test takes longer than most of what a desk is made for.

    Each caller has its own, since a conversation may show that excerpts do not serve.
    """
    return replace(_tested(tokenizer, policy))


def make_turn_runner(
    recorder: Recorder, engine: Any, tokenizer: ChatTokenizer, policy: TreePolicy | None = None
) -> TurnRunner:
    """A turn turn_runner that reads replies in the Hermes form."""
    return TurnRunner(recorder, engine, bridges_of(tokenizer, policy), FAMILIES["hermes"])


class Desk:
    """A recorder, an engine and a turn turn_runner over a store of their own."""

    def __init__(
        self,
        path: Path,
        tokenizer: ChatTokenizer,
        answers: Callable[[Any, Any], Any],
        policy: TreePolicy | None = None,
    ) -> None:
        self.store = store.open(path, create=True)
        self.tokenizer = tokenizer
        self.recorder = Recorder(self.store, "serve", "default")
        self.engine = NoisyEngine(tokenizer, answers)
        self.turn_runner = make_turn_runner(self.recorder, self.engine, tokenizer, policy)
        self.runner = asyncio.Runner()

    def take(self, messages: list[Any], name: str = "t", **body: Any) -> CompletedTurn:
        """One turn, taken and marked as delivered."""
        return self.runner.run(self.take_async(messages, name, **body))

    async def take_async(self, messages: list[Any], name: str = "t", **body: Any) -> CompletedTurn:
        """One turn, taken and marked as delivered."""
        live, running = self.begin(messages, name, **body)
        [answered] = await asyncio.shield(running.done)
        self.recorder.mark_delivered(live, answered.turn_id, "sent")
        return answered

    def take_undelivered(self, messages: list[Any], name: str = "t", **body: Any) -> CompletedTurn:
        """One turn whose reply the client never got."""

        async def take() -> CompletedTurn:
            _, running = self.begin(messages, name, **body)
            [answered] = await running.done
            return answered

        return self.runner.run(take())

    def begin(self, messages: list[Any], name: str = "t", **body: Any) -> tuple[LiveTrajectory, InFlightCall]:
        """One request, begun."""
        live = self.recorder.find(name) or self.recorder.draft(OpenTrajectory(id=name))
        raw = orjson.dumps({"messages": messages} | body)
        call = CHAT_API.read(orjson.loads(raw), lambda turn_id: None)
        return live, self.turn_runner.begin(live, call, Arrival.of(call.endpoint, raw, 0))

    def trajectory(self, name: str = "t") -> Trajectory:
        """The trajectory as it can be folded from the log now."""
        self.runner.run(self.recorder.settle())
        return next(t for t in fold(self.store.events()).values() if t.opened.name == name)

    def turn(self, answered: CompletedTurn, name: str = "t") -> Any:
        """A turn as folded from the log."""
        return self.trajectory(name).turns[answered.turn_id]

    def link(self, answered: CompletedTurn, name: str = "t") -> str | None:
        """The turn's parent id, or `root:` and the reason."""
        asked = self.turn(answered, name).requested
        return asked.parent_turn_id or f"root:{asked.root_reason}"

    def close(self) -> None:
        """Close the recorder."""
        self.runner.close()
        self.recorder.close()


@pytest.fixture
def desk(tmp_path: Path, chat: Callable[[str], ChatTokenizer]) -> Iterator[Callable[..., Desk]]:
    """Makes desks; closes them."""
    made: list[Desk] = []

    def make(
        answers: Callable[[Any, Any], Any], template: str = "chatml", policy: TreePolicy | None = None
    ) -> Desk:
        made.append(Desk(tmp_path / f"desk-{len(made)}", chat(template), answers, policy))
        return made[-1]

    yield make
    for one in made:
        one.close()


# Servers ------------------------------------------------------------------------------------------


class InProcess:
    """The proxy as an ASGI application with its lifespan, called through httpx."""

    def __init__(self, path: Path, engine: Any, tokenizer: ChatTokenizer, **given: Any) -> None:
        self.store = store.open(path, create=True)
        self.recorder = Recorder(self.store, "serve", "default")
        self.engine = engine
        self.turn_runner = make_turn_runner(self.recorder, engine, tokenizer)
        self.app = build_app(self.turn_runner, *proxy_parts(**given))
        self.runner = asyncio.Runner()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.runner.run(self._lifespan.__aenter__())
        # A handler that raises must come out as the 500 that a server would send.
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)

    def run(self, awaitable: Any) -> Any:
        """Run a coroutine on the application's loop."""
        return self.runner.run(awaitable)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """POST."""
        return self.run(self.client.post(path, **options))

    def chat(self, name: str, *messages: Any, **body: Any) -> httpx.Response:
        """One chat request in the trajectory `name`."""
        return self.post(f"/t/{name}/v1/chat/completions", json={"messages": list(messages)} | body)

    def exchange(self, path: str, body: Any = None, **options: Any) -> Exchange:
        """Begin a request; to be called on the application's loop."""
        return Exchange(self.app, path, body, **options)

    def ask(self, path: str, body: Any = None, **options: Any) -> Exchange:
        """A request and its whole reply, piece by piece as it was sent."""

        async def ask() -> Exchange:
            return await self.exchange(path, body, **options).end()

        return self.run(ask())

    def settled(self) -> None:
        """Wait for what was noted without waiting."""
        self.run(self.recorder.settle())

    def trajectories(self) -> dict[str, Trajectory]:
        """What the log holds now, by the client's name."""
        self.settled()
        return {t.opened.name: t for t in fold(self.store.events()).values()}

    def close(self) -> None:
        """End the application's lifespan."""
        self.run(self.client.aclose())
        self.run(self._lifespan.__aexit__(None, None, None))
        self.runner.close()


@pytest.fixture(scope="module")
def proxies_made() -> Iterator[list[InProcess]]:
    """In-process proxies that run; closed with their module, at the latest."""
    made: list[InProcess] = []
    yield made
    while made:
        made.pop().close()


@pytest.fixture(autouse=True)
def _proxies_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close what a test made, but for its module's: each proxy looks at its log as long as it runs."""
    if "in_process" not in request.fixturenames:
        yield
        return
    made: list[InProcess] = request.getfixturevalue("proxies_made")
    of_the_module = len(made)
    yield
    while len(made) > of_the_module:
        made.pop().close()


@pytest.fixture(scope="module")
def in_process(
    tmp_path_factory: pytest.TempPathFactory, proxies_made: list[InProcess]
) -> Callable[..., InProcess]:
    """Makes in-process proxies, of settings and secrets by their names."""

    def make(engine: Any, tokenizer: ChatTokenizer, **given: Any) -> InProcess:
        folder = tmp_path_factory.mktemp("in-process")
        proxies_made.append(InProcess(folder / "store", engine, tokenizer, **given))
        return proxies_made[-1]

    return make


@pytest.fixture(scope="module")
def played(
    in_process: Callable[..., InProcess], chat: Callable[..., ChatTokenizer]
) -> Callable[..., InProcess]:
    """Makes in-process proxies over an engine that plays what a test gives it."""

    def make(answer: Any = "Hello", template: str = "chatml", **given: Any) -> InProcess:
        return in_process(PlayedEngine(chat(template), answer), chat(template), **given)

    return make


class Served:
    """A `rollbook serve` of its own."""

    def __init__(
        self, folder: Path, arguments: list[str], descriptors: int | None = None, port: int | None = None
    ) -> None:
        self.path, self.arguments, self.port = folder, arguments, port or free_port()
        self.descriptors = descriptors
        self.log = folder.with_suffix(".log")
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it answers."""
        fewer = ["prlimit", f"--nofile={self.descriptors}"] if self.descriptors else []
        command = [*fewer, sys.executable, "-m", "rollbook", "serve", "--store", str(self.path)]
        command += ["--port", str(self.port), *self.arguments]
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            start = subprocess.Popen if fewer else WarmProcess
            self.process = start(command, env=environment, stdout=log, stderr=log)
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"rollbook serve ended: {self.log.read_text()}")
            try:
                if httpx.get(f"{self.url}/healthz").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"rollbook serve did not answer: {self.log.read_text()}")

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Interrupt it as a person would; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode


@pytest.fixture
def upstream() -> Iterator[HttpUpstream]:
    """An upstream that answers with what it is given, else with a chat reply."""
    made = HttpUpstream()
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Starts servers; stops those that still run, since each and its sealer cost time as long as they do."""
    made: list[Served] = []

    def make(
        *arguments: str,
        descriptors: int | None = None,
        folder: Path | None = None,
        port: int | None = None,
    ) -> Served:
        folder = folder or tmp_path_factory.mktemp("served") / "store"
        made.append(Served(folder, list(arguments), descriptors, port))
        return made[-1]

    yield make
    for one in made:
        one.stop()


SCRIPT = '''
import asyncio, json

async def answer(messages, tools):
    """Says what its last message asks for."""
    text = messages[-1].get("content") or ""
    if text.startswith("boom"):
        raise RuntimeError("boom")
    if text.startswith("sleep "):
        await asyncio.sleep(float(text.split()[1]))
    if text.startswith("call"):
        function = {"name": "calc", "arguments": {"a": 1, "b": "\\u00e9"}}
        call = {"id": "x", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call] * (2 if "two" in text else 1)}
    return f"{len(messages)}: {text}"
'''


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that says what its last message asks for."""
    file = tmp_path_factory.mktemp("script") / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture(scope="session")
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Qwen3's tokenizer; it takes seconds to make, so pytest's cache keeps it."""
    cache = getattr(request.config, "cache", None)
    return qwen_tokenizer(tmp_path_factory.mktemp("qwen") if cache is None else cache.mkdir("qwen-tokenizer"))


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Sources of the real chat templates, by name."""
    return chat_templates()


@pytest.fixture(scope="session")
def real_chat(qwen: Tokenizer, templates: dict[str, str]) -> Callable[..., ChatTokenizer]:
    """Real chat templates over Qwen's tokenizer, by name; or another, with its source."""
    made: dict[str, ChatTokenizer] = {}

    def get(name: str, source: str | None = None) -> ChatTokenizer:
        if name not in made:
            made[name] = real_chat_tokenizer(qwen, name, source or templates[name])
        return made[name]

    return get
