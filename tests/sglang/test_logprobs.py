"""What the logprobs of a real server are logprobs of: transformers says the same numbers, and no others."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.sglang.conftest import PROMPT, TOLERANCE, Client, Reference, greatest_difference
from tests.sglang.server import SglangServer

from rollbook.engines.engine import Sampling

PLAIN = Sampling(40, 1.0, 7)
CASES = {
    "temperature 1": (PLAIN, 1.0),
    "temperature 0.7": (replace(PLAIN, temperature=0.7), 0.7),
    "top-p": (replace(PLAIN, temperature=0.7, top_p=0.9), 0.7),
    "top-k and min-p": (replace(PLAIN, temperature=1.3, top_k=5, min_p=0.1), 1.3),
    "greedy": (replace(PLAIN, temperature=0.0), 1.0),
    "top-k 1": (replace(PLAIN, temperature=0.7, top_k=1), 1.0),
}
"""Name -> (what is asked for, the temperature whose softmax the logprobs are of)."""


@pytest.mark.parametrize("name", CASES)
def test_logprobs_are_those_of_transformers(
    server: SglangServer, client: Callable[..., Client], reference: Reference, name: str
) -> None:
    """Of softmax(logits / temperature), before top-p, top-k and min-p; if greedy, of softmax(logits)."""
    sampling, temperature = CASES[name]
    generation = client(server).generate(sampling)
    ids = generation.completion_ids.tolist()
    assert (
        greatest_difference(generation, reference.logprobs(server.model, PROMPT, ids, temperature))
        <= TOLERANCE
    )
    other = 1.0 if temperature != 1.0 else 0.7
    assert greatest_difference(generation, reference.logprobs(server.model, PROMPT, ids, other)) > 0.1
    assert (generation.logprob_semantics["temperature"] or 1.0) == temperature
    assert "altered" not in generation.logprob_semantics


def test_greedy_requests_choose_the_likeliest(dense: SglangServer, client: Callable[..., Client]) -> None:
    """By temperature 0 or top-k 1: the same ids."""
    first, other = (client(dense).generate(CASES[name][0]) for name in ("greedy", "top-k 1"))
    assert first.completion_ids.tolist() == other.completion_ids.tolist()


@pytest.mark.parametrize("name", ["greedy", "top-k 1", "temperature 0.7"])
@pytest.mark.parametrize("beside", [0.0, 0.5])
def test_other_requests_of_a_batch_change_nothing(
    dense: SglangServer, client: Callable[..., Client], reference: Reference, name: str, beside: float
) -> None:
    """Greedy or not, beside a greedy or a sampled request, that run in the same steps."""
    sampling, temperature = CASES[name]
    company, mine = client(dense), client(dense)
    results: list[Any] = []

    def ask() -> None:
        results.append(mine.generate(sampling))

    _, heard = company.meanwhile(Sampling(300, beside, 1), ask, after=10)
    assert len(heard) == 300
    [generation] = results
    wanted = reference.logprobs(dense.model, PROMPT, generation.completion_ids.tolist(), temperature)
    assert greatest_difference(generation, wanted) <= TOLERANCE


def test_what_a_server_does_with_top_k_1_itself(dense: SglangServer, reference: Reference) -> None:
    """Alone it does not scale by the temperature, in company it does: so the client asks for 0."""

    def ask(n: int, **params: Any) -> Any:
        params |= {"max_new_tokens": n, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
        return dense.post("/generate", body)

    def distance(answer: Any, temperature: float) -> float:
        entries = answer["meta_info"]["output_token_logprobs"]
        wanted = reference.logprobs(dense.model, PROMPT, answer["output_ids"], temperature)
        return max(abs(logprob - entry[0]) for logprob, entry in zip(wanted, entries, strict=True))

    assert distance(ask(40, temperature=0.7, top_k=1), 1.0) <= TOLERANCE
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        company = pool.submit(ask, 400, temperature=0.5)
        while dense.get("/v1/loads")["loads"][0]["num_running_reqs"] < 1:
            assert not company.done()
        mixed = ask(40, temperature=0.7, top_k=1)
        assert not company.done()
    assert distance(mixed, 1.0) > 0.1
