"""Builds the Megatron-core model, data-parallel wrapper and optimizer, on CPU (gloo) or GPU (nccl)."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.store.errors import ModelError
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import LoraConfig
from rollbook.train.interface import stay_on_this_host
from rollbook.train.model import cpu_device
from rollbook.train.model.optimizer_slices import main_of
from rollbook.train.model.packed import OutputPlaces
from rollbook.train.model.reshard import RankLayout, check_layout, equal_stages
from rollbook.train.model.score_head import ScoreHead
from rollbook.train.model.shape import ModelShape

# Before CUDA is first used: these change bits on a GPU, so a replayable run sets them from step 0.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NCCL_ALGO", "Ring")
# megatron compiles its fused functions by default; compiled kernels differ between machines.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


# Silences Megatron's repeated warnings that Apex and TransformerEngine, which are not used, are missing.
warnings.filterwarnings("ignore", module=r"megatron\.")


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Megatron keeps the input of each layer alone."""


@dataclass(frozen=True, slots=True)
class Build:
    """How a policy computes.

    Attributes:
        steps: that the schedule of its learning rate spans.
        seed: of the weights that it has before any are loaded.
        threads: of torch, on the CPU.
        dtype: of weights and activations: float32, or bfloat16, with float32 main weights and
            gradients.
        recompute: whether activations are computed again in the backward pass instead of kept.
        sequence: whether ranks that share each tensor share the tokens, too.
        distributed_optimizer: whether data-parallel copies share the optimizer's state.
        lora: the low-rank factors that are trained in place of its weights; None: the weights
            are.
        trains: whether it is trained; else it has neither gradients nor an optimizer.
        flash: whether attention of packed samples is that of `varlen`.
    """

    steps: int
    device: torch.device
    seed: int
    threads: int
    dtype: str = "float32"
    recompute: bool = False
    sequence: bool = False
    distributed_optimizer: bool = False
    lora: LoraConfig | None = None
    trains: bool = True
    flash: bool = False

    @property
    def type(self) -> torch.dtype:
        """The type of weights and activations, as a torch dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(slots=True)
class MegatronParts:
    """A rank's part of a model: the bare module, its data-parallel wrapper and the optimizer, if it
    is in training; its layout and device, the places that its output layer computes, and its
    low-rank factors, if it is trained by them."""

    module: Any
    wrapped: Any
    optimizer: Any
    layout: RankLayout
    device: torch.device
    output_places: OutputPlaces
    adapters: Sequence[Any] = ()

    @property
    def optimizers(self) -> list[Any]:
        """Megatron's optimizers: one, and another for experts where they are spread over ranks."""
        if self.optimizer is None:
            return []
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))


def choose_device(wanted: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def start_ranks(device: torch.device, seed: int) -> None:
    """Initialize Megatron's groups, of this process alone unless `Ranks` made others, and its
    random state."""
    if device.type == "cpu":
        cpu_device.install()
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        stay_on_this_host()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def layout_here(shape: ModelShape, *, sequence: bool = False) -> RankLayout:
    """The layout of this process in Megatron's groups, stages of equal depth.

    Raises:
        ModelError: the model cannot be split so.
    """
    from megatron.core import parallel_state as ranks

    layout = RankLayout(
        stages=equal_stages(shape.layers, ranks.get_pipeline_model_parallel_world_size()),
        stage=ranks.get_pipeline_model_parallel_rank(),
        tensor=ranks.get_tensor_model_parallel_world_size(),
        tensor_rank=ranks.get_tensor_model_parallel_rank(),
        expert_tensor=ranks.get_expert_tensor_parallel_world_size(),
        spread=ranks.get_expert_model_parallel_world_size(),
        expert_rank=ranks.get_expert_model_parallel_rank(),
        copy=ranks.get_data_parallel_rank(),
        expert_copy=ranks.get_expert_data_parallel_rank(),
        sequence=sequence,
    )
    check_layout(shape, layout)
    return layout


def set_deterministic(threads: int) -> None:
    """Use deterministic kernels and a fixed number of threads, from the first step on."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only helps to find reads of it; it took a quarter of a small model's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def build(
    shape: ModelShape,
    optimizer: OptimizerConfig,
    how: Build,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> MegatronParts:
    """Build this rank's part of a model as megatron's GPTModel, with megatron's DDP and Adam.

    Args:
        weights: that it takes over, under Megatron's names, where they are in memory; None: it has its own.
    """
    set_deterministic(how.threads)
    start_ranks(how.device, how.seed)
    layout = layout_here(shape, sequence=how.sequence)
    module = build_module(shape, layout, how.type, recompute=how.recompute, empty=weights is not None)
    if weights is not None:
        _take_over(module, weights)
    adapters: Sequence[Any] = ()
    if how.lora is not None:
        from rollbook.train.model.adapter import adapt

        adapters = adapt(module, shape, how.lora, layout)
    module = module.to(how.device)
    if not how.trains:
        return MegatronParts(module, module, None, layout, how.device, _places(module, layout))
    parts = _wrap(module, layout, optimizer, how)
    parts.adapters = adapters
    return parts


def _take_over(module: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights in the places of a module's parameters, whose marks they get; none is copied."""
    for name, parameter in [*module.named_parameters()]:
        owner, _, own = name.rpartition(".")
        taken = torch.nn.Parameter(weights[name])
        vars(taken).update(vars(parameter))
        setattr(module.get_submodule(owner), own, taken)


def build_module(
    shape: ModelShape,
    layout: RankLayout,
    dtype: torch.dtype = torch.float32,
    *,
    recompute: bool = False,
    empty: bool = False,
) -> Any:
    """Build a rank's part of megatron's GPTModel (local spec); megatron's groups are as `layout`
    says.

    Args:
        empty: its parameters have shapes alone, and no memory.

    Raises:
        ModelError: the model cannot be split so, or its stages are not of one depth.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from rollbook.train.model.layer import complete, layer_of, norm_of

    check_layout(shape, layout)
    config = _transformer_config(shape, layout, dtype, recompute=recompute)
    if len(set(layout.stages)) > 1:
        raise ModelError(f"pipeline stages of {list(layout.stages)} layers are not built: take equal ones")
    layers = [layer_of(shape)] * layout.stages[layout.stage]
    with torch.device("meta") if empty else contextlib.nullcontext():
        module = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layers, norm_of(shape)),
            vocab_size=shape.padded_vocab,
            max_sequence_length=shape.context,
            pre_process=layout.first,
            post_process=layout.last,
            share_embeddings_and_output_weights=shape.tied and not shape.scores,
            parallel_output=False,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta),
            seq_len_interpolation_factor=None if shape.rope_factor == 1.0 else shape.rope_factor,
        )
    complete(module, shape, layout)
    if shape.scores and layout.last:
        module.output_layer = ScoreHead(shape.hidden, shape.scores)
    for parameter in module.parameters():  # norms are float32 whatever the config says
        parameter.data = parameter.data.to(dtype)
    return module


def _transformer_config(shape: ModelShape, layout: RankLayout, dtype: torch.dtype, *, recompute: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rollbook.train.model.layer import gate_of

    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=gate_of(shape),
        add_bias_linear=shape.biases,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        deterministic_mode=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_model_parallel_size=len(layout.stages),
        variable_seq_lengths=len(layout.stages) > 1,
        moe_token_dispatcher_type="alltoall",
        **(RECOMPUTED if recompute else {}),
        **_window_config(shape),
        **_expert_config(shape, layout),
    )
    if shape.yarn is not None:  # Megatron computes from it what queries and keys are scaled by
        vars(config).update(yarn_rotary_scaling_factor=shape.yarn.factor)
    return config


def _window_config(shape: ModelShape) -> dict[str, Any]:
    """The layers with a window and its size in tokens before the own; and what differs in the
    scores: their scale, and whether each head has a sink."""
    options: dict[str, Any] = {}
    if shape.windows is not None:
        options = {"window_size": (shape.windows.size - 1, 0)}
        options["window_attn_skip_freq"] = [int(windowed) for windowed in shape.windows.layers]
    if shape.sinks:
        options["softmax_type"] = "learnable"
    if shape.query_scalar is not None:
        options["softmax_scale"] = shape.query_scalar**-0.5
    return options


def _expert_config(shape: ModelShape, layout: RankLayout) -> dict[str, Any]:
    """The settings that make megatron's mixture of experts that of Qwen3-MoE or of gpt-oss: no
    dropped tokens, no loss of its own.

    Renormalized weights are the softmax over the chosen experts' logits only, which is how
    megatron computes them; the others are the softmax over all experts.
    """
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_pre_softmax": not experts.renormalized,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "activation_func_clamp_value": experts.limit,
        "glu_linear_offset": 0.0 if experts.limit is None else 1.0,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "expert_model_parallel_size": layout.spread,
    }


def _wrap(module: Any, layout: RankLayout, wanted: OptimizerConfig, how: Build) -> MegatronParts:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    config, distributed = module.config, how.distributed_optimizer
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed
    )
    wrapped = DistributedDataParallel(config, ddp, module)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=wanted.lr,
            min_lr=wanted.min_lr,
            weight_decay=wanted.weight_decay,
            adam_beta1=wanted.betas[0],
            adam_beta2=wanted.betas[1],
            adam_eps=wanted.eps,
            clip_grad=wanted.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
        ),
        [wrapped],
    )
    if wanted.name == "muon":
        inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        inner.optimizer = MuonBesideAdam(inner.optimizer, module, wanted)
    return MegatronParts(module, wrapped, optimizer, layout, how.device, _places(module, layout))


def _places(module: Any, layout: RankLayout) -> OutputPlaces:
    return OutputPlaces(getattr(module, "output_layer", None), sequence=layout.sequence)


# Muon for the matrices of the hidden layers, beside Adam for all else.

LAYERS = "decoder.layers."
"""What Megatron's names of hidden layers begin with."""


class MuonBesideAdam:
    """Two optimizers as one: they share their state, and their parameter groups are concatenated.

    Muon takes the matrices of hidden layers; embeddings, the output layer or score head, norms
    and biases stay with Adam (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982). Its step
    is scaled to the root mean square of Adam's (section 2.2 there), so both have one learning
    rate and one weight decay. Matrices that Megatron holds as one, such as those of queries,
    keys and values, are orthogonalized as one.
    """

    def __init__(self, adam: torch.optim.Optimizer, module: torch.nn.Module, wanted: OptimizerConfig) -> None:
        named = module.named_parameters()
        matrices = {main_of(p) for name, p in named if name.startswith(LAYERS) and p.dim() == 2}
        groups: list[dict[str, Any]] = []
        for group in adam.param_groups:
            groups.append(
                {key: value for key, value in group.items() if key not in adam.defaults}
                | {"params": [p for p in group["params"] if p in matrices]}
            )
            group["params"] = [p for p in group["params"] if p not in matrices]
        self._adam = adam
        self._muon = torch.optim.Muon(
            [group for group in groups if group["params"]],
            lr=wanted.lr,
            weight_decay=wanted.weight_decay,
            momentum=wanted.muon_momentum,
            ns_steps=wanted.muon_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        self._muon.state = adam.state

    @property
    def state(self) -> Any:
        """The state of all parameters."""
        return self._adam.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Adam's, then Muon's."""
        return [*self._adam.param_groups, *self._muon.param_groups]

    def step(self) -> None:
        """Take a step with the gradients in place."""
        self._adam.step()
        self._muon.step()
