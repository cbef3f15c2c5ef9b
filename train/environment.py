"""The fingerprint of a step's environment, and how two of them differ.

It holds what computes here and how it is set (processor, libraries, torch's threads and flags,
the GPU), the environment variables that numerical libraries obey, and digests of the sources
that a step runs, since a version does not show that a file was edited. Those sources are
recorded file by file when a training starts.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from rollbook import __version__
from rollbook.store import Store
from rollbook.store.digest import digest_json
from rollbook.store.events import Json, RunOpened
from rollbook.train.algorithms.parts import sources
from rollbook.train.model.varlen import FLASH
from rollbook.train.source_files import file_digests, source_digests

_INSTRUCTIONS = (
    *("sse4_1", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "fphp", "sve", "sve2", "bf16", "i8mm"),
)
"""Sets of instructions that kernels are chosen by. A virtual machine may hide some of its processor's."""
_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")


def processor() -> str:
    """The processor's model name, by which kernels are chosen."""
    return _cpuinfo("model name") or platform.processor()


def instructions() -> str:
    """The processor's instruction sets, of those by which kernels are chosen; "" if unknown."""
    has = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return " ".join(name for name in _INSTRUCTIONS if name in has)


def libraries() -> Json:
    """The libraries that torch was built with, and the system's libraries that they use."""
    built = torch.__config__.show()
    return {
        "blas": _first(r"BLAS_INFO=(\w+)", built),
        "mkl": _first(r"Math Kernel Library Version (\S+ Build \d+)", built),
        "onednn": _first(r"MKL-DNN v(\S+)", built),
        "libc": " ".join(platform.libc_ver()).strip(),
    }


def threading() -> Json:
    """How many threads each library uses for an operation, beside torch's own number, and by which
    backend."""
    info = torch.__config__.parallel_info()
    omp, mkl = (_first(rf"{name}_get_max_threads\(\) : (\d+)", info) for name in ("omp", "mkl"))
    return {
        "omp": int(omp) if omp else None,
        "mkl": int(mkl) if mkl else None,
        "interop": torch.get_num_interop_threads(),
        "backend": _first(r"ATen parallel backend: (.+)", info),
    }


def flags(device: torch.device) -> Json:
    """Torch's settings that decide which kernels run, and how exactly they compute."""
    tiny = sys.float_info.min  # below it this thread's processor may take numbers for 0; torch cannot say
    settings: Json = {
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "onednn": torch.backends.mkldnn.enabled,
        "onednn_matmul": _precision(torch.backends.mkldnn, "matmul"),
        "flush_denormals": tiny * 0.5 == 0.0,
    }
    return settings | _cuda_flags() if device.type == "cuda" else settings


def gpu(device: torch.device) -> Json:
    """A CUDA device: its kind, its size, and the libraries that compute on it."""
    about = torch.cuda.get_device_properties(device)
    facts: Json = {
        "name": torch.cuda.get_device_name(device),
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(torch.cuda.nccl.version()),
    }
    if _DRIVER.exists():
        facts["driver"] = _first(r"Module\D*([\d.]+)", _DRIVER.read_text())
    return facts


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
    """The type to which a backend may round float32 in an operation; `none` sets nothing, which is
    `ieee`."""
    precision = str(getattr(backend, operation).fp32_precision)
    return "ieee" if precision == "none" else precision


def _cpuinfo(key: str) -> str:
    """The value of a key for the first processor in Linux's cpuinfo; "" if there is none."""
    if not _CPUINFO.exists():
        return ""
    with _CPUINFO.open() as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.split("\t")[0] == key), "")


def _first(pattern: str, text: str) -> str | None:
    """The first group of the first match."""
    match = re.search(pattern, text)
    return None if match is None else match[1].strip()


PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_"),
    *("ATEN_", "ONEDNN_", "DNNL_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NCCL_", "NVTE_"),
    *("NVIDIA_TF32_OVERRIDE", "GLIBC_TUNABLES"),
)
"""How the names of those that are kept begin. glibc's decide which code computes logarithms and powers."""
_COUNTS = ("_NUM_THREADS",)
"""They ask for a number of threads: the number that came of it is kept."""
_PLACES = (
    *("_DIR", "_PATH", "_HOME", "_ROOT", "_FILE", "_CACHE", "_FOLDER"),
    *("_IFNAME", "_ADDR", "_ADDRESS", "_PORT", "_ID", "_HOSTID", "_HOST", "_FAMILY", "_HCA"),
    *(
        "_DEVICES",
        "_VERSION",
        "_TOKEN",
        "_KEY",
        "_SECRET",
        "_PASSWORD",
        "_TIMEOUT",
        "_TIMEOUT_SEC",
        "_ARCH_LIST",
    ),
)
"""How the names end of those that say where something is, who may use it or for what it is built, not what is
computed."""
_TELLING = (
    "DEBUG",
    "LOG",
    "LOGS",
    "VERBOSE",
    "DISPLAY",
    "TRACE",
    "DUMP",
    "PROFILE",
    "WARNINGS",
    "STACKTRACES",
)
"""Words of those that have something told."""
_LONGEST = 64
"""Characters of a value that is kept as it is. A step keeps its fingerprint, whoever sets how much."""

_PLACING = frozenset(
    {
        *("OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT"),
        *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        *("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    }
)
_OWN = frozenset({"NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"})
"""Megatron sets them itself, once it builds a model, by a configuration that is always the same."""
_WATCHING = "TORCH_NCCL_"
"""Begins the names of those by which torch watches over a communicator; what it sums is NCCL's."""


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may decide bits, by name; those that are not set are left out.

    A value that holds a path, or is long, is kept as a digest: it can be compared, and reveals
    nothing else.
    """
    return {
        name: _value(environment[name])
        for name in sorted(environment)
        if name.startswith(PREFIXES) and not _left_out(name)
    }


def only_places(name: str) -> bool:
    """Whether a variable only says where and when something is computed, where it lies, or how it
    is watched: no bits are known to depend on it."""
    return name in _PLACING or name.startswith(_WATCHING)


def _left_out(name: str) -> bool:
    if name in _OWN:
        return True
    return name.endswith((*_COUNTS, *_PLACES)) or not set(_TELLING).isdisjoint(name.split("_"))


def _value(text: str) -> str:
    if len(text) <= _LONGEST and not set("/\\@").intersection(text):
        return text
    return f"sha256 {hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:16]}"


def with_files(log: Store, run: str, recorded: Json, here: Json) -> tuple[Json, Json]:
    """Both fingerprints with a digest per file, so that their differences name files and not rooms
    alone.

    Args:
        recorded: the fingerprint of a step of this run.
        here: the fingerprint that the step would get here.

    Returns:
        Both unchanged, if no start of a training recorded the files of those sources.
    """
    sources = recorded.get("sources")
    for event in log.events_of([RunOpened.KIND]):
        opened = event.record
        if event.run != run or not isinstance(opened, RunOpened) or "files" not in opened.environment:
            continue
        if opened.environment.get("sources") == sources:
            return recorded | {"files": opened.environment["files"]}, here | {"files": file_digests()}
    return recorded, here


PACKAGES = ("torch", "megatron-core", "numpy", "transformers", "safetensors")
FORM = 2
"""The form of fingerprints. Those without one, the first, name six variables whether they are set or not, and
leave out what came later."""

Matters = Literal["bits", "nothing known"]

_SET = frozenset({"parts", "variables"})
"""Keys under which what is not named is not set, since the second form."""
_NO_BITS = frozenset({"kernel", "threading.interop", "packages.transformers", "packages.safetensors"})
"""Keys that no bits are known to hang on: an operating system's release; threads for what no step does; files
and tokenizers, which are read but not computed with."""


def fingerprint(
    device: torch.device,
    algorithm: Json | None = None,
    parallel: Json | None = None,
    *,
    dtype: str = "float32",
    flash: bool = False,
) -> Json:
    """Everything known to change bits: versions and sources, processor, threads, flags, variables,
    parallel layout, and the sources of an algorithm's parts that are not Rollbook's.

    What cannot change in a process is looked up once: the first call takes some 50 ms, the next
    well under 1 ms. `flash` as of `Build`.
    """
    facts: Json = {
        **_of_process(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "threading": threading(),
        "dtype": dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flags": flags(device),
        "parallel": parallel or {"data": 1, "tensor": 1, "pipeline": 1},
        "variables": kept_variables(os.environ),
    }
    if own := sources(algorithm or {}):
        facts["parts"] = own
    if flash:
        facts["flags"]["attention"] = FLASH
    if device.type == "cuda":
        facts["gpu"] = _gpu(device)
    return facts


def took_flash(environment: Json) -> bool:
    """Whether a step took the attention of packed samples by `varlen`, by its fingerprint."""
    return (environment.get("flags") or {}).get("attention") == FLASH


@functools.cache
def _of_process() -> Json:
    """The part that does not change for as long as a process runs."""
    return {
        "form": FORM,
        "rollbook": __version__,
        "sources": source_digests(),
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "kernel": platform.release(),
        "packages": {name: version(name) for name in PACKAGES},
        "torch_build": digest_json(torch.__config__.show()),
        "libraries": libraries(),
        "processor": processor(),
        "instructions": instructions(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


_gpu = functools.cache(gpu)


@dataclass(frozen=True, slots=True)
class Difference:
    """A recorded value of an environment that is different here.

    Attributes:
        key: its place in a fingerprint, such as `packages.torch` or `sources.algorithms`.
        recorded, here: both values; None where there is none, as of a variable that is not set.
        matters: what it is known to be able to change.
    """

    key: str
    recorded: Any
    here: Any
    matters: Matters

    def __str__(self) -> str:
        aside = "" if self.matters == "bits" else " (not known to change bits)"
        return f"{self.key}: recorded {self.recorded!r}, here {self.here!r}{aside}"


def differences(recorded: Json, here: Json) -> list[Difference]:
    """How an environment differs from the recorded one, leaf by leaf, sorted by key.

    What the step did not record, because its release did not know it yet, is no difference.
    """
    before, now = _leaves(recorded), _leaves(here)
    return [
        Difference(key, before.get(key), now.get(key), _matters(key, recorded, here))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _unrecorded(key, recorded, before)
    ]


def unrecorded(recorded: Json, here: Json) -> list[str]:
    """What is known of the environment here, was not recorded of the other, and may change bits; by
    the outermost key under which nothing was recorded."""
    before = _leaves(recorded)
    missing = [
        key
        for key in _leaves(here)
        if _unrecorded(key, recorded, before) and _matters(key, recorded, here) == "bits"
    ]
    return sorted({key if key.partition(".")[0] in recorded else key.partition(".")[0] for key in missing})


def _leaves(values: Json, prefix: str = "") -> dict[str, Any]:
    """`outer.inner` -> value, of every value that is not itself an object, except the form."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{key}.")
        elif prefix or key != "form":
            leaves[prefix + key] = value
    return leaves


def _unrecorded(key: str, recorded: Json, leaves: Mapping[str, Any]) -> bool:
    """Whether a step recorded nothing about a key."""
    if key in leaves:
        return False
    outer = key.partition(".")[0]
    if outer == "parallel":  # of which sizes of 1 are left out
        return outer not in recorded
    return outer not in _SET or recorded.get("form", 1) < FORM


def _matters(key: str, recorded: Json, here: Json) -> Matters:
    """What a difference in a key can change, as far as is known. An unknown key may change
    anything."""
    if key in _NO_BITS or (key.startswith("variables.") and only_places(key.removeprefix("variables."))):
        return "nothing known"
    part_of = {"python": _minor, "device": _kind}.get(key)
    if part_of is not None:
        return "nothing known" if part_of(recorded.get(key)) == part_of(here.get(key)) else "bits"
    if key == "rollbook" and "sources" in recorded:  # these say it better
        return "nothing known"
    return "bits"


def _minor(python: Any) -> list[str]:
    """The part of Python's version that packages are compiled for."""
    return str(python).split(".")[:2]


def _kind(device: Any) -> str:
    return str(device).partition(":")[0]
