"""Loops of the pinned client, unmodified: `client_loops.py URL WHAT [JSON of options]` prints a JSON line."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import tinker
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.lib.public_interfaces.training_client import fetch_training_info

WORDS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27], [30, 31]]


def datum(words: list[int], loss: str) -> types.Datum:
    """Tokens, each of which is to be followed by the next."""
    count = len(words) - 1
    inputs = {"target_tokens": words[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = [1.0] * count
    else:
        inputs |= {"logprobs": [-2.0] * count, "advantages": [0.5 - at % 2 for at in range(count)]}
    return types.Datum(model_input=types.ModelInput.from_ints(words[:-1]), loss_fn_inputs=inputs)


def steps(training: tinker.TrainingClient, count: int, loss: str = "cross_entropy") -> list[float]:
    """The loss of each step; all are sent before the first result is asked for."""
    sent = []
    for at in range(count):
        passed = training.forward_backward([datum(words, loss) for words in WORDS], loss)
        sent.append((passed, training.optim_step(types.AdamParams(learning_rate=1e-2 / (at + 1)))))
    losses = []
    for passed, stepped in sent:
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def made(
    service: tinker.ServiceClient, base: str, rank: int = 4, seed: int = 7, **which: bool
) -> tinker.TrainingClient:
    """A model of its own; of rank 0, a whole one."""
    if not rank:
        return whole(service.holder, base)
    return service.create_lora_training_client(base_model=base, rank=rank, seed=seed, **which).result()


def whole(holder: InternalClientHolder, base: str) -> tinker.TrainingClient:
    """A model without factors: the client's request has room for it, though none of its methods sends it."""
    named = {"session_id": holder.get_session_id(), "model_seq_id": holder.get_training_client_id()}

    async def create() -> tinker.TrainingClient:
        request = types.CreateModelRequest(base_model=base, **named)
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            sent = await client.models.create(request=request)
        future = _APIFuture(
            types.CreateModelResponse,
            holder,
            sent,
            request_start_time=time.time(),
            request_type="CreateModel",
        )
        model_id = (await future.result_async()).model_id
        info = await fetch_training_info(holder, model_id)
        return tinker.TrainingClient(holder, named["model_seq_id"], model_id, info=info)

    return holder.run_coroutine_threadsafe(create()).result()


def train(
    service: tinker.ServiceClient, base: str, count: int = 4, loss: str = "cross_entropy", **lora: object
) -> object:
    """A model's losses, and what a forward pass gives afterwards."""
    training = made(service, base, **lora)
    losses = steps(training, count, loss)
    outputs = training.forward([datum(words, loss) for words in WORDS], loss).result().loss_fn_outputs
    return {"losses": losses, "logprobs": [output["logprobs"].tolist() for output in outputs]}


def resume(service: tinker.ServiceClient, base: str, **lora: object) -> object:
    """Losses without an end in between, after a load with the optimizer, and after one without."""
    training = made(service, base, **lora)
    steps(training, 2)
    path = training.save_state("half").result().path
    whole = steps(training, 2)
    warm = service.create_training_client_from_state_with_optimizer(path).result()
    cold = service.create_training_client_from_state(path).result()
    into = made(service, base, **{"seed": 8} | lora)
    steps(into, 1)
    into.load_state_with_optimizer(path).result()
    came = {"warm": steps(warm, 2), "cold": steps(cold, 2), "into": steps(into, 2)}
    return {"path": path, "whole": whole} | came


PROMPT = [5, 6, 7, 8]


def sampled(sampler: tinker.SamplingClient, count: int = 2, **params: object) -> list[dict[str, object]]:
    """Sequences behind the prompt."""
    params = {"max_tokens": 8, "seed": 3} | params
    prompt = types.ModelInput.from_ints(PROMPT)
    came = sampler.sample(prompt, count, types.SamplingParams(**params)).result()
    return [
        {"tokens": [*s.tokens], "logprobs": [*s.logprobs], "reason": s.stop_reason, "id": s.sequence_id}
        for s in came.sequences
    ]


def tokens(sampler: tinker.SamplingClient, **params: object) -> list[list[int]]:
    """Their tokens alone."""
    return [sequence["tokens"] for sequence in sampled(sampler, **params)]


def forwarded(training: tinker.TrainingClient, words: list[int]) -> list[float]:
    """The trainer's own logprobs of tokens from the second on."""
    outputs = training.forward([datum(words, "cross_entropy")], "cross_entropy").result().loss_fn_outputs
    return outputs[0]["logprobs"].tolist()


def sample(service: tinker.ServiceClient, base: str, **lora: object) -> object:
    """What a model gives before, in and after its training, and what it says of tokens."""
    training = made(service, base, **lora)
    plain = service.create_sampling_client(base_model=base)
    fresh = training.save_weights_and_get_sampling_client()
    steps(training, 3)
    named = service.create_sampling_client(
        model_path=training.save_weights_for_sampler("third").result().path
    )
    [first] = sampled(named, 1, temperature=0.9)
    came = {
        "base": tokens(plain),
        "fresh": tokens(fresh),
        "third": tokens(named),
        "again": tokens(named),
        "first": first,
        "prompt": PROMPT,
        "scores": named.compute_logprobs(types.ModelInput.from_ints(PROMPT + first["tokens"])).result(),
        "trainer": forwarded(training, PROMPT + first["tokens"]),
    }
    steps(training, 3)
    came["third later"] = tokens(named)
    came["sixth"] = tokens(training.save_weights_and_get_sampling_client())
    return came


def stops(service: tinker.ServiceClient, base: str) -> object:
    """Sequences that end in different ways, and the likeliest tokens."""
    sampler = service.create_sampling_client(base_model=base)
    [free] = sampled(sampler, 1, stop=[], max_tokens=24)
    came = {"free": free, "at": free["tokens"][9]}
    came["ids"] = sampled(sampler, 1, stop=[free["tokens"][9]], max_tokens=24)
    came["greedy"] = tokens(sampler, temperature=0.0)
    came["first"] = tokens(sampler, top_k=1)
    prompt = types.ModelInput.from_ints(PROMPT)
    likeliest = sampler.sample(
        prompt,
        1,
        types.SamplingParams(max_tokens=4, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    ).result()
    came["prompt"] = likeliest.prompt_logprobs
    came["prompt top"] = likeliest.topk_prompt_logprobs
    [sequence] = likeliest.sequences
    came["sequence"] = [*sequence.tokens], [*sequence.logprobs]
    came["top"] = sequence.topk_logprobs
    return came


def probability(sampler: tinker.SamplingClient) -> float:
    """That the next token behind the prompt is one below 40."""
    prompt, params = types.ModelInput.from_ints([*PROMPT, 50]), types.SamplingParams(max_tokens=1)
    came = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=100).result()
    return sum(math.exp(logprob) for token, logprob in came.topk_prompt_logprobs[-1] if token < 40)


def reinforce(service: tinker.ServiceClient, base: str, count: int = 6, **lora: object) -> object:
    """Reinforcement learning: tokens below 40 are rewarded. How likely they are before and after it."""
    training = made(service, base, rank=8, **lora)
    sampler, losses = training.save_weights_and_get_sampling_client(), []
    before = probability(sampler)
    for at in range(count):
        group = sampled(sampler, 16, seed=100 * at)
        rewards = [sum(token < 40 for token in one["tokens"]) for one in group]
        mean = sum(rewards) / len(rewards)
        data = [rewarded(one, reward - mean) for one, reward in zip(group, rewards, strict=True)]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
        sampler = training.save_weights_and_get_sampling_client()
    last = sampled(sampler, 2)
    return {"before": before, "after": probability(sampler), "losses": losses, "last": last}


def rewarded(one: dict[str, object], advantage: float) -> types.Datum:
    """A sampled sequence behind its prompt."""
    words, masked = [*PROMPT, *one["tokens"]], len(PROMPT) - 1
    inputs = {
        "target_tokens": words[1:],
        "logprobs": [0.0] * masked + one["logprobs"],
        "advantages": [0.0] * masked + [advantage] * len(one["tokens"]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(words[:-1]), loss_fn_inputs=inputs)


def everything(service: tinker.ServiceClient, base: str, count: int, **lora: object) -> object:
    """Reinforcement learning whose model is saved, and loaded with its optimizer, every third step."""
    training, losses, groups = made(service, base, **lora), [], []
    for at in range(count):
        group = sampled(training.save_weights_and_get_sampling_client(), 4, seed=100 * at)
        groups.append([[one["tokens"], one["logprobs"], one["reason"]] for one in group])
        data = [rewarded(one, 0.5 - at % 2) for at, one in enumerate(group)]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01))
        losses.append([passed.result().metrics["loss:sum"], stepped.result().metrics])
        if at % 3 == 2:
            path = training.save_state(f"step-{at}").result().path
            training = service.create_training_client_from_state_with_optimizer(path).result()
    return {"losses": losses, "groups": groups, "last": forwarded(training, WORDS[2])}


def tenants(_: object, base: str, url: str, loops: list[dict[str, object]], at_once: bool) -> object:
    """What `tenant` gives of each of some clients: all at once, or one behind the other."""
    with ThreadPoolExecutor(len(loops) if at_once else 1) as pool:
        return [*pool.map(lambda options: tenant(url, base, **options), loops)]


def tenant(url: str, base: str, key: str, loss: str, **lora: object) -> object:
    """Losses and samples of a client with a key of its own, which rests now and then."""
    service, pauses = tinker.ServiceClient(base_url=url, api_key=key), random.Random(key)
    training, losses = made(service, base, **lora), []
    for at in range(4):
        passed = training.forward_backward([datum(words, loss) for words in WORDS], loss)
        time.sleep(pauses.random() / 10)
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2 / (at + 1)))
        time.sleep(pauses.random() / 10)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return {"losses": losses, "tokens": tokens(training.save_weights_and_get_sampling_client())}


def saved_between(service: tinker.ServiceClient, base: str) -> object:
    """Weights are saved between two passes of a step; another step follows."""
    training = made(service, base)
    first, second = [datum(WORDS[0], "cross_entropy")], [datum(WORDS[2], "cross_entropy")]
    losses = []
    for data, saves, steps_too in ((first, True, False), (second, False, True), (first, False, True)):
        losses.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        if saves:
            training.save_state("between").result()
        if steps_too:
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return losses


def refused(service: tinker.ServiceClient, base: str) -> object:
    """What is told of wrong requests."""
    told = {}
    training = made(service, base)

    def tell(name: str, call: object) -> None:
        try:
            result = call()
            told[name] = repr(result.result() if hasattr(result, "result") else result)
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    tell("base", lambda: service.create_lora_training_client(base_model="other", rank=4))
    tell(
        "vocabulary",
        lambda: training.forward_backward([datum([5, 10**6, 7], "cross_entropy")], "cross_entropy"),
    )
    tell("loss", lambda: training.forward_backward([datum([5, 6], "cross_entropy")], "stable_reinforce"))
    tell("path", lambda: service.create_training_client_from_state("tinker://s:train:0/weights/none"))
    training.save_state("best").result()
    tell("taken", lambda: training.save_state("best"))
    tell("afterwards", lambda: steps(training, 1))
    return told


if __name__ == "__main__":
    url, what, options = sys.argv[1], sys.argv[2], json.loads((sys.argv[3:] or ["{}"])[0])
    client = tinker.ServiceClient(base_url=url, api_key=options.pop("key", "tml-none"))
    print(json.dumps(globals()[what](client, **options)))
