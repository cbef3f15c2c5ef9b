"""How a request becomes a prompt, how its completions will be read, and whether it is a retry. Pure."""

from __future__ import annotations

from starlette.requests import Request

from rollbook.ingest.replies.choose import opens_reasoning
from rollbook.ingest.replies.family import Family
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.tree import Plan, TurnTree, context_key, plan_prompt, plan_turn
from rollbook.ingest.turns.model_call import ModelCall, check_ids
from rollbook.ingest.turns.reply import ReplyReader

RAW = "raw prompts"

PromptPlan = tuple[Plan, str]
"""The plan of a request's prompt, and its context key."""


def plan_call(bridges: Bridges, tree: TurnTree, call: ModelCall) -> PromptPlan:
    """The prompt of a request that goes on from the turns of a tree, or begins anew.

    Raises:
        RequestError: 400, the chat template refuses the messages, or the model has no such ids.
    """
    tokenizer = bridges.tokenizer
    check_ids(call, tokenizer.vocabulary)
    key = key_of(tokenizer, call)
    if call.prompt is not None:
        return plan_prompt(tree, tokenizer, call.prompt, key), key
    return plan_turn(tree, bridges, call.messages, call.tools, key, call.template_kwargs), key


def key_of(tokenizer: ChatTokenizer, call: ModelCall) -> str:
    """The context key of a request: equal for requests whose prompts are shaped alike."""
    if call.prompt is not None:
        return context_key([], RAW, tokenizer.tokenizer_digest, {})
    digests = (tokenizer.template_digest, tokenizer.tokenizer_digest)
    return context_key(call.tools, *digests, call.template_kwargs)


def reader_of(bridges: Bridges, family: Family, call: ModelCall, plan: Plan) -> ReplyReader:
    """The reader for the completions of a planned request."""
    tokenizer = bridges.tokenizer
    raw = call.prompt is not None
    tools = call.tools if call.tool_calls_wanted else None
    return ReplyReader(tokenizer, family, tools, opens_reasoning(plan.ending), call.stops, raw)


def retry_count(request: Request) -> int:
    """How many tries came before, as OpenAI's and Anthropic's SDKs report it; 0 for other clients."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 6 else 0
