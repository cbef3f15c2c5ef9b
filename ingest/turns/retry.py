"""How a client says that it repeats a request. Pure."""

from __future__ import annotations

from starlette.requests import Request


def retry_count(request: Request) -> int:
    """How often the client says it has tried before: OpenAI's and Anthropic's SDKs do, others never."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 6 else 0
