"""Linear layers over packed weights, put in the place of a loaded model's own.

torch packs a weight again at every call with few rows, which costs more than the multiplication.
Here it is packed once; the same layout serves any number of rows, so no second copy is kept.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.kernels import Kernels, packed_floats
from engine.memory import host_bytes


class PackedLinear(nn.Module):
    """`nn.Linear` in float32 on the CPU, through `Kernels.linear`. Inference only.

    A row's result does not depend on the other rows, to the bit.
    """

    def __init__(self, linear: nn.Linear, kernels: Kernels, packed: torch.Tensor) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._kernels = kernels
        self._packed = packed
        self._bias = None if linear.bias is None else linear.bias.detach().contiguous()
        kernels.pack(linear.weight.detach(), packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        rows = x.reshape(-1, self.in_features)
        out = self._kernels.linear(rows, self._packed, self.out_features, self._bias)
        return out.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, kernels: Kernels) -> int:
    """Replace every plain float32 `nn.Linear` in `model`; returns how many.

    Subclasses are left alone: they may compute something else. The original weights are freed,
    except where they are tied to something that stays (an embedding).
    """
    slots = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.float32
    ]
    sizes = [packed_floats(child.out_features, child.in_features) for _, _, child in slots]
    arena, _ = host_bytes(4 * sum(sizes))
    floats = arena.view(torch.float32)
    for size in sizes:
        parent, name, child = slots.pop(0)  # lets go of each weight as soon as it is packed
        setattr(parent, name, PackedLinear(child, kernels, floats[:size]))
        floats = floats[size:]
    return len(sizes)
