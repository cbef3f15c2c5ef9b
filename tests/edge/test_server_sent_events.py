"""Server-sent events are found in bytes, whatever ends their lines and however they are cut into packets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.edge.server_sent_events import Message, MessageReader, messages_of, read_messages


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_messages_are_read_from_any_chunks(size: int) -> None:
    """Bytes cut anywhere give the same messages; comments and a message cut short give none."""
    text = '["\u2028 \x85 \\n é"]'
    data = (
        f": hello\n\nid: a=1\ndata: {text}\n\nevent: head\nid: a=2\ndata: {{}}\n\nid: a=3\ndata: cut".encode()
    )
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    wanted = [Message("message", "a=1", text.encode()), Message("head", "a=2", b"{}")]
    assert list(read_messages(iter(chunks))) == wanted


DATA = st.text(alphabet="ab: \u2028\x85é", max_size=5)
EVENTS = st.tuples(st.lists(DATA, min_size=1, max_size=3), st.sampled_from([None, "head"]), st.booleans())


@given(st.lists(EVENTS, max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.integers(1, 9), st.booleans())
def test_any_line_ends_in_any_packets(
    events: list[tuple[list[str], str | None, bool]], end: str, size: int, marked: bool
) -> None:
    """Lines of data are joined by line feeds; a byte order mark and comments say nothing."""
    text, wanted = "\ufeff" if marked else "", []
    for lines, kind, named in events:
        head = [": a comment", *([f"event: {kind}"] if kind else []), *(["id: 7"] if named else [])]
        text += end.join([*head, *(f"data: {line}" for line in lines), "", ""])
        wanted.append(Message(kind or "message", "7" if named else None, "\n".join(lines).encode()))
    stream = text.encode()
    packets = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert list(read_messages(packets)) == wanted
    assert messages_of(stream) == wanted


def test_the_message_that_a_stream_ends_in() -> None:
    """A whole stream gives it, complete or not; one that is still coming does not."""
    for stream in (
        b"data:1\n\ndata:2",
        b"data:1\n\ndata:2\n",
        b"data:1\r\rdata:2\r",
        b"data: 1\r\n\r\ndata: 2\r\n",
    ):
        assert [m.data for m in messages_of(stream)] == [b"1", b"2"]
        assert [m.data for m in read_messages([stream])] == [b"1"]


def test_what_waits_is_counted() -> None:
    """The bytes of a message that has not ended, whole lines and the begun one; comments are not held."""
    reader = MessageReader()
    assert reader.feed(b"data: ab\n: comment\ndata: c") == []
    assert reader.waiting == 8 + 7
    assert reader.feed(b"d\n\n") == [Message("message", None, b"ab\ncd")]
    assert reader.waiting == 0
