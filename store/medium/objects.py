"""Sequences in object storage, by conditional writes: `PUT` with `If-None-Match: *`.

An entry is the object `<address>/log/<sequence>/<number, 12 digits>`. Through obstore, the Python face of the
Rust crate object_store: one interface for S3 and what is like it, Google's, Azure's, and a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from rollbook.store.errors import ConfigError, MediumError
from rollbook.store.medium.loop_thread import LoopThread
from rollbook.store.medium.medium import LANES, Wanted

PAGE = 1000
"""Entries that are listed, or removed, by one request."""
READ_AT_ONCE = 32
"""Entries that are fetched at the same time: each takes a round trip."""
FIRST_PACE_S, LONGEST_PACE_S = 0.1, 0.25
PATIENCE_S = 4.0
"""So long the client repeats a request that fails; who puts decides what to do then."""


class ObjectMedium:
    """Sequences below an address such as s3://bucket/prefix/STORE-ID; see `Medium`.

    Args:
        endpoint: URL of an S3-compatible service that is not AWS.

    Raises:
        ConfigError: the address cannot be used.
    """

    most_bytes = 8 << 20
    pace_s = (FIRST_PACE_S, LONGEST_PACE_S)

    def __init__(self, address: str, endpoint: str | None = None) -> None:
        self.address = address.rstrip("/")
        self._store: Any = opened_objects(self.address, endpoint)
        self._ordered = not self.address.startswith("file:")
        self._loop = LoopThread("objects")

    def put(self, sequence: str, number: int, data: bytes) -> bool:
        """See `Medium`."""
        path = _path(sequence, number)
        with self._explained(path):
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # Also where an answer was lost, and the client asked again: then these are our own bytes.
                return bytes(obstore.get(self._store, path).bytes()) == data
        return True

    def read(self, sequence: str, start: int, most: int = 1) -> list[bytes]:
        """See `Medium`."""
        return self.read_each([(sequence, start, most)])[0]

    def read_each(self, wanted: Sequence[Wanted], *, newest: bool = False) -> list[list[bytes]]:
        """See `Medium`: every read is of the newest."""
        with self._explained(wanted[0][0] if wanted else ""):
            return self._loop.run(self._read_each(wanted), PATIENCE_S * 4)

    async def _read_each(self, wanted: Sequence[Wanted]) -> list[list[bytes]]:
        at_once = asyncio.Semaphore(READ_AT_ONCE)

        async def get(sequence: str, number: int) -> bytes | None:
            async with at_once:
                try:
                    found = await obstore.get_async(self._store, _path(sequence, number))
                    return bytes(await found.bytes_async())
                except FileNotFoundError:
                    return None

        async def read(sequence: str, start: int, most: int) -> list[bytes]:
            entries = await asyncio.gather(*(get(sequence, start + i) for i in range(most)))
            there = takewhile(lambda entry: entry is not None, entries)
            return [entry for entry in there if entry is not None]

        return list(await asyncio.gather(*(read(*one) for one in wanted)))

    def last(self, sequence: str) -> int | None:
        """See `Medium`. It asks as often as the number has binary digits, not once a page of all."""
        page = self._page(sequence)
        if len(page) < PAGE or not self._ordered:
            return page[-1] if page else None
        low, high, step = page[-1], -1, PAGE  # behind `high` is nothing, once it is known
        while len(page) >= PAGE and low != high:
            after = low + step if high < 0 else (low + high) // 2
            if found := self._page(sequence, after):
                low, page, step = found[-1], found, 2 * step
            else:
                high = after
        return low

    def first(self, sequence: str) -> int | None:
        """See `Medium`."""
        return next(iter(self._page(sequence)), None)

    def _page(self, sequence: str, after: int | None = None) -> list[int]:
        """The numbers that follow one, at most `PAGE`; of a folder, which lists in no order, all."""
        pages = self._pages(sequence, after)
        return sorted(next(pages, []) if self._ordered else itertools.chain.from_iterable(pages))

    def _pages(self, sequence: str, after: int | None = None) -> Iterator[list[int]]:
        prefix = f"log/{sequence}/"
        offset = None if after is None else _path(sequence, after)
        with self._explained(prefix):
            for page in obstore.list(self._store, prefix, offset=offset, chunk_size=PAGE):
                names = [found["path"].rpartition("/")[2] for found in page]
                yield [int(name) for name in names if name.isdecimal()]  # others are a folder's own

    def sequences(self, kind: str) -> list[str]:
        """See `Medium`."""
        with self._explained(kind):
            return sorted(self._loop.run(self._sequences(kind), PATIENCE_S * 4))

    async def _sequences(self, kind: str) -> list[str]:
        names = await self._below(kind)
        if kind != LANES:
            return names
        at_once = asyncio.Semaphore(READ_AT_ONCE)  # a listing for each host

        async def of(host: str) -> list[str]:
            async with at_once:
                return await self._below(host)

        return list(itertools.chain.from_iterable(await asyncio.gather(*map(of, names))))

    async def _below(self, prefix: str) -> list[str]:
        listed = await obstore.list_with_delimiter_async(self._store, f"log/{prefix}/")
        return [folder.rstrip("/").removeprefix("log/") for folder in listed["common_prefixes"]]

    def forget(self, sequence: str, before: int) -> None:
        """See `Medium`."""
        last = self.last(sequence)
        before = before if last is None else min(before, last)
        while old := [number for number in self._page(sequence) if number < before]:
            with self._explained(sequence), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, [_path(sequence, number) for number in old])

    def listen(self, heard: Callable[[str], None]) -> None:
        """See `Medium`: object storage tells nobody."""

    def close(self) -> None:
        """See `Medium`."""
        self._loop.close()

    def _explained(self, path: str) -> contextlib.AbstractContextManager[None]:
        return explained(f"{self.address}/{path}")


@contextlib.contextmanager
def explained(address: str) -> Iterator[None]:
    """Names the address in the error of a failed operation of obstore.

    Raises:
        MediumError: instead of obstore's, or of an OSError.
    """
    try:
        yield
    except (BaseError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise MediumError(
            f"{address}: {first}: see that the service answers, and that its credentials and region are "
            "right (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION)"
        ) from error


def _path(sequence: str, number: int) -> str:
    return f"log/{sequence}/{number:012d}"


def opened_objects(address: str, endpoint: str | None) -> Any:
    """obstore's store of an address such as s3://bucket/prefix.

    Args:
        endpoint: URL of an S3-compatible service that is not AWS.

    Raises:
        ConfigError: a profile is named, and what reads profiles is not installed.
    """
    parts = urlsplit(address)
    if parts.scheme == "file":
        return from_url(address, mkdir=True)
    retries = {"max_retries": 3, "retry_timeout": timedelta(seconds=PATIENCE_S)}
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=PATIENCE_S),
        "connect_timeout": timedelta(seconds=2),
    }
    options: dict[str, Any] = {"retry_config": retries, "client_options": client}
    if parts.scheme == "s3":
        if endpoint is not None:
            options["endpoint"] = endpoint
        options |= _credentials()
    if (endpoint or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"):
        client["allow_http"] = True
    return from_url(address, **options)


def _credentials() -> dict[str, Any]:
    """The credentials of a profile, which object_store does not read by itself."""
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_PROFILE" not in os.environ:
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ConfigError("AWS_PROFILE is set: to read profiles, `pip install boto3`") from error
    return {"credential_provider": Boto3CredentialProvider()}
