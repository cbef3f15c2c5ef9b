"""Breaks off a stream when some text of the answer has come. Word: chat, responses or messages."""

import sys

from anthropic import Anthropic
from conversation import ASKED, MODEL, report
from openai import OpenAI

ENOUGH = 3
"""Pieces of text."""


def chat() -> str:
    """What had come of a chat completion."""
    messages = [{"role": "user", "content": ASKED}]
    text = ""
    with OpenAI().chat.completions.create(model=MODEL, messages=messages, stream=True) as chunks:
        for count, chunk in enumerate(c for c in chunks if c.choices[0].delta.content):
            text += chunk.choices[0].delta.content
            if count == ENOUGH:
                break
    return text


def responses() -> str:
    """What had come of a response."""
    text = ""
    with OpenAI().responses.create(model=MODEL, input=ASKED, stream=True) as events:
        for count, event in enumerate(e for e in events if e.type == "response.output_text.delta"):
            text += event.delta
            if count == ENOUGH:
                break
    return text


def messages() -> str:
    """What had come of a message."""
    conversation = [{"role": "user", "content": ASKED}]
    text = ""
    with Anthropic().messages.stream(model=MODEL, max_tokens=512, messages=conversation) as events:
        for count, piece in enumerate(events.text_stream):
            text += piece
            if count == ENOUGH:
                break
    return text


report({"chat": chat, "responses": responses, "messages": messages}[sys.argv[1]](), [])
