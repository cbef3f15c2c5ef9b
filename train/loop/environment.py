"""The fingerprint of a step's environment. Replays are bit-exact only in the same environment."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from rollbook import __version__
from rollbook.store.digest import digest_json
from rollbook.store.events import Json
from rollbook.train.algorithms.parts import sources

PACKAGES = ("torch", "megatron-core", "numpy", "transformers", "safetensors")
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "NCCL_ALGO",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHDYNAMO_DISABLE",
)


def fingerprint(
    device: torch.device,
    algorithm: Json | None = None,
    parallel: Json | None = None,
    *,
    dtype: str = "float32",
) -> Json:
    """Everything known to change bits: versions, processor, threads, flags, parallel layout, and the sources
    of an algorithm's parts that are not Rollbook's."""
    found: Json = {
        "rollbook": __version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "packages": {name: version(name) for name in PACKAGES},
        "torch_build": digest_json(torch.__config__.show()),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "parallel": parallel or {"data": 1, "tensor": 1, "pipeline": 1},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }
    if own := sources(algorithm or {}):
        found["parts"] = own
    if device.type == "cuda":
        found["gpu"] = {
            "name": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": list(torch.cuda.nccl.version()),
        }
    return found


def _processor() -> str:
    """The processor's model name: kernels are chosen by it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def differences(recorded: Json, here: Json) -> list[str]:
    """`key: recorded != here`, for every key that differs."""
    return [
        f"{key}: recorded {recorded.get(key)!r}, here {here.get(key)!r}"
        for key in sorted(recorded.keys() | here.keys())
        if recorded.get(key) != here.get(key)
    ]
