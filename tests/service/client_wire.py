"""Run by the client's Python: `client_wire.py FOLDER` writes what it sends, and reads what we answer.

Of each pass in FOLDER/passes.json it writes FOLDER/N.request. What its converters make of FOLDER/outputs and
FOLDER/samples it prints as JSON, with the fields of its messages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types
from tinker.proto import request_conv, response_conv, tinker_public_pb2
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

MESSAGES = ("ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse")


def _tensor(given: dict[str, Any]) -> types.TensorData:
    data = np.asarray(given["data"], given["dtype"])
    return types.TensorData(
        data=data if "crow" in given else data.reshape(given["shape"]),
        dtype=given["dtype"],
        shape=given["shape"],
        sparse_crow_indices=given.get("crow"),
        sparse_col_indices=given.get("columns"),
    )


def _spans(given: list[list[Any]]) -> list[Any]:
    return [
        (SampledProvenanceSpan if sampled else PromptProvenanceSpan)(
            sequence_id=name, offset=offset, length=length
        )
        for name, offset, length, sampled in given
    ]


def _datum(given: dict[str, Any]) -> types.Datum:
    chunks = [types.EncodedTextChunk(tokens=tokens) for tokens in given["chunks"]]
    inputs = {name: _tensor(tensor) for name, tensor in given["inputs"].items()}
    datum = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    if given["spans"]:
        return datum.with_provenance(_spans(given["spans"]), _spans(given["input_spans"]))
    return datum


def _request(given: dict[str, Any]) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=[_datum(datum) for datum in given["data"]],
            loss_fn=given["loss"],
            loss_fn_config=given["config"] or None,
        ),
        model_id=given["model_id"],
        seq_id=given["seq"],
    )
    message = request_conv.forward_backward_request_to_proto(request)
    message.forward_only = given["forward_only"]
    return message.SerializeToString()


def _read_tensor(tensor: types.TensorData) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": tensor.shape, "data": tensor.data}


def _fields(descriptor: Any) -> dict[str, Any]:
    """A message on the wire: number -> name, type, whether it is a list, its oneof, what it is made of."""
    return {
        str(field.number): [
            *(field.name, field.type, field.is_repeated),
            field.containing_oneof and field.containing_oneof.name,
            _fields(field.message_type) if field.message_type else None,
        ]
        for field in descriptor.fields
    }


def _read_answers(folder: Path) -> dict[str, Any]:
    outputs: Any = response_conv.deserialize_proto_response(
        (folder / "outputs").read_bytes(), types.ForwardBackwardOutput
    )
    samples: Any = response_conv.deserialize_proto_response(
        (folder / "samples").read_bytes(), types.SampleResponse
    )
    return {
        "fields": [_fields(getattr(tinker_public_pb2, name).DESCRIPTOR) for name in MESSAGES],
        "type": outputs.loss_fn_output_type,
        "metrics": outputs.metrics,
        "outputs": [
            {name: _read_tensor(t) for name, t in datum.items()} for datum in outputs.loss_fn_outputs
        ],
        "sequences": [[s.stop_reason, s.tokens, s.logprobs, s.topk_logprobs] for s in samples.sequences],
        "prompt_logprobs": samples.prompt_logprobs,
        "prompt_top": samples.topk_prompt_logprobs,
    }


if __name__ == "__main__":
    here = Path(sys.argv[1])
    for number, each in enumerate(json.loads((here / "passes.json").read_text())):
        (here / f"{number}.request").write_bytes(_request(each))
    print(json.dumps(_read_answers(here)))
