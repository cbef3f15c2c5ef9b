"""Bodies that come encoded: the same as plain ones, and never more than a body may be."""

from __future__ import annotations

import gzip
import resource
import time
import zlib
from collections.abc import Callable
from functools import partial

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clients.bombs import bomb
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess

from rollbook.edge.bodies import decoded
from rollbook.store.errors import LimitError, RequestError

MIB = 1 << 20


def _raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


zipped = partial(gzip.compress, mtime=0)
"""The same bytes at any time: every process of a suite must name a test alike."""


ENCODERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "Deflate ": _raw_deflate,
    "identity": lambda data: data,
    "": lambda data: data,
    "gzip, identity": gzip.compress,
    "deflate, gzip": lambda data: gzip.compress(zlib.compress(data)),
}


@pytest.mark.parametrize("encoding", ENCODERS)
@settings(max_examples=25)
@given(data=st.binary(max_size=2000))
def test_what_was_encoded_comes_back(encoding: str, data: bytes) -> None:
    """Every coding, once or twice; up to the limit to the byte, and not beyond."""
    sent = ENCODERS[encoding](data)
    limit = max(len(data), 100)  # what is between two codings counts too
    assert decoded(sent, encoding, limit) == data
    if data and sent != data:
        with pytest.raises(LimitError) as caught:
            decoded(sent, encoding, len(data) - 1)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


def test_several_gzip_files_are_one_body() -> None:
    """As gzip says; but a body of thousands of empty ones is refused before it costs anything."""
    parts = [b"a" * 1000, b"", b"b" * 10]
    assert decoded(b"".join(map(gzip.compress, parts)), "gzip", MIB) == b"".join(parts)
    begun = time.process_time()
    with pytest.raises(LimitError, match="more than 64 gzip files"):
        decoded(gzip.compress(b"") * 200_000, "gzip", MIB)
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    ("data", "encoding", "status", "code"),
    [
        (b"x", "br", 415, "unsupported_encoding"),
        (b"x", "gzip, zstd", 415, "unsupported_encoding"),
        (zipped(zipped(zipped(b"x"))), "gzip, gzip, gzip", 413, "encoded_too_often"),
        (b"no gzip", "gzip", 400, "bad_encoding"),
        (zipped(b"x" * 9999)[:-9], "gzip", 400, "bad_encoding"),
        (b"", "gzip", 400, "bad_encoding"),
        (zipped(b"x") + b"rest", "gzip", 400, "bad_encoding"),
    ],
)
def test_what_cannot_be_decoded(data: bytes, encoding: str, status: int, code: str) -> None:
    """It says what is wrong and what to send."""
    with pytest.raises(RequestError) as caught:
        decoded(data, encoding, MIB)
    assert (caught.value.status, caught.value.code) == (status, code)


def test_a_reply_is_read_as_far_as_it_came() -> None:
    """An upstream's connection may break in the middle."""
    data = bytes(range(256)) * 100
    assert data.startswith(decoded(gzip.compress(data)[:-50], "gzip", MIB, whole=False))


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy for bodies of a megabyte."""
    return played(max_body_mb=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_endpoint_reads_encoded_requests(proxy: InProcess, kind: str) -> None:
    """As if they had come plain; what else they are encoded with is refused by name."""
    body = orjson.dumps(asked(kind, "packed"))
    path = f"/t/packed-{kind}{PATHS[kind]}"
    reply = proxy.ask(path, gzip.compress(body), headers={"content-encoding": "gzip"})
    assert reply.status == 200
    [turn] = proxy.trajectories()[f"packed-{kind}"].turns.values()
    assert turn.completed is not None
    refused = proxy.ask(path, body, headers={"content-encoding": "br"})
    assert (refused.status, refused.json["error"]["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/trajectories", "/v1/messages/count_tokens"])
def test_a_bomb_is_a_413(proxy: InProcess, path: str) -> None:
    """A few kilobytes that stand for 300 MB are refused in no time and in no memory, wherever they come."""
    sent = bomb(300 * MIB)
    assert len(sent) < 5000
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    reply = proxy.ask(path, sent, headers={"content-encoding": "gzip, gzip"})
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")
    assert time.monotonic() - begun < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # in KiB
