"""Whether bits are promised, before a replay starts: by what differs, what is unsteady, what is not known."""

from __future__ import annotations

from typing import Any

import pytest

from rollbook.store.events import Json
from rollbook.train.resume.promise import promise

BEFORE: Json = {
    "form": 2,
    "rollbook": "0.1.0",
    "sources": {"algorithms": "1", "megatron-core": "2"},
    "python": "3.11.7",
    "platform": "linux x86_64",
    "kernel": "6.1",
    "packages": {"torch": "2.13.0", "megatron-core": "0.16.1", "numpy": "2.4", "transformers": "5.2"},
    "torch_build": "3",
    "libraries": {"blas": "mkl", "libc": "glibc 2.36"},
    "processor": "Abacus",
    "instructions": "avx2 fma",
    "cpu_capability": "AVX2",
    "device": "cpu",
    "threads": 1,
    "threading": {"omp": 1, "mkl": 1, "interop": 8},
    "dtype": "float32",
    "deterministic": True,
    "flags": {"warn_only": False, "flush_denormals": False},
    "parallel": {"data": 1, "tensor": 1, "pipeline": 1},
    "variables": {},
}
GPU: Json = BEFORE | {"device": "cuda:0", "gpu": {"name": "H100", "driver": "570"}}


def _with(key: str, value: Any, base: Json = BEFORE) -> Json:
    outer, _, inner = key.partition(".")
    return base | {outer: base[outer] | {inner: value} if inner else value}


@pytest.mark.parametrize(
    ("key", "value", "bits"),
    [
        ("rollbook", "0.2.0", True),
        ("python", "3.11.9", True),
        ("kernel", "6.2", True),
        ("packages.transformers", "5.3", True),
        ("threading.interop", 2, True),
        ("variables.OMP_PLACES", "cores", True),
        ("python", "3.12.1", False),
        ("sources.algorithms", "9", False),
        ("sources.megatron-core", "9", False),
        ("platform", "darwin arm64", False),
        ("packages.torch", "2.14.0", False),
        ("packages.numpy", "2.5", False),
        ("torch_build", "9", False),
        ("libraries.blas", "open", False),
        ("libraries.libc", "glibc 2.39", False),
        ("processor", "Slide rule", False),
        ("instructions", "avx2", False),
        ("cpu_capability", "DEFAULT", False),
        ("device", "cuda", False),
        ("threads", 2, False),
        ("threading.omp", 2, False),
        ("dtype", "bfloat16", False),
        ("flags.flush_denormals", True, False),
        ("parallel.data", 2, False),
        ("variables.MKL_CBWR", "COMPATIBLE", False),
        ("variables.ONEDNN_MAX_CPU_ISA", "AVX2", False),
    ],
)
def test_one_key(key: str, value: Any, bits: bool) -> None:
    """What excludes a promise, and what is only listed beside one."""
    result = promise(BEFORE, _with(key, value))
    assert result.bits is bits
    (difference,) = result.beside if bits else result.against
    assert (difference.key, difference.here) == (key, value)
    assert result.reasons == ([] if bits else [str(difference)])


def test_the_same_environment() -> None:
    """Bits are promised where nothing differs, on a CPU and on a GPU."""
    assert promise(BEFORE, BEFORE).bits
    assert promise(GPU, _with("device", "cuda:3", GPU)).bits


@pytest.mark.parametrize(
    ("key", "value", "lines"),
    [
        ("deterministic", False, "deterministic kernels are off"),
        ("flags.warn_only", True, "only warn"),
        ("variables.OMP_DYNAMIC", "true", "OMP_DYNAMIC=true lets the machine's load decide"),
        ("variables.OMP_DYNAMIC", "1", "OMP_DYNAMIC=1 lets the machine's load decide"),
    ],
)
def test_nothing_is_promised_where_even_the_same_environment_is_unsteady(
    key: str, value: Any, lines: str
) -> None:
    """Though no key differs; and where only one side is so, too."""
    unsteady = _with(key, value)
    for recorded, here, where in ((unsteady, unsteady, "as recorded"), (BEFORE, unsteady, "here")):
        result = promise(recorded, here)
        assert not result.bits
        assert [lines in line and line.endswith(f"({where})") for line in result.unsteady] == [True]
        assert set(result.unsteady) <= set(result.reasons)
    assert promise(_with("variables.OMP_DYNAMIC", "false"), _with("variables.OMP_DYNAMIC", "false")).bits


@pytest.mark.parametrize(
    ("data", "tensor", "bits"), [(1, 2, True), (2, 1, True), (3, 1, False), (2, 2, False)]
)
def test_rings_of_gpus(data: int, tensor: int, bits: bool) -> None:
    """Two GPUs' sum is one; of more it hangs on how they are connected, which nobody recorded."""
    layout = {"data": data, "tensor": tensor, "pipeline": 1}
    assert promise(_with("parallel", layout, GPU), _with("parallel", layout, GPU)).bits is bits
    assert promise(_with("parallel", layout), _with("parallel", layout)).bits


@pytest.mark.parametrize("lost", ["sources", "libraries", "instructions", "flags", "threading"])
def test_what_was_not_recorded_is_named(lost: str) -> None:
    """It is no difference, and no promise either; but of the kernel nothing is known that matters."""
    old = {key: value for key, value in BEFORE.items() if key not in (lost, "kernel")}
    result = promise(old, BEFORE)
    assert (result.bits, result.against, result.unrecorded) == (False, (), (lost,))
    assert result.reasons == [f"not recorded by that step: {lost}"]


def test_the_first_form_names_six_variables_alone() -> None:
    """Another that is set here was perhaps not set then; one of an inner key is named whole."""
    old = {key: value for key, value in BEFORE.items() if key != "form"}
    old |= {"variables": {"MKL_CBWR": None}, "packages": {"torch": "2.13.0"}}
    here = _with("variables", {"KMP_DETERMINISTIC_REDUCTION": "1"})
    unrecorded = promise(old, here).unrecorded
    assert unrecorded == (
        *("packages.megatron-core", "packages.numpy"),
        "variables.KMP_DETERMINISTIC_REDUCTION",
    )
