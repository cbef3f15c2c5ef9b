"""A client of the training service that sends whatever it likes, by HTTP alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from rollbook.train.tenants import tinker_pb2 as messages

SampledSequence = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
DTYPES = {
    "<f4": messages.DTYPE_FLOAT32,
    "<i8": messages.DTYPE_INT64,
    "<i4": messages.DTYPE_INT32,
}


def dense(values: Any, dtype: str, shape: Sequence[int] | None = None) -> Any:
    """An array of a pass; `shape` may be a lie."""
    array = np.asarray(values, dtype)
    return messages.Tensor(dense=array.tobytes(), dtype=DTYPES[dtype], shape=shape or array.shape)


def datum(tokens: Sequence[int], **inputs: Any) -> Any:
    """A datum with inputs by name."""
    text = messages.EncodedText(tokens=np.asarray(tokens, "<i4").tobytes())
    made = messages.Datum(model_input=[messages.Chunk(encoded_text=text)])
    for name, tensor in inputs.items():
        made.loss_fn_inputs[name].CopyFrom(tensor)
    return made


def good(count: int = 4, **inputs: Any) -> Any:
    """A datum with which nothing is wrong, but for these inputs."""
    own = {"target_tokens": dense([6] * count, "<i8"), "weights": dense([1.0] * count, "<f4")}
    return datum([5] * count, **own | inputs)


def pass_of(
    model_id: str,
    number: int,
    *data: Any,
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
) -> bytes:
    """The body of a `forward_backward`."""
    named = {"model_id": model_id, "seq_id": number, "loss_fn": loss, "loss_fn_config": config}
    return bytes(messages.ForwardBackwardRequest(data=data, **named).SerializeToString())


class RawClient:
    """Sends to a service at an address, with a key.

    Attributes:
        answers: everything that it was told.
    """

    def __init__(self, url: str, key: str) -> None:
        self.answers: list[httpx.Response] = []
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"x-api-key": key}, timeout=60)
        self._models = itertools.count()
        self._samplers = itertools.count()
        self.session_id = self.told("create_session", {})["session_id"]

    def close(self) -> None:
        """End."""
        self.http.close()

    def send(self, route: str, body: Any = None, method: str = "POST", **headers: str) -> httpx.Response:
        """What is answered to JSON, or to these bytes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        self.answers.append(self.http.request(method, route, headers=named, **sent))
        return self.answers[-1]

    def told(self, route: str, body: Any, **headers: str) -> Any:
        """What is answered where it is accepted."""
        answer = self.send(route, body, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def model(self, rank: int = 4) -> str:
        """A new model; of rank 0, a whole one."""
        lora = {"rank": rank, "seed": 7} if rank else None
        body = {"session_id": self.session_id, "model_seq_id": next(self._models), "lora_config": lora}
        accepted = self.told("create_model", body | {"base_model": "tiny"})
        assert "error" not in self.result(accepted).json()
        return str(accepted["model_id"])

    def sampler(self, path: str | None = None) -> str:
        """A new sampler of the base model, or of weights."""
        body = {"session_id": self.session_id, "sampling_session_seq_id": next(self._samplers)}
        return str(self.told("create_sampling_session", body | {"model_path": path})["sampling_session_id"])

    def result(self, accepted: Any) -> httpx.Response:
        """How what was accepted ended."""
        body = {"request_id": accepted["request_id"]}
        while (answer := self.send("retrieve_future", body)).status_code == 408:
            assert answer.json()["type"] == "try_again"
        assert answer.status_code == 200, answer.text
        return answer

    def failure(self, route: str, body: Any, **headers: str) -> str:
        """Why what was accepted could not be done: the client is told that it is its own fault."""
        ended = self.result(self.told(route, body, **headers)).json()
        assert ended["category"] == "user", ended
        return str(ended["error"])

    def sampled(self, body: Any) -> list[SampledSequence]:
        """What a request to sample gives."""
        return self.sequences(self.told("asample", body))

    def sequences(self, accepted: Any) -> list[SampledSequence]:
        """(tokens, logprobs) of each sequence of a request that was accepted."""
        response = messages.SampleResponse()
        response.ParseFromString(self.result(accepted).content)
        own = response.sequences
        return [(np.frombuffer(s.tokens, "<i4"), np.frombuffer(s.logprobs, "<f4")) for s in own]

    def loss(self, body: bytes) -> float:
        """The loss of a pass."""
        output = messages.ForwardBackwardOutput()
        output.ParseFromString(self.result(self.told("forward_backward", body)).content)
        return float(output.metrics["loss:sum"])


def sample_of(sampler_id: str, number: int, tokens: Sequence[int] = (5, 6), **changes: Any) -> Any:
    """The body of an `asample`; keys of `sampling_params` may be among the changes."""
    keys = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    params = {"max_tokens": 2, "seed": 1} | {k: changes.pop(k) for k in keys if k in changes}
    chunks = [{"type": "encoded_text", "tokens": [*tokens]}]
    named = {"sampling_session_id": sampler_id, "seq_id": number, "prompt": {"chunks": chunks}}
    return named | {"sampling_params": params} | changes
