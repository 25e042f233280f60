"""A model's linear layers by oneDNN with weights packed for it, on the CPU.

They are faster than torch's own, and a row's bits do not depend on how many rows there are. The
operators are those that torch.compile uses for frozen weights.
"""

from __future__ import annotations

import torch

from kvplane.transformers import absorbed


class PackedLinear(torch.nn.Module):
    """``torch.nn.Linear`` without gradients. ``weight`` has its shape and type, and no memory."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(linear.weight.detach().to("meta"), requires_grad=False)
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out


def pack_linears(model: torch.nn.Module) -> int:
    """Pack the weights of a model's linear layers, those of a type that oneDNN computes with on
    this machine, but for those that are absorbed. Returns how many were packed.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear
        and _is_served(child.weight)
        and not absorbed.is_projection(parent, name)
    ]
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear))
    return len(found)


def _is_served(weight: torch.Tensor) -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not has_onednn:
        return False
    if weight.dtype == torch.float32:
        return True
    served = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return weight.dtype in served and bool(served[weight.dtype]())
