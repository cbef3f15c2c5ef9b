"""The messages of Tinker's protocol: what is read is what was sent, and nothing that was sent does harm."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollbook.engines.engine import TopTokens
from rollbook.store.errors import LimitError, RequestError
from rollbook.store.events import token_ids
from rollbook.train.tenants import tinker_pb2 as messages
from rollbook.train.tenants.wire import (
    Limits,
    Sampled,
    Span,
    read_pass,
    write_outputs,
    write_samples,
)

SMALL = Limits(datums=3, tokens=8, numbers=64, fields=200)
DTYPES = {
    "<f4": messages.DTYPE_FLOAT32,
    "<i8": messages.DTYPE_INT64,
    "<i4": messages.DTYPE_INT32,
    "<u2": messages.DTYPE_BFLOAT16,
}
READ_AS = {"<f4": "<f4", "<i8": "<i8", "<i4": "<i8", "<u2": "<f4"}


def _dense(values: Any, dtype: str = "<f4", shape: tuple[int, ...] | None = None) -> Any:
    array = np.asarray(values, dtype)
    return messages.Tensor(dense=array.tobytes(), dtype=DTYPES[dtype], shape=shape or array.shape)


def _sparse(values: Any, crow: Any, columns: Any, shape: Any, dtype: str = "<f4") -> Any:
    parts = {"values": (values, dtype), "crow_indices": (crow, "<i8"), "col_indices": (columns, "<i8")}
    csr = messages.SparseCsr(**{name: np.asarray(*part).tobytes() for name, part in parts.items()})
    return messages.Tensor(sparse_csr=csr, dtype=DTYPES[dtype], shape=shape)


def _compressed(matrix: Any, dtype: str) -> Any:
    """The matrix, sparse."""
    rows, columns = np.nonzero(matrix)
    crow = np.searchsorted(rows, np.arange(len(matrix) + 1))
    return _sparse(matrix[rows, columns], crow, columns, matrix.shape, dtype)


def _datum(tokens: Any = (1, 2), tensors: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    text = messages.EncodedText(tokens=np.asarray(tokens, "<i4").tobytes())
    chunks = [messages.Chunk(encoded_text=text)]
    datum = messages.Datum(**{"model_input": chunks, **fields})
    for name, tensor in (tensors or {}).items():
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return datum


def _body(*data: Any, **fields: Any) -> bytes:
    named = {"model_id": "m", "seq_id": 1, "loss_fn": "ppo"} | fields
    return bytes(messages.ForwardBackwardRequest(data=data, **named).SerializeToString())


def _plain(array: Any, dtype: str) -> Any:
    """What is read of numbers that were sent as this dtype."""
    if dtype == "<u2":
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype(READ_AS[dtype])


def test_the_generated_module_is_of_this_file(root: Path) -> None:
    """Each message and value of tinker.proto is in tinker_pb2, with its fields and numbers, and no other."""
    text = (root / "train/tenants/tinker.proto").read_text()
    named = dict(re.findall(r"^(?:message|enum) (\w+) {\n(.*?)^}", text, re.MULTILINE | re.DOTALL))
    written = {name: set(re.findall(r"(\w+) = (\d+);", fields)) for name, fields in named.items()}
    descriptors = messages.DESCRIPTOR.message_types_by_name, messages.DESCRIPTOR.enum_types_by_name
    made = {name: {(f.name, str(f.number)) for f in each.fields} for name, each in descriptors[0].items()}
    made |= {name: {(v.name, str(v.number)) for v in each.values} for name, each in descriptors[1].items()}
    assert made == written


finite = {
    "<f4": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "<i8": st.integers(-(2**63), 2**63 - 1),
    "<i4": st.integers(-(2**31), 2**31 - 1),
    "<u2": st.integers(0, 0x7F7F),
}
shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
tensors = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: st.tuples(st.just(dtype), arrays.arrays(dtype, shapes, elements=finite[dtype]))
)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
data = st.lists(
    st.tuples(st.lists(ids, max_size=3), st.dictionaries(st.text(max_size=3), tensors)), max_size=3
)


@given(data, st.dictionaries(st.text(max_size=3), st.floats(-9, 9) | st.text(max_size=3)), st.booleans())
def test_what_was_sent_is_read(sent: list[Any], config: dict[str, float | str], forward_only: bool) -> None:
    """Any chunks of tokens, arrays of every dtype and shape, matrices sparse as well, any configuration."""
    request = messages.ForwardBackwardRequest(
        model_id="m", seq_id=2**31 - 1, loss_fn="dro", forward_only=forward_only
    )
    for name, value in config.items():
        setattr(request.loss_fn_config_v2[name], "text" if isinstance(value, str) else "number", value)
    for chunks, inputs in sent:
        datum = request.data.add()
        for chunk in chunks:
            datum.model_input.add().encoded_text.tokens = token_ids(chunk).tobytes()
        for name, (dtype, array) in inputs.items():
            sparse = array.ndim == 2 and array.dtype != "<f4"  # a sparse -0.0 would come back as 0.0
            tensor = _compressed(array, dtype) if sparse else _dense(array, dtype)
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    read = read_pass(request.SerializeToString(), Limits())
    assert (read.model_id, read.seq, read.loss) == ("m", 2**31 - 1, "dro")
    assert (read.config, read.forward_only) == (config, forward_only)
    for datum, (chunks, inputs) in zip(read.data, sent, strict=True):
        assert datum.tokens.dtype == np.int32
        assert datum.tokens.tolist() == [token for chunk in chunks for token in chunk]
        assert list(datum.inputs) == sorted(inputs)
        for name, (dtype, array) in inputs.items():
            np.testing.assert_array_equal(datum.inputs[name], _plain(array, dtype), strict=True)
            assert not datum.inputs[name].flags.writeable


def test_a_sparse_matrix_is_filled_up() -> None:
    """With zeros, in rows that have none too; an array without a shape has one dimension."""
    sparse = _sparse([1.5, -2, 3], [0, 2, 2, 3], [0, 3, 1], (3, 4))
    flat = messages.Tensor(dense=np.asarray([7, 8], "<i8").tobytes(), dtype=messages.DTYPE_INT64)
    [datum] = read_pass(_body(_datum(tensors={"a": sparse, "b": flat})), SMALL).data
    assert datum.inputs["a"].tolist() == [[1.5, 0, 0, -2], [0, 0, 0, 0], [0, 3, 0, 0]]
    assert datum.inputs["b"].tolist() == [7, 8]


def test_spans_are_read() -> None:
    """Of both kinds; those of the loss's inputs are of the rows of the targets."""
    part = messages.SpanOfTokens(sequence_id="s:1", offset=3, length=1)
    spans = [messages.Span(prompt_tokens=part), messages.Span(sampled_tokens=part)]
    tensors = {"target_tokens": _dense([5], "<i8")}
    sent = _datum(tensors=tensors, model_input_spans=spans, loss_fn_input_spans=spans[1:])
    [datum] = read_pass(_body(sent), SMALL).data
    assert datum.spans == (Span("s:1", 3, 1, False), Span("s:1", 3, 1, True))
    assert datum.input_spans == (Span("s:1", 3, 1, True),)


def test_version_2_of_a_setting_wins() -> None:
    """Over the number that older servers read; a key that is there alone counts too."""
    request = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    request.loss_fn_config.update({"both": 1.0, "old": 2.0})
    request.loss_fn_config_v2["both"].number = 3.0
    request.loss_fn_config_v2["text"].text = "mean"
    read = read_pass(request.SerializeToString(), SMALL)
    assert list(read.config.items()) == [("both", 3.0), ("old", 2.0), ("text", "mean")]


def _with(tensor: Any) -> bytes:
    return _body(_datum(tensors={"a": tensor}))


def _with_span(**span: Any) -> bytes:
    return _body(_datum(model_input_spans=[messages.Span(**span)]))


def _span(name: str = "s", offset: int = 0, length: int = 2) -> Any:
    return messages.SpanOfTokens(sequence_id=name, offset=offset, length=length)


NUMBER = {"number": float("nan")}
REFUSED = {
    "no message": (b'{"model_id": "m"}', "the body is no ForwardBackwardRequest"),
    "ends too early": (_body(_datum())[:-1], "the body is no ForwardBackwardRequest"),
    "unknown field": (_body() + b"\x48\x01", "the body has fields that are not known here"),
    "nothing": (b"", "model_id is empty"),
    "no loss": (_body(loss_fn=""), "loss_fn is empty"),
    "no seq": (_body(seq_id=0), "seq_id is 0: count from 1 on"),
    "seq below": (_body(seq_id=-4), "seq_id is -4"),
    "image": (
        _body(_datum(model_input=[messages.Chunk(image=messages.Image(data=b"x"))])),
        "datum 0 has a chunk of kind image, which is not supported",
    ),
    "dmel": (_body(_datum(model_input=[messages.Chunk(dmel=messages.Dmel())])), "a chunk of kind dmel"),
    "no chunk": (_body(_datum(model_input=[messages.Chunk()])), "a chunk of kind None"),
    "token below 0": (_body(_datum(), _datum([5, -2])), "datum 1 has the token -2: ids are 0 or more"),
    "half a token": (
        _body(_datum(model_input=[messages.Chunk(encoded_text=messages.EncodedText(tokens=b"12345"))])),
        "datum 0: tokens: 5 bytes are no whole numbers of 4 bytes",
    ),
    "no dtype": (_with(messages.Tensor(dense=b"1234")), "datum 0: 'a' is of dtype 0, which is not known"),
    "dtype 9": (_with(messages.Tensor(dense=b"1234", dtype=9)), "'a' is of dtype 9"),
    "no numbers": (_with(messages.Tensor(dtype=1)), "'a' has no numbers"),
    "half a number": (_with(messages.Tensor(dense=b"123456", dtype=1)), "6 bytes are no whole numbers of 4"),
    "another shape": (_with(_dense([1, 2], shape=(3,))), "'a' has 2 numbers and the shape [3]"),
    "below 0": (_with(_dense([1, 2], shape=(-1, -2))), "'a' has the shape [-1, -2]: give up to 8 sizes"),
    "deep": (_with(_dense([1], shape=(1,) * 65)), "'a' has the shape [1, 1"),
    "nan": (_with(_dense([1, float("nan")])), "'a' has nan: send finite numbers"),
    "infinite": (_with(_dense([float("-inf")])), "'a' has -inf"),
    "bfloat16": (_with(_dense([0x7F80], "<u2")), "'a' has inf"),
    "sparse nan": (_with(_sparse([float("nan")], [0, 1], [0], (1, 1))), "'a' has nan"),
    "sparse vector": (_with(_sparse([1], [0, 1], [0], (1,))), "'a' is sparse and has the shape [1]"),
    "few columns": (_with(_sparse([1, 2], [0, 2], [0], (1, 2))), "'a' has 2 numbers and 1 col_indices"),
    "few rows": (_with(_sparse([1], [0, 1], [0], (2, 2))), "do not lead from 0 to 1 in 2 rows: give 3"),
    "first row": (_with(_sparse([1], [1, 1], [0], (1, 2))), "do not lead from 0 to 1 in 1 rows"),
    "last row": (_with(_sparse([1], [0, 2], [0], (1, 2))), "do not lead from 0 to 1 in 1 rows"),
    "rows back": (_with(_sparse([1], [0, 2, 1], [0], (2, 2))), "do not lead from 0 to 1 in 2 rows"),
    "right of all": (_with(_sparse([1], [0, 1], [2], (1, 2))), "'a' has a col_index outside of 2 columns"),
    "left of all": (_with(_sparse([1], [0, 1], [-1], (1, 2))), "'a' has a col_index outside of 2 columns"),
    "not sorted": (
        _with(_sparse([1, 2], [0, 2], [1, 0], (1, 2))),
        "col_indices that do not rise within a row",
    ),
    "twice": (_with(_sparse([1, 2], [0, 2], [1, 1], (1, 2))), "col_indices that do not rise within a row"),
    "span of nothing": (_with_span(), "datum 0: model_input_spans has a span of no kind"),
    "span of nobody": (_with_span(prompt_tokens=_span("")), "has the span '' from 0, 2 long"),
    "span below 0": (_with_span(prompt_tokens=_span(offset=-1)), "has the span 's' from -1, 2 long"),
    "span too short": (
        _with_span(sampled_tokens=_span(length=1)),
        "datum 0: model_input_spans are 1 long together, and what they are of 2",
    ),
    "rows not covered": (
        _body(
            _datum(
                tensors={"target_tokens": _dense([1, 2, 3], "<i8")},
                loss_fn_input_spans=[messages.Span(sampled_tokens=_span())],
            )
        ),
        "datum 0: loss_fn_input_spans are 2 long together, and what they are of 3",
    ),
    "setting is nan": (
        _body(loss_fn_config_v2={"beta": messages.LossFnConfigValue(**NUMBER)}),
        "loss_fn_config 'beta' is nan: give it a finite number",
    ),
    "old setting is nan": (_body(loss_fn_config={"beta": float("inf")}), "loss_fn_config 'beta' is inf"),
    "setting is empty": (
        _body(loss_fn_config_v2={"beta": messages.LossFnConfigValue()}),
        "loss_fn_config 'beta' is empty",
    ),
}
"""What is sent -> (its bytes, what is answered)."""
TOO_MUCH = {
    "datums": (_body(*[_datum()] * 4), "the pass has more than 3 datums"),
    "tokens": (_body(_datum(range(9))), "datum 0 has 9 tokens: send at most 8"),
    "numbers": (_with(_dense(range(65))), "the pass has more than 64 numbers in its arrays"),
    "no shape": (_with(messages.Tensor(dense=bytes(260), dtype=1)), "more than 64 numbers"),
    "huge": (_with(_dense([], shape=(2**62, 2**62))), "more than 64 numbers"),
    "huge and empty": (_with(_dense([], shape=(0, 2**62))), "more than 64 numbers"),
    "zeros": (_with(_sparse([], [0] * 9, [], (8, 9))), "more than 64 numbers"),
    "zeros of two": (
        _body(*[_datum(tensors={"a": _sparse([], [0] * 5, [], (4, 9))})] * 2),
        "more than 64 numbers",
    ),
    "fields": (_body(_datum(model_input=[messages.Chunk()] * 200)), "the pass has more than 200 fields"),
    "sizes": (_with(_dense([], shape=(1,) * 200)), "the pass has more than 200 fields"),
}
"""What is too much of -> (its bytes, what is answered)."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(name: str) -> None:
    """With the datum, the array, the value and a remedy."""
    body, text = REFUSED[name]
    with pytest.raises(RequestError) as refusal:
        read_pass(body, SMALL)
    assert (refusal.value.status, refusal.value.code) == (400, "bad_pass")
    assert text in refusal.value.message
    assert ": " in refusal.value.message


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_too_much_is_named(name: str) -> None:
    """By a limit of its own, and with the limit."""
    body, text = TOO_MUCH[name]
    with pytest.raises(LimitError) as refusal:
        read_pass(body, SMALL)
    assert (refusal.value.status, refusal.value.code) == (400, "pass_too_large")
    assert text in refusal.value.message


def test_limits_are_the_last_that_is_allowed() -> None:
    """As many datums, tokens and numbers as there may be are read."""
    full = _datum(range(8), {"a": _dense(range(32))})
    sparse = _datum(tensors={"a": _sparse([], [0] * 9, [], (8, 4))})
    read = read_pass(_body(full, sparse, _datum()), SMALL)
    assert [len(datum.tokens) for datum in read.data] == [8, 2, 2]


VALID = _body(
    _datum(
        tensors={"a": _sparse([1, 2], [0, 1, 2], [0, 1], (2, 3)), "target_tokens": _dense([1, 2], "<i8")},
        model_input_spans=[messages.Span(prompt_tokens=_span())],
        loss_fn_input_spans=[messages.Span(sampled_tokens=_span())],
    ),
    loss_fn_config={"beta": 1.0},
    loss_fn_config_v2={"beta": messages.LossFnConfigValue(number=1.0)},
)
edits = st.lists(
    st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 3), st.binary(max_size=3)), max_size=6
)


@given(st.binary(max_size=80) | edits.map(lambda changes: _changed(VALID, changes)))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    """Any bytes, and a pass of which bytes were changed, left out or put in: it is read, or refused."""
    with contextlib.suppress(RequestError):
        read_pass(body, SMALL)


def _changed(body: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, left_out, put_in in changes:
        body = body[:place] + put_in + body[place + left_out :]
    return body


BOMBS = """
import numpy as np
from rollbook.train.tenants import tinker_pb2 as messages
from rollbook.train.tenants.wire import Limits, read_pass
from rollbook.store.errors import RequestError

def field(number, inside):
    size, head = len(inside), []
    while size > 127:
        head, size = [*head, size & 127 | 128], size >> 7
    return bytes([number << 3 | 2, *head, size]) + inside

def memory(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name + ":")]
    return int(line.split()[1]) >> 10

def tensor(inside):
    return field(3, field(2, field(2, inside)))

MANY = 4 << 20
crow = field(2, bytes(16)) + field(1, b"") + field(3, b"")
wide = messages.Tensor(shape=(1, 1 << 26), dtype=1).SerializeToString() + field(2, crow)
named = lambda i: field(2, field(1, str(i).encode()) + field(2, wide))
bodies = {
    "datums": b"\\x1a\\0" * MANY,
    "group": b"\\x0b\\x0c" + b"\\x1a\\0" * MANY,
    "chunks": field(3, b"\\x0a\\0" * MANY),
    "kinds": field(3, field(1, b"\\x0a\\0\\x12\\0" * (MANY >> 1))),
    "spans": field(3, b"\\x22\\0" * MANY),
    "sizes": tensor(field(4, bytes(2 * MANY))),
    "zeros": field(3, b"".join(map(named, range(1000)))) + field(1, b"m") + field(4, b"l") + b"\\x10\\1",
}
for name, body in bodies.items():
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    try:
        read_pass(body, Limits(fields=1 << 16))
    except RequestError:
        print(name, memory("VmHWM") - before)
"""


def test_a_small_body_takes_little_memory(run_python: Callable[..., tuple[int, str, str]]) -> None:
    """Parsed, 8 MB of these would take 130 to 230; the zeros of a few kilobytes, 250 GB."""
    status, out, err = run_python(BOMBS)
    assert (status, err) == (0, "")
    peaks = {name: int(size) for name, size in map(str.split, out.splitlines())}
    assert set(peaks) == {"datums", "group", "chunks", "kinds", "spans", "sizes", "zeros"}
    assert max(peaks.values()) < 16, peaks


@st.composite
def outputs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Arrays of some datums, under the same names; often only their lengths differ."""
    names = draw(st.sets(st.sampled_from(["", "ids", "logprobs"])))
    forms = st.tuples(st.sampled_from(["<f4", "<i8"]), st.sampled_from([(), (2,), (0,), (3, 1)]))
    datums = []
    for _ in range(draw(st.integers(0, 5))):
        datum = {}
        for name in names:
            dtype, trailing = draw(forms)
            shape = (draw(st.integers(0, 3)), *trailing)
            datum[name] = draw(arrays.arrays(dtype, shape, elements=finite[dtype]))
        datums.append(datum)
    return datums


def _parsed(body: bytes) -> Any:
    message = messages.ForwardBackwardOutput()
    message.ParseFromString(body)
    return message


def _parts(field: Any) -> list[bytes]:
    """The bytes of each datum."""
    offsets = np.frombuffer(field.offsets, "<i8").tolist()
    assert (offsets[0], offsets[-1]) == (0, len(field.data))
    return [field.data[begin:end] for begin, end in itertools.pairwise(offsets)]


@given(outputs())
def test_outputs_are_in_the_order_of_datums(given_outputs: list[dict[str, Any]]) -> None:
    """Records hold each datum's arrays once, in order, with their dtype and trailing shape."""
    message = _parsed(write_outputs(given_outputs, {"loss:sum": 0.5}))
    assert (message.loss_fn_output_type, dict(message.metrics)) == ("ArrayRecord", {"loss:sum": 0.5})
    assert sum(record.num_datums for record in message.loss_fn_outputs) == len(given_outputs)
    rest = iter(given_outputs)
    for record in message.loss_fn_outputs:
        datums = [next(rest) for _ in range(record.num_datums)]
        assert record.fields.keys() == datums[0].keys()
        for name, field in record.fields.items():
            assert _parts(field) == [datum[name].tobytes() for datum in datums]
            for datum in datums:
                assert (DTYPES[datum[name].dtype.str], datum[name].shape[1:]) == (
                    field.dtype,
                    tuple(field.trailing_shape),
                )


def _records(*outputs: Mapping[str, Any]) -> list[int]:
    return [record.num_datums for record in _parsed(write_outputs(outputs, {})).loss_fn_outputs]


def test_a_record_is_a_run_of_datums_of_one_form() -> None:
    """Lengths may differ in it; a dtype or a trailing shape that differs begins the next."""
    long, short = {"a": np.zeros(3, np.float32)}, {"a": np.zeros(1, np.float32)}
    wide, whole = {"a": np.zeros((1, 2), np.float32)}, {"a": np.zeros(3, np.int64)}
    assert _records(long, short, long) == [3]
    assert _records(long, wide, wide, long, whole) == [1, 2, 1, 1]
    assert _records({}, {}) == [2]
    assert _records() == []


def test_bytes_of_outputs() -> None:
    """As they are sent; whatever the order of names and of memory, the same."""
    matrix = np.asarray([[1, 2], [3, 4]], np.float32, order="F")
    outputs = [{"b": np.asarray([7]), "a": matrix}, {"b": np.asarray([8, 9]), "a": matrix[1:]}]
    turned = [{name: np.ascontiguousarray(datum[name]) for name in "ab"} for datum in outputs]
    metrics = {f"{name}:sum": 1.0 for name in range(20)}
    body = write_outputs(outputs, metrics)
    assert body == write_outputs(turned, dict(reversed(metrics.items())))
    [record] = _parsed(body).loss_fn_outputs
    assert (record.type_tag, record.num_datums) == ("ArrayRecord", 2)
    first, second = record.fields["a"], record.fields["b"]
    assert np.frombuffer(first.data, "<f4").tolist() == [1, 2, 3, 4, 3, 4]
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 16, 24]
    assert np.frombuffer(second.offsets, "<i8").tolist() == [0, 8, 24]
    assert (list(first.trailing_shape), list(second.trailing_shape)) == ([2], [])


NOT_WRITTEN = {
    "other names": [{"a": np.zeros(1, np.float32)}, {"b": np.zeros(1, np.float32)}],
    "a name more": [{"a": np.zeros(1, np.float32)}, {}],
    "float64": [{"a": np.zeros(1)}],
    "big-endian": [{"a": np.zeros(1, ">f4")}],
    "a scalar": [{"a": np.float32(1)}],
}


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_outputs_that_have_no_form_are_not_written(name: str) -> None:
    """Clients number a name's arrays over all records: one left out would move the others."""
    with pytest.raises(ValueError, match=": give "):
        write_outputs(NOT_WRITTEN[name], {})


def test_bytes_of_samples() -> None:
    """Tokens, logprobs, why each ended, top tokens with their empty places, and the same of the prompt."""
    top = TopTokens(token_ids([[4, 9]]), np.float32([[-0.5, np.nan]]))
    samples = [Sampled(token_ids([4]), np.float32([-0.5]), False, top), Sampled(token_ids([]), None, True)]
    message = messages.SampleResponse()
    message.ParseFromString(write_samples(samples, np.float32([np.nan, -2]), top))
    first, second = message.sequences
    assert (first.stop_reason, second.stop_reason) == (messages.STOP_REASON_LENGTH, messages.STOP_REASON_STOP)
    assert (first.tokens, first.logprobs) == (token_ids([4]).tobytes(), np.float32([-0.5]).tobytes())
    assert not second.HasField("logprobs")
    assert not second.HasField("topk_sampled_logprobs")
    assert message.prompt_logprobs == np.float32([np.nan, -2]).tobytes()
    for written in (first.topk_sampled_logprobs, message.topk_prompt_logprobs):
        assert (written.length, written.k) == (1, 2)
        assert written.token_ids == token_ids([[4, 0]]).tobytes()
        assert written.logprobs == np.float32([[-0.5, -99999.0]]).tobytes()
    message.ParseFromString(write_samples([]))
    assert not message.HasField("prompt_logprobs")
    assert not message.HasField("topk_prompt_logprobs")


def test_samples_that_do_not_agree_are_not_written() -> None:
    """Logprobs and top tokens of other lengths, and a logprob of what nothing stands before."""
    tokens, top = token_ids([1, 2]), TopTokens(token_ids([[1]]), np.float32([[-1]]))
    with pytest.raises(ValueError, match="1 logprobs of 2 tokens"):
        write_samples([Sampled(tokens, np.float32([-1]), True)])
    with pytest.raises(ValueError, match="1 top tokens of 2 tokens"):
        write_samples([Sampled(tokens, None, True, top)])
    with pytest.raises(ValueError, match="give both"):
        write_samples([], None, TopTokens(token_ids([[1]]), np.float32([-1])))
    with pytest.raises(ValueError, match="give NaN"):
        write_samples([], np.float32([-1, -2]))
    with pytest.raises(TypeError):
        write_samples([Sampled(tokens, np.asarray([-1.0, -2.0]), True)])  # type: ignore[arg-type]
