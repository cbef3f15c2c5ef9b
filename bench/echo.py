"""The minimal work of a Python web server for a chat request: read the JSON, send it back."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from rollbook.bench.tied import end_with_parent
from rollbook.testing.asgi import listen


def build_app() -> FastAPI:
    """FastAPI with one route that echoes."""
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> Any:
        return await request.json()

    return app


def main() -> None:
    """Serve on a free port, which is printed, as the proxy is served."""
    end_with_parent()
    listener = listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}")
    sys.stdout.flush()
    config = uvicorn.Config(build_app(), log_level="warning", access_log=False, timeout_keep_alive=75)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
