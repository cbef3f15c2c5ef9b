"""Environment variables that numerical libraries obey, as a fingerprint has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

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
    """Those of an environment's variables that may decide bits, by name; one that is not set is not there.

    A value that holds a path, or is long, is kept as a digest: it can be compared, and tells nothing else.
    """
    return {
        name: _value(environment[name])
        for name in sorted(environment)
        if name.startswith(PREFIXES) and not _left_out(name)
    }


def only_places(name: str) -> bool:
    """Whether a variable says where and when something is computed and where it lies, or how it is watched
    over: no bits are known to hang on it."""
    return name in _PLACING or name.startswith(_WATCHING)


def _left_out(name: str) -> bool:
    if name in _OWN:
        return True
    return name.endswith((*_COUNTS, *_PLACES)) or not set(_TELLING).isdisjoint(name.split("_"))


def _value(text: str) -> str:
    if len(text) <= _LONGEST and not set("/\\@").intersection(text):
        return text
    return f"sha256 {hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:16]}"
