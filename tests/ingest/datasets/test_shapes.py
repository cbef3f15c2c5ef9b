"""Files as people have them: of each shape a tiny one, imported and read back from the log by its tokens."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollbook import store as rb
from rollbook.bench.scripted.dialogues import END
from rollbook.ingest.datasets import files
from rollbook.ingest.datasets.importing import Reading, import_dataset
from rollbook.ingest.datasets.messages import tools_of
from rollbook.ingest.endpoints.api import no_history
from rollbook.ingest.endpoints.chat import read as read_chat
from rollbook.ingest.endpoints.messages import read as read_messages
from rollbook.ingest.endpoints.responses_form import read as read_responses
from rollbook.ingest.tokens.chat_template import ChatTokenizer, load_chat_tokenizer
from rollbook.store.errors import InterchangeError, RollbookError
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.interchange.export import export_store
from rollbook.train.select.samples import samples_of

CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
OPENAI_TOOL = {"type": "function", "function": TOOL}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
ASKS_TOOL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
HH = "\n\nHuman: Two and two?\n\nAssistant: {}"
CHAT = ["u:Two and two?", "a:Four."]
LONG = ["u:Two and two?", "a:Four.", "u:Sure?", "a:Yes."]
ROLE = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer", "f": "function"}


def _turns(*words: str, role: str = "role", content: str = "content", **names: str) -> list[dict[str, Any]]:
    """Messages, such as `u:Hello`; a `-` behind one of the assistant's excludes it."""
    roles = ROLE | names
    return [{role: roles[word[0]], content: word[2:]} for word in words]


def _gpt(*words: str) -> list[dict[str, Any]]:
    return _turns(*words, role="from", content="value", u="human", a="gpt", t="observation")


def _trl(*words: str) -> Any:
    return _turns(*words)


def _lines(*rows: Any) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def _csv(*rows: dict[str, str], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return bytes(sink.getvalue())


MESSAGES = {"messages": _turns(*LONG)}
# name of a case -> (name of its file, its content or its only row, conversation and trained replies of each
# trajectory in order). A trained reply is its text; tools and labels are looked at apart.
SHAPES: dict[str, tuple[str, Any, list[tuple[list[str], list[str]]]]] = {
    "messages": ("x.jsonl", MESSAGES, [(LONG, ["Four.", "Yes."])]),
    "weight 0 of OpenAI": (
        "x.jsonl",
        {"messages": [*_turns(*LONG[:1]), {**_turns("a:Four.")[0], "weight": 0}, *_turns(*LONG[2:])]},
        [(LONG, ["Yes."])],
    ),
    "train of TRL": (
        "x.jsonl",
        {"messages": [*_turns(*LONG[:3]), {**_turns("a:Yes.")[0], "train": False}]},
        [(LONG[:2], ["Four."])],
    ),
    "ends with the user's": ("x.jsonl", {"messages": _turns(*LONG[:3])}, [(LONG[:2], ["Four."])]),
    "ends with a tool's": (
        "x.jsonl",
        {"messages": [*_turns("u:Two and two?"), ASKS_TOOL, *_turns("t:4")], "tools": [OPENAI_TOOL]},
        [(["u:Two and two?", "a:"], [CALLED])],
    ),
    "several replies in a row": (
        "x.jsonl",
        {"messages": _turns("u:Two and two?", "a:Let me see.", "a:Four.")},
        [(["u:Two and two?", "a:Let me see.", "a:Four."], ["Let me see.", "Four."])],
    ),
    "developer, function and a name": (
        "x.jsonl",
        {
            "messages": [
                *_turns("d:Be brief."),
                {**_turns("u:Two and two?")[0], "name": "Ada"},
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
                },
                {**_turns("f:4")[0], "name": "add"},
                *_turns("a:Four."),
            ],
            "functions": [TOOL],
        },
        [(["d:Be brief.", "u:Two and two?", "a:None", "f:4", "a:Four."], [CALLED, "Four."])],
    ),
    "parts of content": (
        "x.jsonl",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "and two?"}],
                },
                *_turns("a:Four."),
            ]
        },
        [
            (
                ["u:[{'type': 'text', 'text': 'Two '}, {'type': 'text', 'text': 'and two?'}]", "a:Four."],
                ["Four."],
            )
        ],
    ),
    "messages and tools as JSON texts": (
        "x.jsonl",
        {"messages": json.dumps([*_turns("u:Two and two?"), ASKS_TOOL]), "tools": json.dumps([TOOL])},
        [(["u:Two and two?", "a:"], [CALLED])],
    ),
    "ShareGPT": (
        "x.jsonl",
        {"id": "a", "conversations": _gpt("s:Be brief.", *LONG)},
        [(["s:Be brief.", *LONG], ["Four.", "Yes."])],
    ),
    "ShareGPT with a tool": (
        "x.jsonl",
        {
            "conversations": [
                *_gpt("u:Two and two?"),
                {"from": "function_call", "value": json.dumps(CALL)},
                *_gpt("t:4", "a:Four."),
            ],
            "system": "Be brief.",
            "tools": json.dumps([TOOL]),
        },
        [(["s:Be brief.", "u:Two and two?", "a:", "t:4", "a:Four."], [CALLED, "Four."])],
    ),
    "ShareGPT with weights": (
        "x.jsonl",
        {"conversations": [{**one, "weight": i == 3} for i, one in enumerate(_gpt(*LONG))]},
        [(LONG, ["Yes."])],
    ),
    "conversations of roles": ("x.jsonl", {"conversations": _turns(*LONG)}, [(LONG, ["Four.", "Yes."])]),
    "Alpaca": (
        "x.json",
        json.dumps([{"instruction": "Add.", "input": "2, 2", "output": "Four."}]).encode(),
        [(["u:Add.\n\n2, 2", "a:Four."], ["Four."])],
    ),
    "Alpaca with system and history": (
        "x.jsonl",
        {
            "instruction": "Sure?",
            "input": "",
            "output": "Yes.",
            "system": "Be brief.",
            "history": [["Two and two?", "Four."]],
        },
        [(["s:Be brief.", *LONG], ["Four.", "Yes."])],
    ),
    "Dolly": (
        "x.jsonl",
        {"instruction": "Add.", "context": "2, 2", "response": "Four.", "category": "qa"},
        [(["u:Add.\n\n2, 2", "a:Four."], ["Four."])],
    ),
    "prompt and completion": (
        "x.jsonl",
        {"prompt": "Two and two?", "completion": "Four."},
        [(CHAT, ["Four."])],
    ),
    "prompt as messages, completion as text": (
        "x.jsonl",
        {"prompt": _trl(*LONG[:3]), "completion": "Yes."},
        [(LONG, ["Yes."])],
    ),
    "prompt as text, completion as messages": (
        "x.jsonl",
        {"prompt": "Two and two?", "completion": _trl(*LONG[1:])},
        [(LONG, ["Four.", "Yes."])],
    ),
    "completion that repeats the prompt": (
        "x.jsonl",
        {"prompt": _trl(*LONG[:3]), "completion": _trl(*LONG)},
        [(LONG, ["Yes."])],
    ),
    "KTO": ("x.jsonl", {"prompt": "Two and two?", "completion": "Four.", "label": True}, [(CHAT, ["Four."])]),
    "GSM8K": ("x.jsonl", {"question": "Two and two?", "answer": "Four."}, [(CHAT, ["Four."])]),
    "OpenOrca": (
        "x.jsonl",
        {"id": "flan.1", "system_prompt": "Be brief.", "question": "Two and two?", "response": "Four."},
        [(["s:Be brief.", *CHAT], ["Four."])],
    ),
    "preference": (
        "x.jsonl",
        {"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."},
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "preference, its prompt within": (
        "x.jsonl",
        {"chosen": _trl(*CHAT), "rejected": _trl("u:Two and two?", "a:Five.")},
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "preference, mixed forms": (
        "x.jsonl",
        {"prompt": _trl("u:Two and two?"), "chosen": "Four.", "rejected": _trl("a:Five.")},
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "UltraFeedback": (
        "x.jsonl",
        {
            "prompt": "Two and two?",
            "prompt_id": "0",
            "chosen": _trl(*CHAT),
            "rejected": _trl("u:Two and two?", "a:Five."),
            "messages": _trl(*CHAT),
            "score_chosen": 8.0,
            "score_rejected": 1.5,
        },
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "hh-rlhf": (
        "x.jsonl.gz",
        gzip.compress(_lines({"chosen": HH.format("Four."), "rejected": HH.format("Five.")})),
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "hh-rlhf with a prompt": (
        "x.jsonl",
        {"prompt": HH.format("").rstrip(), "response": " Four.", "chosen": " Four.", "rejected": " Five."},
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "Orca's pairs": (
        "x.jsonl",
        {"system": "Be brief.", "question": "Two and two?", "chosen": "Four.", "rejected": "Five."},
        [(["s:Be brief.", *CHAT], ["Four."]), (["s:Be brief.", "u:Two and two?", "a:Five."], ["Five."])],
    ),
    "ShareGPT's pairs": (
        "x.jsonl",
        {
            "conversations": _gpt("u:Two and two?"),
            "chosen": _gpt("a:Four.")[0],
            "rejected": _gpt("a:Five.")[0],
        },
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "OpenAI's pairs": (
        "x.jsonl",
        {
            "input": {"messages": _turns("u:Two and two?"), "tools": [], "parallel_tool_calls": True},
            "preferred_output": _turns("a:Four."),
            "non_preferred_output": _turns("a:Five."),
        },
        [(CHAT, ["Four."]), (["u:Two and two?", "a:Five."], ["Five."])],
    ),
    "Guanaco": ("x.jsonl", {"text": "### Human: Two and two?### Assistant: Four."}, [(CHAT, ["Four."])]),
    "CSV": (
        "x.csv",
        _csv({"prompt": "Two and two?", "completion": "Four.", "label": "True", "note": ""}),
        [(CHAT, ["Four."])],
    ),
    "CSV with messages": (
        "x.csv.gz",
        gzip.compress(_csv({"messages": json.dumps(_turns(*CHAT))})),
        [(CHAT, ["Four."])],
    ),
    "an answer in HTML": (
        "x.jsonl",
        {"prompt": "Two and two?", "completion": "<s>Five.</s>"},
        [(["u:Two and two?", "a:<s>Five.</s>"], ["<s>Five.</s>"])],
    ),
    "TSV": (
        "x.tsv",
        _csv({"question": "Two and two?", "answer": "Four."}, delimiter="\t"),
        [(CHAT, ["Four."])],
    ),
    "zstd": (
        "x.jsonl.zst",
        _zstd(_lines(MESSAGES, {"messages": _turns(*CHAT)})),
        [(LONG, ["Four.", "Yes."]), (CHAT, ["Four."])],
    ),
    "JSON that is lines": (
        "x.json",
        _lines(MESSAGES, {"messages": _turns(*CHAT)}),
        [(LONG, ["Four.", "Yes."]), (CHAT, ["Four."])],
    ),
}


def _read_back(store: Path, tokenizer: ChatTokenizer) -> list[tuple[list[str], list[str]]]:
    """Of each trajectory what was said, and the texts that its tokens train; they are what is rendered."""
    letters = {role: letter for letter, role in ROLE.items()}
    chats = []
    for trajectory in rb.open(store).trajectories().values():
        messages = _messages(trajectory)
        [sample] = samples_of(trajectory)
        last = list(trajectory.turns.values())[-1]
        whole = tokenizer.render(messages, last.requested.request.get("tools"), generate=False)
        assert tokenizer.decode(sample.tokens, special=True) == whole.rstrip("\n")
        trained = tokenizer.decode(sample.tokens[sample.loss_mask], special=True).split(END)
        assert trained.pop() == ""
        texts = [f"{letters[message['role']]}:{message.get('content')}" for message in messages]
        chats.append((texts, trained))
    return chats


def _messages(trajectory: Trajectory) -> list[Any]:
    last = list(trajectory.turns.values())[-1]
    assert last.completed is not None
    return [*trajectory.messages(last), last.completed.reply]


@pytest.mark.more_but(
    *("messages", "weight 0 of OpenAI", "several replies in a row", "parts of content", "ShareGPT*tool"),
    *("ShareGPT", "Alpaca", "prompt and completion", "KTO", "GSM8K", "preference", "hh-rlhf", "CSV"),
    *("UltraFeedback", "zstd"),
)
@pytest.mark.parametrize("case", SHAPES)
def test_a_file_as_people_have_it(case: str, tmp_path: Path, model: Path, tokenizer: ChatTokenizer) -> None:
    """What was said stands in the log as it was, and exactly the replies that count are trained."""
    name, content, expected = SHAPES[case]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else _lines(content))
    import_dataset(tmp_path / name, tmp_path / "store", "r", model)
    assert _read_back(tmp_path / "store", tokenizer) == expected


def _parquet(folder: Path, *rows: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "x.parquet")
    return folder / "x.parquet"


def _folder(folder: Path, *rows: Any) -> Path:
    for number, row in enumerate(rows):
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / f"train-{number:05}-of-00002.jsonl").write_bytes(_lines(row))
    (folder / "README.md").write_text("A data set.")
    return folder


def _pattern(folder: Path, *rows: Any) -> Path:
    _folder(folder, *rows)
    (folder / "data" / "test-00000-of-00001.jsonl").write_bytes(_lines({"messages": _turns("u:a", "a:b")}))
    return folder / "data" / "train-*.jsonl"


def _saved(folder: Path, *rows: Any) -> Path:
    import datasets

    datasets.Dataset.from_list(list(rows)).save_to_disk(folder / "saved")
    (folder / "saved" / "data-left-over.arrow").write_bytes(b"what an earlier save left")
    return folder / "saved"


def _saved_splits(folder: Path, *rows: Any) -> Path:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(list(rows))}).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("write", [_parquet, _folder, _pattern, _saved, _saved_splits])
def test_rows_wherever_they_stand(
    write: Callable[..., Path], tmp_path: Path, model: Path, tokenizer: ChatTokenizer
) -> None:
    """Parquet, a folder of files, a pattern, and what `datasets` saves: in order, each row once."""
    (tmp_path / "data-set").mkdir()
    rows = [
        {"messages": [{**message, "weight": None} for message in _turns(*words)]} for words in (LONG, CHAT)
    ]
    import_dataset(write(tmp_path / "data-set", *rows), tmp_path / "store", "r", model)
    assert _read_back(tmp_path / "store", tokenizer) == [(LONG, ["Four.", "Yes."]), (CHAT, ["Four."])]


DIALOGUE = "Tell me, in a few words, how much two and two may be."
REFUSED: dict[str, tuple[Any, str]] = {
    "a prompt alone": ({"prompt": "a"}, "a prompt without an answer holds nothing to train"),
    "a text": ({"text": "Once upon a time."}, "a text without roles"),
    "steps": ({"prompt": "a", "completions": ["b"], "labels": [True]}, "judged step by step"),
    "images": ({"messages": _turns(*CHAT), "images": ["x.png"]}, r"images is \["),
    "a part that is an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, *_turns("a:b")]},
        r"messages\[0\]\.content\[0\] is an image",
    ),
    "a role": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        r"conversations\[0\]\.from is .narrator",
    ),
    "text that a template rendered": (
        {"prompt": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "completion": "b<|im_end|>"},
        r"prompt holds <\|im_start\|>, the mark of a chat template",
    ),
    "a prompt in Alpaca's template": (
        {"prompt": "### Instruction:\nAdd.\n\n### Response:\n", "completion": "b"},
        r"prompt holds ### Response:",
    ),
    "an end of turn": (
        {"prompt": "a", "completion": "b</s>"},
        "completion ends with </s>, the end of a turn",
    ),
    "an end of turn in messages": (
        {"messages": _turns("u:a", "a:b<|eot_id|>")},
        r"messages\[1\]\.content ends with <\|eot_id\|>",
    ),
    "Python's notation": ({"messages": "[{'role': 'user'}]"}, "Python's notation"),
    "messages that are no JSON": ({"messages": "hello"}, "messages is .hello.: no list of messages"),
    "a mark of the user's": (
        {"messages": [{**_turns("u:a")[0], "weight": 1}, *_turns("a:b")]},
        r"messages\[0\]\.weight is 1 of a message of role user",
    ),
    "parts of a reply": (
        {"conversations": [*_gpt("u:a"), {"from": "gpt", "value": "b", "train_detail": []}]},
        r"conversations\[1\]\.train_detail is not read",
    ),
    "two answers": (
        {"query": "a", "response": "b", "answer": "c"},
        "query and response or query and answer: say",
    ),
    "another prompt": (
        {"prompt": "Hello", "chosen": _trl(*CHAT), "rejected": _trl("u:Two and two?", "a:Five.")},
        "chosen begins with .*, and not with the prompt beside it",
    ),
    "another completion": ({"prompt": "Hello", "completion": _trl(*CHAT)}, "completion begins with"),
    "one whole, one not": (
        {"prompt": "Two and two?", "chosen": _trl(*CHAT), "rejected": "Five."},
        "one begins with an answer, the other does not",
    ),
    "texts with the prompt in front": (
        {"prompt": DIALOGUE, "chosen": f"{DIALOGUE} Four.", "rejected": f"{DIALOGUE} Five."},
        "both answers begin with the whole prompt",
    ),
    "two systems": (
        {"system": "Be brief.", "messages": _turns("s:Be long.", *CHAT)},
        "system and a message of role system say two different things",
    ),
    "a context that is a number's": (
        {"prompt": _trl("u:a"), "context": "b", "completion": "c"},
        "context is .b.: write it into the prompt",
    ),
    "tools": ({"messages": _turns(*CHAT), "tools": "all"}, "tools is .all.: no JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_trained_as_something_else(case: str, tmp_path: Path, model: Path) -> None:
    """It is refused with its file, row and key."""
    row, reason = REFUSED[case]
    (tmp_path / "x.jsonl").write_bytes(_lines(row))
    with pytest.raises(InterchangeError, match=rf"x\.jsonl, row 1: .*{reason}"):
        import_dataset(tmp_path / "x.jsonl", tmp_path / "store", "r", model)
    assert not (tmp_path / "store").exists()


def test_names_that_appear_twice(tmp_path: Path, model: Path) -> None:
    """The later row is named, and the earlier."""
    (tmp_path / "x.jsonl").write_bytes(
        _lines(*({"id": "a", "messages": _turns("u:a", f"a:{i}")} for i in "bc"))
    )
    with pytest.raises(InterchangeError, match=r"x\.jsonl, row 2: is named \"a\", as .*x\.jsonl, row 1 is"):
        import_dataset(tmp_path / "x.jsonl", tmp_path / "store", "r", model)


def test_a_shape_can_be_asked_for(tmp_path: Path, model: Path, tokenizer: ChatTokenizer) -> None:
    """Where a row has keys of two; and its keys may have other names."""
    row = SHAPES["UltraFeedback"][1]
    (tmp_path / "x.jsonl").write_bytes(_lines(row))
    import_dataset(tmp_path / "x.jsonl", tmp_path / "a", "r", model, reading=Reading("messages"))
    assert _read_back(tmp_path / "a", tokenizer) == [(CHAT, ["Four."])]
    (tmp_path / "x.jsonl").write_bytes(
        _lines({"problem": "Two and two?", "solution": "Four.", "answer": "4"})
    )
    keys = {"prompt": "problem", "completion": "solution"}
    import_dataset(tmp_path / "x.jsonl", tmp_path / "b", "r", model, reading=Reading(keys=keys))
    assert _read_back(tmp_path / "b", tokenizer) == [(CHAT, ["Four."])]
    for reading, reason in (
        (Reading("alpaca"), "it has answer, problem, solution: write instruction and output"),
        (Reading(keys={"prompt": "question"}), "it has answer, problem, solution, and no question"),
    ):
        with pytest.raises(InterchangeError, match=f"x.jsonl, row 1: {reason}"):
            import_dataset(tmp_path / "x.jsonl", tmp_path / "c", "r", model, reading=reading)


def test_what_was_judged_bad_is_not_imitated(tmp_path: Path, model: Path, tokenizer: ChatTokenizer) -> None:
    """Where all that is imported will be: rejected answers are refused, and the chosen can be taken alone."""
    for case, reason in (("UltraFeedback", "also the rejected answer"), ("KTO", "label is false")):
        row = SHAPES[case][1] | ({"label": False} if case == "KTO" else {})
        (tmp_path / "x.jsonl").write_bytes(_lines(row))
        with pytest.raises(InterchangeError, match=f"row 1: .*{reason}"):
            import_dataset(tmp_path / "x.jsonl", tmp_path / "a", "r", model, reading=Reading(imitated=True))
    for case, shape, key in (
        ("UltraFeedback", "messages", "messages"),
        ("UltraFeedback", "prompt-completion", "completion"),
        ("preference", "prompt-completion", "completion"),
        ("hh-rlhf", "messages", "messages"),
    ):
        name, content, _ = SHAPES[case]
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else _lines(content))
        reading = Reading(shape, {key: "chosen"}, imitated=True)
        store = tmp_path / f"{case}-{shape}"
        import_dataset(tmp_path / name, store, "r", model, reading=reading)
        assert _read_back(store, tokenizer) == [(CHAT, ["Four."])]


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def thinking(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes something else where it is not to think."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("thinking") / "model")
    template = (model / "chat_template.jinja").read_text()
    closed = "{%- if enable_thinking is false and add_generation_prompt %}{{- 'No thoughts. ' }}{%- endif %}"
    (folder / "chat_template.jinja").write_text(closed + template)
    return folder


def test_what_a_template_is_given(tmp_path: Path, thinking: Path) -> None:
    """By a row, or for all rows that do not say it themselves; a template's own names are not free."""
    rows = [{"prompt": "a", "completion": str(i)} for i in range(2)]
    (tmp_path / "x.jsonl").write_bytes(_lines(rows[0] | OFF, rows[1]))
    tokenizer = load_chat_tokenizer(thinking)
    for name, kwargs, silent in (("a", {}, [True, False]), ("b", {"enable_thinking": False}, [True, True])):
        reading = Reading(template_kwargs=kwargs)
        import_dataset(tmp_path / "x.jsonl", tmp_path / name, "r", thinking, reading=reading)
        log = rb.open(tmp_path / name)
        texts = [tokenizer.decode(s.tokens) for t in log.trajectories().values() for s in samples_of(t)]
        assert [text.startswith("No thoughts.") for text in texts] == silent
    for wrong, reason in (
        ({"messages": []}, "gives that to the template itself"),
        ([], "row 1: chat_template"),
    ):
        (tmp_path / "x.jsonl").write_bytes(_lines(rows[0] | {"chat_template_kwargs": wrong or "[1]"}))
        with pytest.raises(InterchangeError, match=reason):
            import_dataset(tmp_path / "x.jsonl", tmp_path / "c", "r", thinking)


_SENT = {"name": "add", "description": "Adds.", "strict": None}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("read", "tools"),
    [
        (read_chat, [OPENAI_TOOL, {"type": "custom", "custom": {"name": "x"}}]),
        (
            read_responses,
            [{"type": "function", **_SENT, "parameters": _SCHEMA}, {"type": "web_search", "name": "x"}],
        ),
        (
            read_messages,
            [
                {"name": "add", "description": "Adds.", "input_schema": _SCHEMA},
                {"type": "custom", "name": "sub", "input_schema": {}},
                {"type": "bash_20250124", "name": "bash"},
            ],
        ),
        (read_messages, [{"type": "bash_20250124", "name": "bash"}]),
    ],
    ids=["chat", "responses", "messages", "elsewhere"],
)
def test_tools_are_read_as_a_proxy_reads_them(read: Any, tools: Any) -> None:
    """In the form of each API: an export has them as they were sent."""
    messages = _turns("u:Hi")
    call = read({"messages": messages, "input": messages, "max_tokens": 1, "tools": tools}, no_history)
    assert tools_of({"tools": tools}) == call.tools


def test_an_export_gives_a_template_the_same(tmp_path: Path, thinking: Path) -> None:
    """Import, export, import: what a template was given goes along, and the trained ids are the same."""
    chats = [{"messages": _turns("u:Hi", "a:Hi!", "u:2+2?", "a:4"), "id": name} for name in ("on", "off")]
    (tmp_path / "x.jsonl").write_bytes(_lines(chats[0], chats[1] | OFF))
    first, again = tmp_path / "first", tmp_path / "again"
    import_dataset(tmp_path / "x.jsonl", first, "r", thinking)
    export_store(first, tmp_path / "out.jsonl", "jsonl")
    import_dataset(tmp_path / "out.jsonl", again, "r", thinking)
    trained, trained_again = _trained(first), _trained(again)
    assert trained == trained_again
    assert trained["on"] != trained["off"]


def _trained(path: Path) -> dict[str, Any]:
    """Of each trajectory its samples' ids, and which of them are trained."""
    return {
        t.opened.name: [(s.tokens.tolist(), s.loss_mask.tolist()) for s in samples_of(t)]
        for t in rb.open(path).trajectories().values()
    }


def test_files_that_say_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and bytes are bounded, whatever a compressed file unpacks to; what is cut off is an error."""
    monkeypatch.setattr(files, "ROW_BYTES", 1000)
    monkeypatch.setattr(files, "JSON_BYTES", 1000)
    monkeypatch.setattr(files, "ROWS", 3)
    many, packed = _lines(*({"a": i} for i in range(4))), gzip.compress(_lines(*({"a": i} for i in range(3))))
    for name, content, reason in (
        ("x.jsonl.gz", gzip.compress(b'{"a": "' + b"b" * 100_000), "row 1: has more than 1,000 bytes"),
        ("x.json.gz", gzip.compress(b"[" + b" " * 100_000), "more than 1,000 bytes of JSON"),
        ("x.csv", b"a,b\n1," + b"c" * 2000, "after row 0: no CSV"),
        ("x.jsonl", many, "row 4: more than 3 rows"),
        ("y.jsonl.gz", packed[:-12], "cannot read .*y.jsonl.gz: "),
        ("x.jsonl.zst", b"no zstd", "cannot read .*x.jsonl.zst: "),
        ("x.csv.gz", gzip.compress(b"a,b\n1\n"), "row 1: 1 values for 2 names"),
        ("y.csv", b"a,a\n1,2\n", "row 1: .* do not name the columns, each once"),
        ("z.csv", b"a,b\n\xff,2\n", "no CSV in UTF-8"),
        ("w.csv", b"label\nmaybe\n", "row 1, label: no JSON"),
        ("x.parquet.gz", b"", "is compressed as a whole"),
        ("x.arrow", b"ARROW1", "cannot be read as Arrow"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InterchangeError, match=reason):
            list(files.rows_of(tmp_path / name))


def test_folders_that_hold_several_things(tmp_path: Path) -> None:
    """Splits are never mixed, and no data set is read twice because it is there in two forms."""
    row = _lines(MESSAGES)
    for names, reason in (
        (
            ("train-0.jsonl", "test-0.jsonl"),
            r"holds splits test, train: import one of '.*test\*', '.*train\*'",
        ),
        (("train/a.jsonl", "validation/a.jsonl"), "holds splits train, validation"),
        (("a.jsonl", "a.json"), r"holds kinds of files \.json, \.jsonl"),
        (("README.md", ".hidden.jsonl", "dataset_infos.json"), "holds no file of rows"),
    ):
        folder = tmp_path / names[0].replace("/", "-")
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(row)
        with pytest.raises(InterchangeError, match=reason):
            list(files.rows_of(folder))
    with pytest.raises(InterchangeError, match="no file has such a name"):
        list(files.rows_of(tmp_path / "none*.jsonl"))
    saved = tmp_path / "saved"
    saved.mkdir()
    for state, reason in (
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "which is not in"),
        ('{"_data_files": []}', "must list names"),
        ("[]", "does not list _data_files"),
        ('{"_data_files": [{"filename": "a"}], "_indices_files": ["b"]}', "save it after flatten_indices"),
    ):
        (saved / "state.json").write_text(state)
        with pytest.raises(RollbookError, match=reason):
            list(files.rows_of(saved))
