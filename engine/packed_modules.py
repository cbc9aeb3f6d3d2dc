"""Faster stand-ins for a loaded model's modules: the same function, float32, on the CPU.

torch packs a linear layer's weight again at every call with few rows, which costs more than the
multiplication; here it is packed once, and the same layout serves any number of rows, so no second
copy is kept. Norms and gated MLPs take many small torch operations; here they are one pass each.
Nothing is replaced by its name alone: a stand-in for a norm or an MLP is tried on random inputs
first and must agree with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from engine.kernels import Kernels, LinearWeights, NormWeights, packed_floats
from engine.memory import FloatArena


class PackedLinear(nn.Module):
    """One or several `nn.Linear` of one input, side by side, through `Kernels.linear`.

    A row's result does not depend on the other rows, to the bit.
    """

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels, arena: FloatArena) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self._kernels = kernels
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._packed = arena.take(packed_floats(self.out_features, self.in_features))
        kernels.pack(weight, self._packed)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None

    @property
    def pointers(self) -> LinearWeights:
        """Where the weights lie; valid as long as this module."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return LinearWeights(self._packed.data_ptr(), bias, self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        rows = x.reshape(-1, self.in_features)
        out = self._kernels.linear(rows, self._packed, self.out_features, self._bias)
        return out.view(*x.shape[:-1], self.out_features)


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self._weight = weight
        self._eps = eps
        self._kernels = kernels

    @property
    def pointers(self) -> NormWeights:
        """Where the weight lies; valid as long as this module."""
        return NormWeights(self._weight.data_ptr(), self._eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., dim]`."""
        return self._kernels.rms_norm(x.contiguous(), self._weight, self._eps)


class FusedGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one multiplication."""

    def __init__(
        self, linears: tuple[nn.Linear, nn.Linear, nn.Linear], kernels: Kernels, arena: FloatArena
    ) -> None:
        super().__init__()
        gate, up, down = linears
        self.gate_up = PackedLinear([gate, up], kernels, arena)
        self.down = PackedLinear([down], kernels, arena)
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., hidden]` to the same shape."""
        down: torch.Tensor = self.down(self._kernels.silu_mul(self.gate_up(x)))
        return down


def replace_modules(model: nn.Module, kernels: Kernels) -> None:
    """Put stand-ins in the place of norms, gated MLPs and linear layers, in that order.

    Weights are freed as they are packed, except where they are tied to something that stays (an
    embedding). Subclasses of `nn.Linear` are left alone: they may compute something else.
    """
    _replace(model, lambda child: fused_norm(child, kernels))
    arena = FloatArena()
    _replace(model, lambda child: fused_mlp(child, kernels, arena))
    _replace(model, lambda child: _packed_linear(child, kernels, arena))


def _replace(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    for parent, name in list(_slots(model)):
        stand_in = make(getattr(parent, name))
        if stand_in is not None:
            setattr(parent, name, stand_in)


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for parent in model.modules():
        for name, _ in parent.named_children():
            yield parent, name


def plain_linear(module: object) -> nn.Linear | None:
    """Return `module` if it is nothing but a float32 linear layer."""
    if type(module) is nn.Linear and module.weight.dtype == torch.float32:
        return module
    return None


def _packed_linear(module: nn.Module, kernels: Kernels, arena: FloatArena) -> PackedLinear | None:
    linear = plain_linear(module)
    return None if linear is None else PackedLinear([linear], kernels, arena)


def fused_norm(norm: nn.Module, kernels: Kernels) -> FusedRMSNorm | None:
    """Return a stand-in for an RMS norm with weight w or, as in Gemma, 1 + w; else None."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    if weight.ndim != 1 or weight.dtype != torch.float32:
        return None
    for full in (weight.detach(), 1.0 + weight.detach()):
        stand_in = FusedRMSNorm(full, float(eps), kernels)
        if _agrees(stand_in, norm, len(weight)):
            return stand_in
    return None


def fused_mlp(mlp: nn.Module, kernels: Kernels, arena: FloatArena) -> FusedGatedMLP | None:
    """Return a stand-in for a SiLU-gated MLP of plain linear layers, else None."""
    if not type(mlp).__name__.endswith("MLP"):
        return None
    gate, up, down = (
        plain_linear(getattr(mlp, name, None)) for name in ("gate_proj", "up_proj", "down_proj")
    )
    if gate is None or up is None or down is None or (gate.bias is None) != (up.bias is None):
        return None
    if type(getattr(mlp, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    stand_in = FusedGatedMLP((gate, up, down), kernels, arena)
    return stand_in if _agrees(stand_in, mlp, gate.in_features) else None


@torch.inference_mode()
def _agrees(stand_in: nn.Module, original: nn.Module, width: int) -> bool:
    """Whether both give the same on random rows."""
    rows = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))
    return same_up_to_rounding(stand_in(rows), original(rows))


def same_up_to_rounding(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two ways of computing a layer differ by no more than float32 rounding."""
    tolerance = 1e-5 * float(expected.abs().max())
    return torch.allclose(result, expected, rtol=1e-4, atol=tolerance)
