"""OpenAI's completions: a raw prompt, as text or as token ids."""

from __future__ import annotations

from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.completions.read import PATH, read
from rollbook.ingest.endpoints.completions.reply import reply
from rollbook.ingest.endpoints.completions.stream import CompletionsWriter
from rollbook.ingest.endpoints.completions.upstream import UPSTREAM
from rollbook.ingest.http.error_replies import openai_error

API = AgentApi(
    path=PATH,
    conversation="prompt",
    read=read,
    reply=reply,
    writer=CompletionsWriter,
    error=openai_error,
    upstream=UPSTREAM,
)
