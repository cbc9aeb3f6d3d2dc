"""Stand-ins for a model's modules: taken only where they compute the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from engine.packed_modules import FusedGatedMLP, FusedRMSNorm, PackedLinear, replace_modules
from tests.engine.test_kernels import kernels_or_skip
from tests.engine.tiny_models import CONFIGS, build


def kinds(model):
    return Counter(type(module) for module in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_a_model_with_stand_ins_gives_the_same_logits(name):
    model = build(CONFIGS[name])
    tokens = torch.arange(3, 40)[None]
    expected = model(tokens).logits
    replace_modules(model, kernels_or_skip("generic"))
    assert torch.allclose(model(tokens).logits, expected, atol=1e-3)
    found = kinds(model)
    assert nn.Linear not in found
    assert not any("RMSNorm" in kind.__name__ for kind in found if kind is not FusedRMSNorm)
    gated = 0 if name.startswith("gemma") else CONFIGS[name].num_hidden_layers  # gelu there
    assert found[FusedGatedMLP] == gated


class OddRMSNorm(nn.Module):
    """Named like the real ones, with another formula."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.eps = 1e-6

    def forward(self, x):
        return x / x.abs().max(-1, keepdim=True).values * self.weight


class OddMLP(nn.Module):
    """Named and built like the real ones, with another formula."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class OwnLinear(nn.Linear):
    """Computes something else than its parent."""

    def forward(self, input):
        return super().forward(input) + 1.0


@torch.inference_mode()
def test_modules_that_only_look_alike_are_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(OddRMSNorm(), OddMLP(), OwnLinear(16, 8), nn.Linear(8, 4).bfloat16())
    x = torch.randn(5, 16)
    expected = model[:3](x)
    replace_modules(model, kernels_or_skip("generic"))
    assert torch.allclose(model[:3](x), expected, atol=1e-5)
    assert [type(module) for module in model] == [OddRMSNorm, OddMLP, OwnLinear, nn.Linear]
    assert kinds(model)[PackedLinear] == 3  # those inside the MLP
