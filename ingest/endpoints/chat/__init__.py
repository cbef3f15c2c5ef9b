"""OpenAI's chat completions: the form that everything else is mapped to."""

from __future__ import annotations

from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.chat.read import PATH, read
from rollbook.ingest.endpoints.chat.reply import reply
from rollbook.ingest.endpoints.chat.stream import ChatWriter
from rollbook.ingest.endpoints.chat.upstream import UPSTREAM
from rollbook.ingest.http.error_replies import openai_error

API = AgentApi(
    path=PATH,
    conversation="messages",
    read=read,
    reply=reply,
    writer=ChatWriter,
    error=openai_error,
    upstream=UPSTREAM,
)
