"""Anthropic's messages: blocks in and out."""

from __future__ import annotations

from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.messages.read import PATH, read, read_for_count
from rollbook.ingest.endpoints.messages.reply import error, reply
from rollbook.ingest.endpoints.messages.stream import MessagesWriter
from rollbook.ingest.endpoints.messages.upstream import UPSTREAM

API = AgentApi(
    path=PATH,
    conversation="messages",
    read=read,
    reply=reply,
    writer=MessagesWriter,
    error=error,
    upstream=UPSTREAM,
    count=read_for_count,
)
