"""Sends the experts of a model directory to a server: under SGLang's names, or fused as in transformers.

It runs in SGLang's environment: tensors travel as SGLang's own serializer makes them.

    send_experts.py URL MODEL VERSION each|fused
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

PLACE = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def fused(weights: dict[str, Any]) -> dict[str, Any]:
    """A tensor for the gates and ups of all experts of a layer, and one for their downs."""
    layers: dict[str, dict[int, dict[str, Any]]] = {}
    for name, tensor in weights.items():
        if match := PLACE.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    tensors = {}
    for layer, experts in layers.items():
        each = [experts[i] for i in sorted(experts)]
        tensors[f"{layer}.gate_up_proj"] = torch.stack(
            [torch.cat([expert["gate"], expert["up"]]) for expert in each]
        )
        tensors[f"{layer}.down_proj"] = torch.stack([expert["down"] for expert in each])
    return tensors


def main(url: str, model: str, version: str, form: str) -> None:
    """Send them; print what the server says."""
    # By default tensors travel as file descriptors, which a process that is no child of the server's
    # may not hand over: the server would die of it.
    torch.multiprocessing.set_sharing_strategy("file_system")
    weights = {n: t for n, t in load_file(Path(model) / "model.safetensors").items() if PLACE.fullmatch(n)}
    tensors = list((fused(weights) if form == "fused" else weights).items())
    payload = MultiprocessingSerializer.serialize(tensors, output_str=True)

    def post(path: str, body: dict[str, Any]) -> str:
        reply = requests.post(url + path, json=body, timeout=60)
        reply.raise_for_status()
        return reply.text

    post("/begin_weight_update", {"selector": "target"})
    try:
        body = {"serialized_named_tensors": [payload], "weight_version": version, "flush_cache": True}
        print(post("/update_weights_from_tensor", body))
    finally:
        post("/end_weight_update", {})


if __name__ == "__main__":
    main(*sys.argv[1:])
