"""Object storage that is killed and loses nothing: moto's S3 in a process, and a gate before it in another.

What moto holds is in its memory, so it is the gate that is killed: connections break in the middle of
requests, some of which have been served, as where a service's own front ends.

`python -m rollbook.bench.cluster_storage storage` prints its address; `gate ADDRESS PORT STORAGE` passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from rollbook.bench.tied import end_with_parent

BUCKET = "rollouts"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_AT_ONCE = 1 << 18


def moto_app() -> Any:
    """moto's services as a WSGI application, which looks once for the one that a host name means.

    moto looks through all of them at each request, in folders and by patterns: much of what a request costs.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    class Dispatcher(DomainDispatcherApplication):
        get_backend_for_host = lru_cache(maxsize=64)(DomainDispatcherApplication.get_backend_for_host)

    return Dispatcher(create_backend_app)


def _storage(address: str) -> None:
    """Serve moto's S3 with one bucket, until the process ends."""
    import boto3  # type: ignore[import-untyped]
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Server(WSGIRequestHandler):
        def log(self, *_: Any) -> None:
            """Nothing."""

    setattr(Server, "protocol_version", "HTTP/1.1")  # noqa: B010, connections stay open, as a service's do
    server = make_server(address, 0, moto_app(), threaded=True, request_handler=Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://{address}:{server.port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=BUCKET)
    print(url, flush=True)
    threading.Event().wait()


async def _gate(address: str, port: int, storage: str) -> None:
    parts = urlsplit(storage)

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_AT_ONCE):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(passed(reader, onward[1]), passed(onward[0], writer))

    server = await asyncio.start_server(connected, address, port)
    print(f"http://{address}:{port}", flush=True)
    await server.serve_forever()


def main() -> None:
    """Be one of the two."""
    end_with_parent()
    logging.disable(logging.WARNING)
    if sys.argv[1] == "storage":
        _storage(sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1")
    else:
        asyncio.run(_gate(sys.argv[2], int(sys.argv[3]), sys.argv[4]))


if __name__ == "__main__":
    main()
