"""The protobuf messages of Tinker's protocol: a pass is read, what it gave and what was sampled is written.

Nothing that was sent is believed. Before anything is parsed its fields are counted; then every array is
checked against its bytes, and sparse ones are filled up only within what all arrays of a pass may have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from rollbook.store.errors import LimitError, RequestError
from rollbook.store.events import Logprobs, TokenIds
from rollbook.train.tenants import tinker_pb2 as messages
from rollbook.train.tenants.message_bounds import Room, count_fields, nested_fields

if TYPE_CHECKING:
    from rollbook.engines.engine import TopTokens

Array = npt.NDArray[Any]

MOST_DIMENSIONS = 8
NO_LOGPROB = -99999.0
"""What clients take for the logprob of a place of a top-k that is empty; its token is 0."""
_SENT = {
    messages.DTYPE_FLOAT32: "<f4",
    messages.DTYPE_INT64: "<i8",
    messages.DTYPE_INT32: "<i4",
    messages.DTYPE_BFLOAT16: "<u2",
}
_WRITTEN = {np.dtype("<f4"): messages.DTYPE_FLOAT32, np.dtype("<i8"): messages.DTYPE_INT64}
_FIELDS = nested_fields(messages.ForwardBackwardRequest.DESCRIPTOR)
_REASONS = {True: messages.STOP_REASON_STOP, False: messages.STOP_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pass may have at most.

    Attributes:
        tokens: of one datum.
        numbers: in all arrays of the pass, with those that sparse arrays leave out.
        fields: of the message, counted down to each array's.
    """

    datums: int = 1024
    tokens: int = 1 << 17
    numbers: int = 1 << 26
    fields: int = 1 << 19


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that were sampled as a part of a sequence, or that stand in the prompt behind which it was."""

    sequence_id: str
    offset: int
    length: int
    sampled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One sequence to train on, and what its loss takes. Arrays are dense, float32 or int64, and read-only.

    Attributes:
        inputs: in order of their names.
        spans: where the tokens come from, in order, all of them; empty: it was not said.
        input_spans: the same of the rows of `target_tokens`.
    """

    tokens: TokenIds
    inputs: Mapping[str, Array]
    spans: tuple[Span, ...]
    input_spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A forward pass over data by a loss, with its backward pass unless it is `forward_only`."""

    model_id: str
    seq: int
    data: tuple[Datum, ...]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One sampled sequence.

    Attributes:
        stopped: whether it ended by itself, and not since it had as many tokens as it may have.
    """

    tokens: TokenIds
    logprobs: Logprobs | None
    stopped: bool
    top: TopTokens | None = None


def _refuse(text: str) -> NoReturn:
    raise RequestError(400, "bad_pass", text)


def _refuse_size(text: str) -> NoReturn:
    raise LimitError(400, "pass_too_large", text)


# A pass ---------------------------------------------------------------------------------------


def read_pass(body: bytes, limits: Limits) -> Pass:
    """The pass that a `ForwardBackwardRequest` asks for.

    Raises:
        RequestError: 400, it is no such message, or has an array that is none, a number that is not finite, a
            token below 0, or anything that is not supported.
        LimitError: 400, it has more than the limits allow.
    """
    return pass_of(parsed(body, limits), limits)


def pass_of(message: Any, limits: Limits) -> Pass:
    """The pass that a parsed message asks for.

    Raises:
        RequestError, LimitError: as `read_pass`.
    """
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        _refuse("the body has fields that are not known here: send what tinker 0.38.0 sends")
    if not message.loss_fn:
        _refuse("loss_fn is empty: name one")
    numbers = Room(limits.numbers, f"than {limits.numbers} numbers in its arrays, with a sparse one's zeros")
    data = tuple(_read_datum(datum, f"datum {i}", numbers, limits) for i, datum in enumerate(message.data))
    config = _read_config(message)
    return Pass(message.model_id, message.seq_id, data, message.loss_fn, config, message.forward_only)


def parsed(body: bytes, limits: Limits) -> Any:
    """A `ForwardBackwardRequest` that says to which model it is sent, and as which of its operations.

    Raises:
        RequestError, LimitError: 400, as `read_pass`, of what is none, or does not say it.
    """
    message = messages.ForwardBackwardRequest()
    try:
        _count(body, limits)
        message.ParseFromString(body)
    except DecodeError:
        _refuse("the body is no ForwardBackwardRequest: send one, as tinker 0.38.0 does")
    if not message.model_id:
        _refuse("model_id is empty: name one")
    if message.seq_id < 1:
        _refuse(f"seq_id is {message.seq_id}: count from 1 on")
    return message


def _count(body: bytes, limits: Limits) -> None:
    """Refuse a pass of more fields or datums than there may be, before they are objects."""
    fields = Room(limits.fields, f"than {limits.fields} fields")
    datums = Room(limits.datums, f"than {limits.datums} datums")
    for number in count_fields(body, _FIELDS, fields):
        if number == messages.ForwardBackwardRequest.DATA_FIELD_NUMBER:
            datums.take(1)


def _read_config(message: Any) -> dict[str, float | str]:
    """What the loss is told, by name; version 2 of a key comes before the number that older servers read."""
    given: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            _refuse(f"loss_fn_config {_short(name)} is empty: give it a number or a text, or leave it out")
        given[name] = getattr(value, kind)
    for name, number in given.items():
        if isinstance(number, float) and not math.isfinite(number):
            _refuse(f"loss_fn_config {_short(name)} is {number}: give it a finite number")
    return dict(sorted(given.items()))


def _read_datum(message: Any, where: str, numbers: Room, limits: Limits) -> Datum:
    tokens = _read_tokens(message.model_input, where, limits)
    inputs = {
        name: _read_array(array, f"{where}: {_short(name)}", numbers)
        for name, array in sorted(message.loss_fn_inputs.items(), key=itemgetter(0))
    }
    spans = _read_spans(message.model_input_spans, f"{where}: model_input_spans", len(tokens))
    targets = inputs.get("target_tokens")
    rows = len(targets) if targets is not None and targets.ndim == 1 else None
    input_spans = _read_spans(message.loss_fn_input_spans, f"{where}: loss_fn_input_spans", rows)
    return Datum(tokens, inputs, spans, input_spans)


def _read_tokens(chunks: Sequence[Any], where: str, limits: Limits) -> TokenIds:
    parts: list[TokenIds] = []
    size = 0
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            _refuse(f"{where} has a chunk of kind {kind}, which is not supported: send encoded_text")
        parts.append(_numbers(chunk.encoded_text.tokens, "<i4", f"{where}: tokens"))
        size += len(parts[-1])
    if size > limits.tokens:
        _refuse_size(f"{where} has {size} tokens: send at most {limits.tokens}")
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if size and tokens.min() < 0:
        _refuse(f"{where} has the token {tokens.min()}: ids are 0 or more")
    tokens.setflags(write=False)
    return tokens


def _read_spans(spans: Sequence[Any], where: str, rows: int | None) -> tuple[Span, ...]:
    """Spans that together are as long as what they are of, where that is known."""
    read = []
    for message in spans:
        kind = message.WhichOneof("span")
        if kind is None:
            _refuse(f"{where} has a span of no kind: give prompt_tokens or sampled_tokens")
        part = getattr(message, kind)
        if not part.sequence_id or part.offset < 0 or part.length < 0:
            text = f"{_short(part.sequence_id)} from {part.offset}, {part.length} long"
            _refuse(f"{where} has the span {text}: name a sequence, and give numbers from 0 on")
        read.append(Span(part.sequence_id, part.offset, part.length, kind == "sampled_tokens"))
    total = sum(span.length for span in read)
    if read and rows is not None and total != rows:
        _refuse(f"{where} are {total} long together, and what they are of {rows}: let them cover all of it")
    return tuple(read)


# Arrays ---------------------------------------------------------------------------------------


def _read_array(message: Any, where: str, numbers: Room) -> Array:
    """An array as float32 or int64, checked, dense."""
    dtype = _SENT.get(message.dtype)
    if dtype is None:
        _refuse(f"{where} is of dtype {message.dtype}, which is not known: send float32 or int64")
    kind, shape = message.WhichOneof("encoding"), tuple(message.shape)
    if kind is None:
        _refuse(f"{where} has no numbers: send them dense, or as sparse_csr")
    if any(size < 0 for size in shape) or len(shape) > MOST_DIMENSIONS:
        _refuse(f"{where} has the shape {list(shape[:20])}: give up to {MOST_DIMENSIONS} sizes from 0 on")
    numbers.take(max(math.prod(shape), *shape) if shape else 0)
    if kind == "dense":
        values = _numbers(message.dense, dtype, where)
        if not shape:
            numbers.take(len(values))
        elif math.prod(shape) != len(values):
            _refuse(f"{where} has {len(values)} numbers and the shape {list(shape)}: let them agree")
        array = _widened(values, where).reshape(shape or -1)
    else:
        array = _read_csr(message.sparse_csr, dtype, shape, where)
    array.setflags(write=False)
    return array


def _read_csr(message: Any, dtype: str, shape: tuple[int, ...], where: str) -> Array:
    """A matrix of which the numbers were sent that are not 0, row by row."""
    if len(shape) != 2:
        _refuse(f"{where} is sparse and has the shape {list(shape)}: give rows and columns")
    rows, columns = shape
    values = _widened(_numbers(message.values, dtype, where), where)
    crow = _numbers(message.crow_indices, "<i8", f"{where}: crow_indices")
    column = _numbers(message.col_indices, "<i8", f"{where}: col_indices")
    if len(column) != len(values):
        _refuse(f"{where} has {len(values)} numbers and {len(column)} col_indices: let them agree")
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(values) or (crow[1:] < crow[:-1]).any():
        text = f"crow_indices that do not lead from 0 to {len(values)} in {rows} rows"
        _refuse(f"{where} has {text}: give {rows + 1}, none below the one before it")
    if len(column) and (column.min() < 0 or column.max() >= columns):
        _refuse(f"{where} has a col_index outside of {columns} columns: give indices from 0 on, below that")
    row = np.repeat(np.arange(rows), np.diff(crow))
    if ((row[1:] == row[:-1]) & (column[1:] <= column[:-1])).any():
        _refuse(f"{where} has col_indices that do not rise within a row: sort them, each once")
    dense = np.zeros(shape, values.dtype)
    dense[row, column] = values
    return dense


def _numbers(data: bytes, dtype: str, where: str) -> Array:
    """Little-endian numbers; the array is a view of the bytes."""
    if len(data) % np.dtype(dtype).itemsize:
        _refuse(
            f"{where}: {len(data)} bytes are no whole numbers of {np.dtype(dtype).itemsize} bytes: send all"
        )
    return np.frombuffer(data, dtype)


def _widened(values: Array, where: str) -> Array:
    """Numbers as float32 or int64, finite."""
    if values.dtype == "<u2":  # bfloat16: the upper half of a float32
        values = (values.astype("<u4") << 16).view("<f4")
    if values.dtype.kind == "i":
        return values.astype("<i8", copy=False)
    if not np.isfinite(values).all():
        _refuse(f"{where} has {values[~np.isfinite(values)][0]}: send finite numbers")
    return values


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


# What is answered -----------------------------------------------------------------------------


def write_outputs(outputs: Sequence[Mapping[str, Array]], metrics: Mapping[str, float]) -> bytes:
    """A `ForwardBackwardOutput`: arrays of every datum, in order; equal ones make equal bytes.

    A record holds datums whose arrays differ in their length alone; where more differs, the next begins.

    Args:
        outputs: of each datum, by name; float32 or int64, of one dimension or more.

    Raises:
        ValueError: datums have arrays of different names, which clients would take for each other's; or an
            array has no such form.
    """
    if len({frozenset(arrays) for arrays in outputs}) > 1:
        raise ValueError("datums have arrays of different names: give all of them the same")
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for form, run in itertools.groupby(outputs, _form):
        datums = [*run]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(datums))
        for name, dtype, trailing in form:
            field, parts = record.fields[name], [datum[name].tobytes() for datum in datums]
            field.data, field.dtype = b"".join(parts), dtype
            field.offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
            field.trailing_shape.extend(trailing)
    return bytes(message.SerializeToString(deterministic=True))


def _form(arrays: Mapping[str, Array]) -> list[tuple[str, int, tuple[int, ...]]]:
    """(name, dtype, trailing shape) of each array."""
    for name, array in arrays.items():
        if array.dtype not in _WRITTEN or not array.ndim:
            text = f"{name} is {array.dtype}{list(array.shape)}"
            raise ValueError(f"{text}: give float32 or int64, of one dimension or more")
    return sorted((name, _WRITTEN[array.dtype], array.shape[1:]) for name, array in arrays.items())


def write_samples(
    samples: Sequence[Sampled],
    prompt_logprobs: Logprobs | None = None,
    prompt_top: TopTokens | None = None,
) -> bytes:
    """A `SampleResponse`: what was sampled behind one prompt.

    Args:
        prompt_logprobs: of the prompt's tokens; the first is NaN, as nothing stands before it.
        prompt_top: at each position of the prompt.

    Raises:
        ValueError: lengths do not agree, or the prompt's first token has a logprob.
    """
    message = messages.SampleResponse()
    for sample in samples:
        sequence = message.sequences.add(
            stop_reason=_REASONS[sample.stopped], tokens=_bytes(sample.tokens, "<i4")
        )
        if sample.logprobs is not None:
            _agree(len(sample.logprobs), len(sample.tokens), "logprobs")
            sequence.logprobs = _bytes(sample.logprobs, "<f4")
        if sample.top is not None:
            _agree(len(sample.top.ids), len(sample.tokens), "top tokens")
            _write_top(sequence.topk_sampled_logprobs, sample.top)
    if prompt_logprobs is not None:
        if not np.isnan(prompt_logprobs[:1]).all():
            raise ValueError("the prompt's first token has a logprob: nothing stands before it, give NaN")
        message.prompt_logprobs = _bytes(prompt_logprobs, "<f4")
    if prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, prompt_top)
    return bytes(message.SerializeToString(deterministic=True))


def _write_top(message: Any, top: TopTokens) -> None:
    """Places without a token have the two numbers by which clients know them."""
    if top.ids.ndim != 2 or top.ids.shape != top.logprobs.shape:
        raise ValueError(
            f"top tokens {top.ids.shape} with logprobs {top.logprobs.shape}: give both [positions, k]"
        )
    empty = np.isnan(top.logprobs)
    message.length, message.k = top.ids.shape
    message.token_ids = _bytes(np.where(empty, np.int32(0), top.ids), "<i4")
    message.logprobs = _bytes(np.where(empty, np.float32(NO_LOGPROB), top.logprobs), "<f4")


def _bytes(array: Array, dtype: str) -> bytes:
    """Numbers as they are sent, none of them changed."""
    return array.astype(dtype, casting="safe", copy=False).tobytes()


def _agree(count: int, tokens: int, what: str) -> None:
    if count != tokens:
        raise ValueError(f"{count} {what} of {tokens} tokens: give as many")
