"""Whether a request is a client's retry. Pure."""

from __future__ import annotations

from starlette.requests import Request


def retry_count(request: Request) -> int:
    """How many tries came before, as OpenAI's and Anthropic's SDKs report it; 0 for other clients."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 6 else 0
