"""What computes here, and how it is set: the processor, the libraries, torch's threads and flags, the GPU."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from rollbook.store.events import Json

_INSTRUCTIONS = (
    *("sse4_1", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "fphp", "sve", "sve2", "bf16", "i8mm"),
)
"""Sets of instructions that kernels are chosen by. A virtual machine may hide some of its processor's."""
_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")


def processor() -> str:
    """The processor's model name: kernels are chosen by it."""
    return _cpuinfo("model name") or platform.processor()


def instructions() -> str:
    """The sets of instructions that the processor has, of those that kernels are chosen by; "" if unknown."""
    has = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return " ".join(name for name in _INSTRUCTIONS if name in has)


def libraries() -> Json:
    """The libraries that torch was built with, and the system's own that computes what they leave to it."""
    built = torch.__config__.show()
    return {
        "blas": _first(r"BLAS_INFO=(\w+)", built),
        "mkl": _first(r"Math Kernel Library Version (\S+ Build \d+)", built),
        "onednn": _first(r"MKL-DNN v(\S+)", built),
        "libc": " ".join(platform.libc_ver()).strip(),
    }


def threading() -> Json:
    """How many threads each library takes for an operation, beside torch's own number, and whose they are."""
    said = torch.__config__.parallel_info()
    omp, mkl = (_first(rf"{name}_get_max_threads\(\) : (\d+)", said) for name in ("omp", "mkl"))
    return {
        "omp": int(omp) if omp else None,
        "mkl": int(mkl) if mkl else None,
        "interop": torch.get_num_interop_threads(),
        "backend": _first(r"ATen parallel backend: (.+)", said),
    }


def flags(device: torch.device) -> Json:
    """Torch's settings that decide which kernels run, and how exactly they compute."""
    found: Json = {
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "onednn": torch.backends.mkldnn.enabled,
        "onednn_matmul": _precision(torch.backends.mkldnn, "matmul"),
        "flush_denormals": _flushes_denormals(),
    }
    return found | _cuda_flags() if device.type == "cuda" else found


def gpu(device: torch.device) -> Json:
    """A CUDA device: its kind, how much of it there is, and the libraries that compute on it."""
    about = torch.cuda.get_device_properties(device)
    found: Json = {
        "name": torch.cuda.get_device_name(device),
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(torch.cuda.nccl.version()),
    }
    if _DRIVER.exists():
        found["driver"] = _first(r"Module\D*([\d.]+)", _DRIVER.read_text())
    return found


def _cuda_flags() -> Json:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "cublas_matmul": _precision(torch.backends.cuda, "matmul"),
        "cublas_reduced": [
            str(matmul.allow_fp16_reduced_precision_reduction),
            str(matmul.allow_bf16_reduced_precision_reduction),
        ],
        "cublas": str(torch.backends.cuda.preferred_blas_library()),
        "cudnn_conv": _precision(cudnn, "conv"),
        "cudnn": [bool(cudnn.enabled), bool(cudnn.deterministic), bool(cudnn.benchmark)],
    }


def _precision(backend: Any, operation: str) -> str:
    """What a backend may round float32 to in an operation; `none` asks for nothing, which is `ieee`."""
    said = str(getattr(backend, operation).fp32_precision)
    return "ieee" if said == "none" else said


def _flushes_denormals() -> bool:
    """Whether this thread's processor takes numbers below the smallest normal one for 0; torch cannot say."""
    smallest = sys.float_info.min
    return smallest * 0.5 == 0.0


def _cpuinfo(key: str) -> str:
    """What Linux says of the first processor under a key; "" if nothing."""
    if not _CPUINFO.exists():
        return ""
    with _CPUINFO.open() as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.split("\t")[0] == key), "")


def _first(pattern: str, text: str) -> str | None:
    """The first group of the first match."""
    found = re.search(pattern, text)
    return None if found is None else found[1].strip()
