"""The fingerprint of an environment: what it tells of, what it costs, and how two of them differ."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import Json, RunOpened, StepPlanned
from rollbook.train import environment as computing
from rollbook.train import source_files
from rollbook.train.environment import differences, fingerprint, kept_variables, unrecorded
from rollbook.train.source_files import ROOMS, file_digests


class Killed(BaseException):
    """The process ends here."""


CPU = torch.device("cpu")
DATA = Path(__file__).parents[1] / "data"

ELSEWHERE = """
import sys, orjson, torch
from rollbook.replay.step import from_checkpoint, step
from rollbook.train.environment import fingerprint
from rollbook.train.source_files import file_digests
torch.set_num_threads(int(sys.argv[1]))
torch.use_deterministic_algorithms(sys.argv[2] == "True")
ran = [m for m in sys.modules if m.startswith(("rollbook.train.", "rollbook.ingest."))]
print(orjson.dumps([fingerprint(torch.device("cpu")), file_digests(), ran]).decode())
"""


@pytest.fixture(scope="module")
def here() -> Json:
    """The fingerprint of this process."""
    return fingerprint(CPU)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A folder with a copy of Rollbook in which every loss is halved, and a file was added."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("bench", "demo")
    copied = shutil.copytree(root / "src" / "rollbook", folder / "rollbook", ignore=ignored)
    with (copied / "train" / "algorithms" / "surrogates.py").open("a") as file:
        file.write("SURROGATES = {n: lambda *of, f=f: f(*of) / 2 for n, f in SURROGATES.items()}\n")
    (copied / "store" / "fold" / "another.py").write_text('"""Folds."""\n')
    return folder


def _run(copy: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(copy)} | variables
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def edited(copy: Path) -> list[Any]:
    """Fingerprint, files and modules of a process that runs the copy, and whose threads the load decides."""
    words = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    done = _run(copy, "-c", ELSEWHERE, *words, OMP_DYNAMIC="true", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    changes: list[Any] = orjson.loads(done.stdout)
    return changes


# What it tells of ---------------------------------------------------------------------------------


def test_an_edited_source_and_a_variable_are_named(here: Json, edited: list[Any]) -> None:
    """By room in a step's fingerprint; by file where both sides have their files."""
    there, files, _ = edited
    set_elsewhere = {key: value for key, value in there["variables"].items() if key != "OMP_DYNAMIC"}
    now = here | {"variables": set_elsewhere}
    changes = differences(there, now)
    assert [change.key for change in changes] == [
        "sources.algorithms",
        "sources.fold",
        "variables.OMP_DYNAMIC",
    ]
    assert [(change.recorded, change.here) for change in changes][2] == ("true", None)
    assert {change.matters for change in changes} == {"bits"}
    by_file = differences(there | {"files": files}, now | {"files": file_digests()})
    named = {change.key: change.here for change in by_file if change.key.startswith("files.")}
    assert list(named) == ["files.algorithms.surrogates.py", "files.fold.another.py"]
    assert named["files.fold.another.py"] is None
    assert named["files.algorithms.surrogates.py"] == file_digests()["algorithms"]["surrogates.py"]


def test_what_a_step_runs_is_in_a_room(edited: list[Any]) -> None:
    """Every module of train and ingest that replay imports, but for the code of addresses and clocks."""
    places = [place.replace("/", ".").removesuffix(".py") for room in ROOMS.values() for place in room]
    beside = {
        *("rollbook.train.clock", "rollbook.store.config", "rollbook.engines"),
        *("rollbook.engines.address", "rollbook.engines.model_files"),
    }
    ran = {name for name in edited[2] if name not in beside}
    assert len(ran) > 60
    assert {n for n in ran if not n.removeprefix("rollbook.").startswith(tuple(places))} == set()


def test_megatron_as_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is of the files themselves: a version stays what it was when one is edited."""
    first = tmp_path / "one" / "megatron" / "core"
    first.mkdir(parents=True)
    for name in ("__init__.py", "loss.py"):
        (first / name).write_text("x = 1\n")
    digests = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (first / "loss.py").write_text(text)
        spec = type("Spec", (), {"origin": str(first / "__init__.py")})
        with monkeypatch.context() as patch:
            patch.setattr(source_files.importlib.util, "find_spec", lambda name, spec=spec: spec)
            digests.append(source_files.source_digests.__wrapped__()["megatron-core"])
    assert digests[0] == digests[2] != digests[1]


def test_its_size_and_cost(here: Json) -> None:
    """A step keeps some 1 kB of it, a training's start 6 kB more; the second takes no time."""
    assert len(orjson.dumps(here)) < 1500
    assert 3000 < len(orjson.dumps(file_digests())) < 12_000
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        fingerprint(CPU)
        times.append(time.perf_counter() - begun)
    assert min(times) < 1e-3


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        *((name, "1", "1") for name in ("OMP_DYNAMIC", "KMP_DETERMINISTIC_REDUCTION", "MKL_CBWR")),
        *((name, "x", "x") for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")),
        *((name, "0", "0") for name in ("OPENBLAS_CORETYPE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")),
        *((name, "1", "1") for name in ("TORCHDYNAMO_DISABLE", "PYTORCH_JIT", "NVIDIA_TF32_OVERRIDE")),
        *((name, ":4096:8", ":4096:8") for name in ("CUBLAS_WORKSPACE_CONFIG",)),
        *((name, "Ring", "Ring") for name in ("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUDA_X")),
        ("NPY_DISABLE_CPU_FEATURES", "AVX2", "AVX2"),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2", "glibc.cpu.hwcaps=-AVX2"),
        ("NCCL_TUNER_PLUGIN", "/opt/x.so", "sha256 1bcfbb294da94cec"),
        ("CUDA_Y", "y" * 500, "sha256 a730708b6f663849"),
        *((name, "4", None) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")),
        *((name, "/x", None) for name in ("TORCH_HOME", "CUDA_PATH", "TORCHINDUCTOR_CACHE_DIR", "CUDA_HOME")),
        *((name, "x", None) for name in ("NCCL_SOCKET_IFNAME", "NCCL_COMM_ID", "TORCH_HUB_TOKEN")),
        *((name, "x", None) for name in ("NCCL_DEBUG", "TORCH_LOGS", "ONEDNN_VERBOSE", "OMP_DISPLAY_ENV")),
        *((name, "1", None) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_VERSION", "TORCH_CUDA_ARCH_LIST")),
        *((name, "1", None) for name in ("HOME", "PATH", "COMPUTE", "XOMP_DYNAMIC", "AWS_SECRET_ACCESS_KEY")),
    ],
)
def test_variables(name: str, value: str, kept: str | None) -> None:
    """Those that numerical libraries obey, but none that says a number of threads, a place, a secret, or what
    to print; what may hold a path, or is long, as a digest."""
    assert kept_variables({name: value}) == ({} if kept is None else {name: kept})


def test_threads_and_flags_are_those_of_now(here: Json) -> None:
    """What torch was told since is told: its threads, those of OpenMP and MKL, how products are rounded, and
    whether small numbers are taken for 0."""
    before, precision = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.set_num_threads(before + 1)
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.set_flush_denormal(True)
        changes = {
            change.key: (change.recorded, change.here) for change in differences(here, fingerprint(CPU))
        }
    finally:
        torch.set_flush_denormal(False)
        torch.backends.mkldnn.matmul.fp32_precision = precision
        torch.set_num_threads(before)
    counts = dict.fromkeys(("threads", "threading.omp", "threading.mkl"), (before, before + 1))
    assert changes == counts | {
        "flags.onednn_matmul": ("ieee", "bf16"),
        "flags.flush_denormals": (False, True),
    }
    assert differences(here, fingerprint(CPU)) == []


def test_libraries_are_named(here: Json) -> None:
    """As torch tells of them, not by a digest alone."""
    built = torch.__config__.show()
    assert f"BLAS_INFO={here['libraries']['blas']}" in built
    assert f"MKL-DNN v{here['libraries']['onednn']} " in built
    assert re.fullmatch(r"glibc 2\.\d+", here["libraries"]["libc"])


def test_a_processor_that_hides_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux's names of the first processor; without any, what Python knows."""
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Abacus\nflags\t\t: fpu fma avx2 sse4_1 amx_bf16 rdpid\n\n")
    monkeypatch.setattr(computing, "_CPUINFO", file)
    assert (computing.processor(), computing.instructions()) == ("Abacus", "sse4_1 avx2 fma amx_bf16")
    file.write_text("processor\t: 0\nFeatures\t: fp asimd sve bf16\n\n")
    assert computing.instructions() == "asimd sve bf16"
    file.unlink()
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert (computing.processor(), computing.instructions()) == ("arm", "")


# Differences --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "now", "key", "matters"),
    [
        ({"packages": {"torch": "2"}}, {"packages": {"torch": "3"}}, "packages.torch", "bits"),
        ({"packages": {"transformers": "2"}}, {}, "packages.transformers", "nothing known"),
        ({"python": "3.11.7"}, {"python": "3.11.9"}, "python", "nothing known"),
        ({"python": "3.11.7"}, {"python": "3.12.7"}, "python", "bits"),
        ({"device": "cuda:0"}, {"device": "cuda:1"}, "device", "nothing known"),
        ({"device": "cuda:0"}, {"device": "cpu"}, "device", "bits"),
        ({"rollbook": "1", "sources": {}}, {"rollbook": "2"}, "rollbook", "nothing known"),
        ({"rollbook": "1"}, {"rollbook": "2"}, "rollbook", "bits"),
        ({"parallel": {"data": 1}}, {"parallel": {"data": 1, "expert": 2}}, "parallel.expert", "bits"),
        ({"parallel": {"data": 1}}, {}, "parallel.data", "bits"),
        ({"form": 2}, {"variables": {"OMP_PLACES": "cores"}}, "variables.OMP_PLACES", "nothing known"),
        ({"form": 2}, {"variables": {"TORCH_NCCL_X": "1"}}, "variables.TORCH_NCCL_X", "nothing known"),
        ({"form": 2}, {"variables": {"OMP_DYNAMIC": "1"}}, "variables.OMP_DYNAMIC", "bits"),
        ({"variables": {"MKL_CBWR": None}}, {"variables": {"MKL_CBWR": "1"}}, "variables.MKL_CBWR", "bits"),
        ({"variables": {"MKL_CBWR": "1"}}, {"variables": {}}, "variables.MKL_CBWR", "bits"),
        ({"unheard of": 1}, {}, "unheard of", "bits"),
    ],
)
def test_one_difference(recorded: Json, now: Json, key: str, matters: str) -> None:
    """Its key, its values, and what it may change."""
    (difference,) = differences(recorded, now)
    assert (difference.key, difference.matters) == (key, matters)
    assert str(difference).startswith(f"{key}: recorded {difference.recorded!r}, here {difference.here!r}")
    assert str(difference).endswith("(not known to change bits)") == (matters == "nothing known")


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        ({}, {"sources": {"loop": "1"}}),
        ({"packages": {"torch": "2"}}, {"packages": {"torch": "2", "numpy": "2"}}),
        ({"variables": {"MKL_CBWR": None}}, {"form": 2, "variables": {}}),
        ({"variables": {"MKL_CBWR": None}}, {"form": 2, "variables": {"OMP_DYNAMIC": "1"}}),
        ({}, {"parts": {"a:b": "1"}}),
        ({}, {"parallel": {"data": 1}}),
    ],
)
def test_what_was_not_recorded_is_no_difference(recorded: Json, now: Json) -> None:
    """A key of a later release, and a variable of which the first form says nothing."""
    assert differences(recorded, now) == []


def test_fingerprints_of_earlier_releases(here: Json) -> None:
    """One of the release before, and those of golden stores: only what they say is compared."""
    keys = ("rollbook", "python", "platform", "packages", "torch_build", "processor", "cpu_capability")
    rest = ("device", "threads", "dtype", "deterministic", "parallel")
    six = {name: os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "NCCL_ALGO")}
    old = {key: here[key] for key in (*keys, *rest)} | {"variables": six}
    assert differences(old, here) == []
    missing = unrecorded(old, here)
    assert {"sources", "libraries", "instructions", "threading", "flags"} <= set(missing)
    assert "kernel" not in missing
    assert [each.key for each in differences(old | {"processor": "abacus"}, here)] == ["processor"]
    stores = [path for path in DATA.glob("format-*") if path.is_dir()]
    plans = [e.record for path in stores for e in rb.open(path).events_of([StepPlanned.KIND])]
    recorded = [plan.environment for plan in plans if isinstance(plan, StepPlanned)]
    assert len(recorded) > 5
    for each in recorded:
        assert [d.key for d in differences(each, here)] == sorted(each)


_NAMES = st.sampled_from(["a", "b", "variables", "parallel", "packages"])
_VALUES = st.none() | st.integers(0, 2) | st.text(max_size=2) | st.lists(st.integers(0, 1), max_size=2)
_PRINTS = st.dictionaries(_NAMES, _VALUES | st.dictionaries(st.sampled_from("xyz"), _VALUES))


@settings(max_examples=60)
@given(_PRINTS, _PRINTS)
def test_differences_of_any_two(one: Json, other: Json) -> None:
    """None to itself; each has two values, and its key once; equal values are none."""
    assert differences(one, one) == []
    changes = differences(one | {"form": 2}, other)
    assert [d.key for d in changes] == sorted({d.key for d in changes})
    assert all(d.recorded != d.here for d in changes)


# Where they are told ------------------------------------------------------------------------------


@pytest.mark.more
def test_a_resume_names_the_edited_file(recorded: Callable[..., Store], copy: Path, tmp_path: Path) -> None:
    """A loss that was edited since is found by the step that runs again, and its file is named."""
    log = recorded()
    config = fabric.config(fabric.GRPO, steps=2, checkpoint_every=5)
    with fabric.killed_at(1, Killed):
        fabric.train(log, config)
    starts = [e.record for e in log.events_of([RunOpened.KIND]) if isinstance(e.record, RunOpened)]
    assert [start.environment["files"] for start in starts] == [file_digests()]
    file = tmp_path / "config.toml"
    file.write_text(fabric.toml(config))
    done = _run(copy, "-m", "rollbook", "train", file, "--store", log.path)
    assert done.returncode == 2
    err = " ".join(done.stderr.split())
    assert "running step 0 again differs in losses. What may change bits here: " in err
    assert "files.algorithms.surrogates.py: recorded " in err
    assert "sources.algorithms: recorded " in err
    assert "files.loop" not in err
