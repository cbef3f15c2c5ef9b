"""A program: four processes over gloo, each with its part of Megatron models, that give them back whole.

    python ranks.py FOLDER      each sub-folder of FOLDER is a model directory

Prints one JSON line per model and layout, from the first rank of every copy of the model.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import weakref
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from rank_streams import layout_here, stream_from_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weight_maps import to_megatron

from rollbook.ingest.engines.weights.digests import read_weights
from rollbook.store.errors import ModelError
from rollbook.train.megatron import cpu_device
from rollbook.train.megatron.model import build_module
from rollbook.train.megatron.reshard import RankLayout, rank_weights
from rollbook.train.megatron.shape import ModelShape, read_shape
from rollbook.train.megatron.weight_names import weight_shapes

WORLD = 4
LAYOUTS = ((2, 1, 1), (1, 2, 1), (2, 2, 2))
"""Tensor-, pipeline- and expert-tensor-parallel sizes; what is left of the four are copies of the model."""


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time, storages counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        given -= self._alive().keys()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in given:
                self._made[id(tensor)] = weakref.ref(tensor)
        self.peak = max(self.peak, sum(self._alive().values()))
        return result

    def _alive(self) -> dict[int, int]:
        tensors = [t for t in (ref() for ref in self._made.values()) if t is not None]
        return {_place(t): t.untyped_storage().nbytes() for t in tensors}


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _start(tensor: int, stages: int, expert_tensor: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        expert_tensor_parallel_size=expert_tensor,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def load(module: Any, weights: dict[str, torch.Tensor], shape: ModelShape, layout: RankLayout) -> None:
    """Put the rank's part in place; it is exactly what Megatron has on this rank."""
    own = dict(module.named_parameters())
    mine = dict(rank_weights(weights, shape, layout))
    assert {n: t.shape for n, t in mine.items()} == {n: p.shape for n, p in own.items()}
    with torch.no_grad():
        for name, tensor in mine.items():
            own[name].copy_(tensor)


def logits(module: Any, shape: ModelShape, layout: RankLayout) -> torch.Tensor | None:
    """Logits of a few tokens on the last stage, the vocabulary's parts put together; None on the others."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = torch.arange(18).view(2, 9) * 5 % shape.vocab
    if not layout.first:
        hidden = torch.empty(9, 2, shape.hidden)
        dist.recv(hidden, src=parallel_state.get_pipeline_model_parallel_prev_rank())
        module.set_input_tensor(hidden)
    with torch.no_grad():
        out = module.eval()(tokens, torch.arange(9).expand(2, 9), None)
    if not layout.last:
        dist.send(out.contiguous(), dst=parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return gather_from_tensor_model_parallel_region(out)[..., : shape.vocab]


def refused(
    held: dict[str, torch.Tensor], shape: ModelShape, layout: RankLayout, group: Any
) -> list[str | None]:
    """What every rank is told where the last one lacks a tensor."""
    missing = "decoder.layers.0.self_attention.linear_proj.weight"
    if layout.last and layout.tensor_rank == layout.tensor - 1:
        held = {name: tensor for name, tensor in held.items() if name != missing}
    said = None
    try:
        list(stream_from_ranks(held, shape, layout, group))
    except ModelError as error:
        said = str(error)
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, said, group=group)
    return told


def there_and_back(
    folder: Path, sizes: tuple[int, int, int], expected: dict[str, torch.Tensor]
) -> dict[str, Any] | None:
    """Spread a model, stream it back; what the first rank of the copy found.

    `expected` has the logits of the whole models, which this fills in where nothing is spread.
    """
    from megatron.core import parallel_state

    shape, weights = read_shape(folder), read_weights(folder)
    layout = layout_here(shape)
    module = build_module(shape, layout)
    load(module, weights, shape, layout)
    found = logits(module, shape, layout)
    if sizes == (1, 1, 1):
        assert found is not None
        expected[folder.name] = found
        return None
    gap = torch.tensor([0.0 if found is None else float((found - expected[folder.name]).abs().max())])
    held = {name: p.detach() for name, p in module.named_parameters()}
    group = parallel_state.get_model_parallel_group()
    names, wrong = [], []
    with LiveBytes() as live:
        for name, whole in stream_from_ranks(held, shape, layout, group):
            names.append(name)
            if not (whole.dtype == weights[name].dtype and torch.equal(whole, weights[name])):
                wrong.append(name)
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    refusals = refused(held, shape, layout, group)
    if dist.get_rank(group) != 0:
        assert names == []
        return None
    return {
        "model": folder.name,
        "sizes": sizes,
        "in_order": names == list(weight_shapes(shape)) and set(names) == set(weights),
        "wrong": wrong,
        "gap": float(gap),
        "refusals": refusals,
        "peak": live.peak,
        "largest": max(t.nbytes for t in to_megatron(weights, shape).values()),
    }


def run(rank: int, folder: Path) -> None:
    """One rank's work."""
    torch.set_num_threads(1)
    cpu_device.install()
    from megatron.core import parallel_state

    store = dist.FileStore(str(folder / "rendezvous"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    expected: dict[str, torch.Tensor] = {}
    for sizes in ((1, 1, 1), *LAYOUTS):
        _start(*sizes)
        for model in sorted(p for p in folder.iterdir() if p.is_dir()):
            if found := there_and_back(model, sizes, expected):
                os.write(1, json.dumps(found).encode() + b"\n")  # one write: ranks share the pipe
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Fork the ranks, after the long imports; 0 if all ended well."""
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(rank, folder)
                code = 0
            except BaseException:  # _exit would say nothing
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
