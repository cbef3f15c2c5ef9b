"""What the real client sends is read as it was meant, and what is answered is what the client takes it for.

`make test-service` sets up the client's environment and runs these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.engines.engine import TopTokens
from rollbook.store.events import token_ids
from rollbook.train.tenants import tinker_pb2 as messages
from rollbook.train.tenants.wire import (
    Datum,
    Limits,
    Sampled,
    Span,
    read_pass,
    write_outputs,
    write_samples,
)

pytestmark = pytest.mark.service

FILLED = [[5, 0, 0, 0, 0], [0, 0, 7, 0, 9], [0, 0, 0, 0, 0]]
"""The sparse matrix below."""
PLAIN = {
    "chunks": [[3, 4], [], [151_935]],
    "inputs": {
        "target_tokens": {"dtype": "int64", "shape": [3], "data": [4, 2**40, -1]},
        "weights": {"dtype": "float32", "shape": [3], "data": [0.1, -2.5, 1e-30]},
    },
    "spans": [["s:0", 0, 2, False], ["s:1", 5, 1, True]],
    "input_spans": [["s:1", 2**40, 3, True]],
}
MATRICES = {
    "chunks": [[1, 2, 3]],
    "inputs": {
        "target_tokens": {
            **{"dtype": "int64", "shape": [3, 5], "data": [5, 7, 9]},
            **{"crow": [0, 1, 3, 3], "columns": [0, 2, 4]},
        },
        "weights": {"dtype": "float32", "shape": [3, 2], "data": [1, 2, 3, 4, 5, 6]},
        "advantages": {"dtype": "float32", "shape": [0], "data": []},
    },
    "spans": [],
    "input_spans": [],
}
PASSES: list[dict[str, Any]] = [
    {
        **{
            "model_id": "m:train:0",
            "seq": 1,
            "loss": "ppo",
            "forward_only": False,
            "data": [PLAIN, MATRICES],
        },
        "config": {"clip_low_threshold": 0.8, "agg": "mean"},
    },
    {
        "model_id": "m:train:1",
        "seq": 9,
        "loss": "custom",
        "forward_only": True,
        "data": [PLAIN],
        "config": {},
    },
]
OUTPUTS = [
    {"logprobs": np.float32([-0.1, -0.2]), "ids": np.int64([[1, 2], [3, 4]])},
    {"logprobs": np.float32([-0.5]), "ids": np.int64([[2**40, -1]])},
    {"logprobs": np.float32([[1, 2, 3]]), "ids": np.int64([[5, 6]])},  # another trailing shape
    {"logprobs": np.float32([]), "ids": np.int64([7])},  # and others again
]
METRICS = {"loss:sum": 1.5, "tokens:sum": 3.0}
MISSING = float("nan")
SAMPLES = [
    Sampled(token_ids([3, 4]), np.float32([-0.5, -1.25]), True),
    Sampled(
        *(token_ids([5]), None, False),
        TopTokens(token_ids([[5, 6, 9]]), np.float32([[-0.5, -1.0, MISSING]])),
    ),
    Sampled(token_ids([]), np.float32([]), False),
]
PROMPT_TOP = TopTokens(token_ids([[1, 1], [8, 9]]), np.float32([[MISSING, MISSING], [-1, -2]]))


@pytest.fixture(scope="module")
def folder(run_client: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's requests, what it read of our answers, and what those were."""
    path = tmp_path_factory.mktemp("wire")
    (path / "passes.json").write_text(json.dumps(PASSES))
    (path / "outputs").write_bytes(write_outputs(OUTPUTS, METRICS))
    (path / "samples").write_bytes(write_samples(SAMPLES, np.float32([MISSING, -2]), PROMPT_TOP))
    (path / "read.json").write_text(run_client("client_wire.py", path))
    return path


def _spans(given: list[Any]) -> tuple[Span, ...]:
    return tuple(Span(*span) for span in given)


def _check(datum: Datum, given: dict[str, Any]) -> None:
    assert datum.tokens.tolist() == [token for chunk in given["chunks"] for token in chunk]
    assert (datum.spans, datum.input_spans) == (_spans(given["spans"]), _spans(given["input_spans"]))
    assert list(datum.inputs) == sorted(given["inputs"])
    for name, tensor in given["inputs"].items():
        numbers = FILLED if "crow" in tensor else tensor["data"]
        wanted = np.asarray(numbers, tensor["dtype"]).reshape(tensor["shape"])
        assert datum.inputs[name].dtype == wanted.dtype
        np.testing.assert_array_equal(datum.inputs[name], wanted, strict=True)


@pytest.mark.parametrize("number", range(len(PASSES)))
def test_requests_are_read_as_they_were_meant(folder: Path, number: int) -> None:
    """Tokens of several chunks, arrays dense and sparse, spans, texts and numbers of the loss."""
    given = PASSES[number]
    read = read_pass((folder / f"{number}.request").read_bytes(), Limits())
    assert (read.model_id, read.seq, read.loss) == (given["model_id"], given["seq"], given["loss"])
    assert (read.config, read.forward_only) == (given["config"], given["forward_only"])
    assert len(read.data) == len(given["data"])
    for datum, meant in zip(read.data, given["data"], strict=True):
        _check(datum, meant)


def _fields(descriptor: Any) -> dict[str, Any]:
    """As the client's program has it, of our messages."""
    return {
        str(field.number): [
            *(field.name, field.type, field.is_repeated),
            field.containing_oneof and field.containing_oneof.name,
            _fields(field.message_type) if field.message_type else None,
        ]
        for field in descriptor.fields
    }


def test_messages_have_the_fields_of_the_client(folder: Path) -> None:
    """All of them, by number, type and oneof, down to the last message inside."""
    ours = [messages.ForwardBackwardRequest, messages.ForwardBackwardOutput, messages.SampleResponse]
    read = json.loads((folder / "read.json").read_text())
    assert read["fields"] == [_fields(message.DESCRIPTOR) for message in ours]


def test_outputs_are_what_the_client_reads(folder: Path) -> None:
    """Of every datum, in order: arrays of other lengths, of two dimensions, and of other trailing shapes."""
    read = json.loads((folder / "read.json").read_text())
    assert (read["type"], read["metrics"]) == ("ArrayRecord", METRICS)
    assert len(read["outputs"]) == len(OUTPUTS)
    for datum, given in zip(read["outputs"], OUTPUTS, strict=True):
        assert datum.keys() == given.keys()
        for name, array in given.items():
            assert datum[name]["dtype"] == array.dtype.name
            assert datum[name]["shape"] == list(array.shape)
            assert datum[name]["data"] == array.ravel().tolist()


def test_samples_are_what_the_client_reads(folder: Path) -> None:
    """Tokens, logprobs, why each ended, and the likeliest tokens, empty places left out."""
    read = json.loads((folder / "read.json").read_text())
    assert read["sequences"] == [
        ["stop", [3, 4], [-0.5, -1.25], None],
        ["length", [5], None, [[[5, -0.5], [6, -1.0]]]],
        ["length", [], None, None],
    ]
    assert read["prompt_logprobs"] == [None, -2.0]
    assert read["prompt_top"] == [None, [[8, -1.0], [9, -2.0]]]
