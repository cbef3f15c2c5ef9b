"""What layers differ in from Megatron's, held against transformers' parts one by one."""

from __future__ import annotations

import pytest
import torch

from rollbook.train.model import cpu_device
from rollbook.train.model.shape import Yarn


@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize(
    ("theta", "width", "original"), [(150000.0, 64, 4096), (1e4, 16, 48), (1e4, 32, 10**9)]
)
def test_frequencies_of_yarn(theta: float, width: int, original: int, truncated: bool) -> None:
    """Those of gpt-oss itself, of a ramp at the very beginning, and of one beyond the end."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    cpu_device.install()
    from rollbook.train.model.layer import yarn_frequencies

    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": original}
    rope |= {"beta_fast": 30.0, "beta_slow": 2.0, "truncate": truncated, "rope_theta": theta}
    theirs = GptOssRotaryEmbedding(GptOssConfig(head_dim=width, rope_parameters=rope)).inv_freq
    ours = yarn_frequencies(Yarn(32.0, original, 30.0, 2.0, truncated), theta, width)
    assert torch.equal(ours, theirs)
