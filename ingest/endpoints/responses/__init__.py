"""OpenAI's Responses: items in and out, and requests that name earlier responses."""

from __future__ import annotations

from rollbook.ingest.endpoints.api import AgentApi, ResponseIds
from rollbook.ingest.endpoints.responses.read import PATH, read
from rollbook.ingest.endpoints.responses.references import named_ids
from rollbook.ingest.endpoints.responses.reply import reply, turn_of
from rollbook.ingest.endpoints.responses.stream import ResponsesWriter
from rollbook.ingest.endpoints.responses.upstream import UPSTREAM, ids_of, named_in_path
from rollbook.ingest.http.error_replies import openai_error

API = AgentApi(
    path=PATH,
    conversation="input",
    read=read,
    reply=reply,
    writer=ResponsesWriter,
    error=openai_error,
    upstream=UPSTREAM,
    ids=ResponseIds(in_body=named_ids, in_path=named_in_path, of_reply=ids_of, turn_of=turn_of),
)
