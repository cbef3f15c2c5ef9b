"""Agents' conversations for the proxy's benchmark, and the engine's side of them. Pure, except for
writing files.

An agent reads and edits code: a system message, three tools, a task, then a tool call and its
result, turn by turn, and at last an answer. Each message of the agent ends with a mark such as
`#17`, by which the scripted engine finds its reply among the prompt's last ids. So the agent
knows the expected reply word for word.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollbook.bench.corpus import read_text
from rollbook.bench.scripted.job import Answer, Script, logprobs_of

CALLS, ANSWERS = 80, 20
"""Replies that call a tool, numbered from 0; then those that end a conversation."""
RESULTS = 400
TEXT_CHARACTERS, TRAINING_CHARACTERS, VOCABULARY = 2_000_000, 1_000_000, 8_000
MARK_WINDOW = 64
"""How many ids from the end the mark is looked for."""
CONTEXT = 1 << 20
END = "<|im_end|>"

# In the style of Qwen3 and Qwen2.5-VL.
TEMPLATE = """\
{%- macro said(content) %}
{%- if content is string %}{{- content }}{%- else %}
{%- for part in content %}
{%- if part.type == 'image_url' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more of these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call write its name and arguments as JSON:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + said(m.content) + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + said(m.content) }}
{%- for call in (m.tool_calls or []) %}
{%- if (loop.first and m.content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + said(m.content) + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's reply: text, and a tool call unless it ends the conversation."""

    content: str
    name: str | None = None
    arguments: Mapping[str, Any] | None = None

    def text(self) -> str:
        """The reply as the model writes it, up to its end-of-turn token."""
        if self.name is None:
            return self.content
        call = orjson.dumps({"name": self.name, "arguments": self.arguments}).decode()
        return f"{self.content}\n<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Material:
    """The conversations of a load generator, stored as a JSON file."""

    system: str
    tools: Sequence[dict[str, Any]]
    tasks: Sequence[str]
    results: Sequence[str]
    replies: Sequence[Reply]

    @classmethod
    def read(cls, path: Path) -> Material:
        """Read a file written by `write`."""
        values = orjson.loads(path.read_bytes())
        return cls(**(values | {"replies": [Reply(**reply) for reply in values["replies"]]}))

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_bytes(orjson.dumps(self))

    def reply_number(self, seed: int, turn: int, *, last: bool) -> int:
        """The index of the reply at a turn of a conversation."""
        return CALLS + (seed + turn) % ANSWERS if last else (seed * 7 + turn * 13) % CALLS

    def opening(self, seed: int) -> list[dict[str, Any]]:
        """The first messages of a conversation, without a mark."""
        task = self.tasks[seed % len(self.tasks)]
        return [{"role": "system", "content": self.system}, {"role": "user", "content": task}]

    def result(self, seed: int, turn: int) -> str:
        """A tool's result, without a mark."""
        return self.results[(seed * 31 + turn) % len(self.results)]


def marked(text: str, reply: int) -> str:
    """The text with the mark of the next reply."""
    return f"{text}\n#{reply:02d}"


# Making it --------------------------------------------------------------------------------------


def make_material(seed: int = 0) -> Material:
    """Conversations cut from the source of the standard library; results of 200 to 3,000 characters."""
    text = read_text(TEXT_CHARACTERS)
    rng = random.Random(seed)

    def piece(size: int) -> str:
        at = rng.randrange(len(text) - size)
        return text[at : at + size].strip()

    def reply(number: int) -> Reply:
        content = "I looked at it. " + " ".join(piece(rng.randint(120, 300)).split())
        if number >= CALLS:
            return Reply(content)
        first = rng.randint(1, 400)
        arguments = {"path": f"src/{number}/part.py", "first": first, "last": first + rng.randint(10, 60)}
        return Reply(content, "read_file", arguments)

    sizes = [min(max(int(rng.lognormvariate(6.8, 0.7)), 200), 3_000) for _ in range(RESULTS)]
    return Material(
        "You are a careful engineer. Fix what the task names, with as few changes as will do. " * 8,
        [_tool(name, words) for name, words in _TOOLS.items()],
        [f"Task {i}: make this work as it says.\n" + piece(400) for i in range(64)],
        [piece(size) for size in sizes],
        [reply(number) for number in range(CALLS + ANSWERS)],
    )


_TOOLS = {
    "read_file": "Read some lines of a file, from the first to the last, with their numbers.",
    "write_file": "Replace some lines of a file, from the first to the last, by the given text.",
    "run_tests": "Run the tests whose path or name is given, and show the failures with their tracebacks.",
}


def _tool(name: str, words: str) -> dict[str, Any]:
    properties = {
        "path": {"type": "string", "description": "Path of the file, relative to the repository's root."},
        "first": {"type": "integer", "description": "First line, counted from 1."},
        "last": {"type": "integer", "description": "Last line, which is included."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {"type": "function", "function": {"name": name, "description": words, "parameters": parameters}}


def write_model(folder: Path) -> Tokenizer:
    """A model directory without weights: a tokenizer trained on the spot, and the chat template."""
    tokenizer = Tokenizer(models.BPE())
    # Digits apart, so that a mark is always the same three ids.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[
            "<|endoftext|>",
            "<|im_start|>",
            END,
            "<|vision_start|>",
            "<|vision_end|>",
            "<|image_pad|>",
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = read_text(TRAINING_CHARACTERS)
    tokenizer.train_from_iterator([text[at : at + 8192] for at in range(0, len(text), 8192)], trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id(END), tokenizer.token_to_id("<|endoftext|>")]
    files = {
        "generation_config.json": {"eos_token_id": stops},
        "config.json": {"max_position_embeddings": CONTEXT, "model_type": "qwen3", "head_dim": 8},
        "tokenizer_config.json": {"eos_token": END},
    }
    for name, content in files.items():
        (folder / name).write_bytes(orjson.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


# The engine's side ------------------------------------------------------------------------------


def write_replies(path: Path, material: Material, tokenizer: Tokenizer) -> None:
    """Write the file for `by_mark`: the ids of the replies and of the marks."""
    ids = [tokenizer.encode(reply.text() + END).ids for reply in material.replies]
    sign, digits = tokenizer.token_to_id("#"), [tokenizer.token_to_id(str(digit)) for digit in range(10)]
    path.write_bytes(orjson.dumps({"sign": sign, "digits": digits, "replies": ids}))


def by_mark(path: Path) -> Script:
    """The script whose answer is the reply that the prompt's last mark names.

    Raises (when asked):
        LookupError: there is none.
    """
    values = orjson.loads(path.read_bytes())
    answers = [Answer(ids, logprobs_of(ids)) for ids in values["replies"]]
    sign, digits = values["sign"], {token: digit for digit, token in enumerate(values["digits"])}

    def script(input_ids: Sequence[int], params: Mapping[str, Any]) -> Answer:
        end = list(input_ids[-MARK_WINDOW:])
        for at in range(len(end) - 3, -1, -1):
            if end[at] == sign and end[at + 1] in digits and end[at + 2] in digits:
                return answers[10 * digits[end[at + 1]] + digits[end[at + 2]]]
        raise LookupError(f"no mark among the last {len(end)} ids of a prompt")

    return script
