"""Object storage for tests: moto's S3 behind a real HTTP server on loopback, which can act up on request."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import boto3
import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from rollbook.bench.cluster_storage import moto_app

KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret-9f3a"}
ENVIRONMENT = {**KEYS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
ALLOWED = "127.0.0.1,s3://rollouts,s3://no-such-bucket"
"""What the tests' stores may lead to."""


def set_credentials(patch: pytest.MonkeyPatch) -> None:
    """Let AWS's tools find credentials, and nothing of whoever runs the tests."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"):
        patch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    patch.setenv("ROLLBOOK_ALLOW", ALLOWED)


class _Quiet(WSGIRequestHandler):
    def log(self, *args: Any) -> None:
        """Nothing: requests are in `ObjectStorage.requests`."""


class ObjectStorage:
    """A server with one bucket.

    Attributes:
        requests: "METHOD path" of each request, in order.
        before, after: called with a request's number (from 1) before and after it is served.
        refused: called with a request's method; a status with which it is answered instead of being served.
        spoilt: likewise once it is served; its answer is lost then.
    """

    BUCKET = "rollouts"

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.before: Callable[[int], object] = lambda number: None
        self.after: Callable[[int], object] = lambda number: None
        self.refused: Callable[[str], str | None] = lambda method: None
        self.spoilt: Callable[[str], str | None] = lambda method: None
        self._app = moto_app()
        self._lock = threading.Lock()
        self.port = 0
        self.start()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )
        self.client.create_bucket(Bucket=self.BUCKET)
        self.clear()  # moto keeps what it stores for as long as the process lives

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        """Where a test's store may upload to."""
        return f"s3://{self.BUCKET}/some prefix"

    def start(self) -> None:
        """Answer, on the port of before."""
        self._server = make_server("127.0.0.1", self.port, self._serve, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections from now on; what is stored stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def objects(self) -> list[str]:
        """Names of all objects, but for empty ones that stand for folders."""
        return [key for key in self._keys() if not key.endswith("/")]

    def _keys(self) -> list[str]:
        objects = self.client.list_objects_v2(Bucket=self.BUCKET).get("Contents", [])
        return [item["Key"] for item in objects]

    def read(self, key: str) -> bytes:
        """What an object holds."""
        return bytes(self.client.get_object(Bucket=self.BUCKET, Key=key)["Body"].read())

    def write(self, key: str, data: bytes) -> None:
        """Replace an object."""
        self.client.put_object(Bucket=self.BUCKET, Key=key, Body=data)

    def clear(self) -> None:
        """Remove every object."""
        if keys := [{"Key": key} for key in self._keys()]:
            self.client.delete_objects(Bucket=self.BUCKET, Delete={"Objects": keys, "Quiet": True})

    def check_credentials(self, yes: bool) -> None:
        """Whether requests with unknown credentials are refused from now on (all here are unknown)."""
        url, count = f"{self.endpoint}/moto-api/reset-auth", b"0" if yes else b"inf"
        request = urllib.request.Request(
            url, data=count, method="POST", headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request).read()

    def _serve(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        with self._lock:
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            number = len(self.requests)
        self.before(number)
        if status := self.refused(environ["REQUEST_METHOD"]):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Length", "0")])
            return []
        held: list[Any] = []
        answer = list(self._app(environ, lambda *words: held.append(words)))
        self.after(number)
        if status := self.spoilt(environ["REQUEST_METHOD"]):
            start_response(status, [("Content-Length", "0")])
            return []
        start_response(*held[-1])
        return answer
