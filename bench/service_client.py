"""A program of the pinned client, unmodified: `service_client.py URL KEY RATE`, where `tinker` is installed.

Answers each line of standard input, the name of a deed and its arguments as JSON, with a line of JSON.
Seconds are of `time.perf_counter`, moments of `time.time`. Imports nothing of Rollbook.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from threading import Event, Thread
from typing import Any

import tinker
from tinker import types

Rows = Sequence[Sequence[int]]
"""Sequences of tokens; each token but the first is to be learnt."""


class Client:
    """A client's models and samplers, by names that the benchmark gives them."""

    def __init__(self, url: str, key: str, rate: float) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        self._adam = types.AdamParams(learning_rate=rate)
        self._models: dict[str, Any] = {}
        self._flood: Flood | None = None

    def make(self, model: str, base: str, rank: int) -> str:
        """Make a model; its id."""
        asked = self._service.create_lora_training_client(base_model=base, rank=rank, seed=0)
        self._models[model] = asked.result()
        return str(self._models[model].model_id)

    def train(self, models: Sequence[str], rows: Rows, steps: int, ahead: int) -> Any:
        """Optimizer steps of models in turn, each behind a pass over all rows; seconds, and the losses.

        Args:
            ahead: a result is asked for when so many steps were sent behind it.
        """
        data, sent, losses = _data(rows), deque[Any](), list[float]()
        begun = time.perf_counter()
        for number in range(steps):
            model = self._models[models[number % len(models)]]
            sent.append((model.forward_backward(data, "cross_entropy"), model.optim_step(self._adam)))
            if len(sent) > ahead:
                losses.append(_loss(*sent.popleft()))
        losses += [_loss(*one) for one in sent]
        return {"seconds": time.perf_counter() - begun, "losses": losses}

    def passes(self, model: str, rows: Rows, count: int) -> Any:
        """Passes forward and backward, one after the other: seconds of each, from the call to its result."""
        data, seconds = _data(rows), list[float]()
        for _ in range(count):
            begun = time.perf_counter()
            self._models[model].forward_backward(data, "cross_entropy").result()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def operate(self, model: str, rows: Rows, count: int) -> Any:
        """As many small operations, a pass and a step in turn: seconds of each, from the call to its result,
        and the moment when its result was there."""
        data, done = _data(rows), list[tuple[float, float]]()
        for number in range(count):
            begun = time.perf_counter()
            if number % 2 == 0:
                self._models[model].forward_backward(data, "cross_entropy").result()
            else:
                self._models[model].optim_step(self._adam).result()
            done.append((time.perf_counter() - begun, time.time()))
        return done

    def accumulate(self, model: str, rows: Rows, steps: int, passes: int) -> float:
        """Optimizer steps, each behind so many passes, a step's sent at once; the seconds of all."""
        data, begun = _data(rows), time.perf_counter()
        for _ in range(steps):
            client = self._models[model]
            sent = [client.forward_backward(data, "cross_entropy") for _ in range(passes)]
            sent.append(client.optim_step(self._adam))
            for one in sent:
                one.result()
        return time.perf_counter() - begun

    def flood(self, model: str, rows: Rows, ahead: int) -> None:
        """Begin to send passes without end, so many ahead of their results."""
        self._flood = Flood(self._models[model], _data(rows), ahead)

    def calm(self) -> int:
        """End that; how many passes there were."""
        assert self._flood is not None
        return self._flood.end()

    def publish(self, model: str, name: str, prompt: Sequence[int]) -> Any:
        """Save weights for a sampler, open it and sample a token; then sample another one.

        Gives the seconds of the first until they were saved, the sampler was open and the token was there,
        and those of the other sample.
        """
        begun = time.perf_counter()
        path = self._models[model].save_weights_for_sampler(name).result().path
        saved = time.perf_counter()
        sampler = self._service.create_sampling_client(model_path=path)
        opened = time.perf_counter()
        _sample(sampler, prompt)
        sampled = time.perf_counter()
        _sample(sampler, prompt)
        parts = {"saved": saved - begun, "opened": opened - saved, "first": sampled - opened}
        return parts | {"again": time.perf_counter() - sampled}


class Flood:
    """Passes that are sent by a thread without end."""

    def __init__(self, model: Any, data: list[types.Datum], ahead: int) -> None:
        self._model, self._data, self._ahead = model, data, ahead
        self._count, self._over = 0, Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sent = deque[Any]()
        while not self._over.is_set():
            sent.append(self._model.forward_backward(self._data, "cross_entropy"))
            if len(sent) > self._ahead:
                sent.popleft().result()
                self._count += 1
        for one in sent:
            one.result()
            self._count += 1

    def end(self) -> int:
        """Send no more, and wait for the rest; how many there were."""
        self._over.set()
        self._thread.join()
        return self._count


def _data(rows: Rows) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints([*row[:-1]]),
            loss_fn_inputs={"target_tokens": [*row[1:]], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def _loss(passed: Any, stepped: Any) -> float:
    stepped.result()
    return float(passed.result().metrics["loss:sum"])


def _sample(sampler: tinker.SamplingClient, prompt: Sequence[int]) -> None:
    params = types.SamplingParams(max_tokens=1, seed=1)
    sampler.sample(types.ModelInput.from_ints([*prompt]), 1, params).result()


def main() -> None:
    """Do what is asked until standard input ends."""
    url, key, rate = sys.argv[1:]
    client = Client(url, key, float(rate))
    training = client.make, client.train, client.passes, client.operate, client.accumulate
    deeds = {deed.__name__: deed for deed in (*training, client.flood, client.calm, client.publish)}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"came": deeds[asked.pop("do")](**asked)}
        except Exception as error:  # told to who asked, who knows what it means
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
