"""Replaces layers of a loaded model of any architecture by faster ones.

Linear layers with the same input (q, k and v; gate and up) become one product. On CPUs, weights are packed once into
the layout of oneDNN's kernels, which halves the time of a small batch. Weights that bfloat16 represents exactly also
get a bfloat16 copy, for batches of a few rows (`narrow_product.py`). Plain RMSNorm modules become torch's fused
module. Modules keep their names and places, so the modelling code runs unchanged.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from tandem.engine.kernels.narrow_product import NarrowProduct, fits_bfloat16

# Children of a module that its forward calls with the same tensor, in this order. Other uses also give correct
# results, but more slowly: see `_FusedProduct`.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# Number of rows that weights are packed for. Measured within 3 % of the best layout from 1 to 512 rows.
_PACKED_FOR_ROWS = 32

# Limit of the bfloat16 copies. For larger models, memory is worth more than the speed of small batches.
_MAX_COPY_BYTES = 4 << 30

# Operators of torch.compile's CPU backend, which have no public names.
_PACK = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
_LINEAR = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
_HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001


def fuse(model: nn.Module, called: Collection[str]) -> int:
    """Replace layers in place, and return the number of products that replace the linear layers.

    Only plain `nn.Linear` layers are replaced; quantized layers have their own kernels.

    Args:
        called: Names of the modules that a forward calls. Other modules are not replaced, because code may read
            their weights directly and packed weights are opaque.
    """
    # Tied weights are packed once, for all layers that share them.
    packed: dict[tuple[int, int], Product] = {}
    num_products, is_small = 0, _copy_bytes(model) <= _MAX_COPY_BYTES
    # The list holds only parents, so that it does not keep the weights of replaced layers alive.
    parents = [each for each in model.named_modules() if type(each[1]) is not nn.Linear]
    for path, parent in parents:
        own = {name for name, _ in parent.named_children() if f"{path}.{name}".strip(".") in called}
        for names in SIBLINGS:
            children = [getattr(parent, name, None) for name in names if name in own]
            linears = [each for each in children if type(each) is nn.Linear]
            if len(linears) == len(names) and _can_join(linears):
                product = _FusedProduct(linears, is_small=is_small)
                for index, name in enumerate(names):
                    setattr(parent, name, _FusedLayer(product, index))
                num_products += 1
        for name, child in list(parent.named_children()):
            if name not in own:
                continue
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, _fused_norm(child))
            if type(child) is nn.Linear:
                bias: torch.Tensor | None = child.bias
                key = child.weight.data_ptr(), 0 if bias is None else bias.data_ptr()
                if key not in packed:
                    packed[key] = Product(child.weight, child.bias, is_small=is_small)
                setattr(parent, name, packed[key])
                num_products += 1
    return num_products


def _copy_bytes(model: nn.Module) -> int:
    weights = [each.weight for each in model.modules() if type(each) is nn.Linear]
    sizes = {each.data_ptr(): each.numel() for each in weights}
    return sum(sizes.values()) * torch.bfloat16.itemsize


def _fused_norm(norm: nn.Module) -> nn.Module:
    """Return an `nn.RMSNorm` equivalent to `norm`, or `norm` itself if it computes something else."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or weight.is_meta:
        return norm
    fused = nn.RMSNorm(weight.shape, eps)
    fused.weight = nn.Parameter(weight.detach(), requires_grad=False)
    # Some norms add one to the weight and some ignore it, so results are compared.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, *weight.shape, generator=generator).to(weight)
    with torch.inference_mode():
        is_same = torch.allclose(fused(rows).float(), norm(rows).float(), rtol=2e-2, atol=1e-5)
    return fused if is_same else norm


def _can_join(linears: Sequence[nn.Linear]) -> bool:
    first = linears[0]
    return all(
        linear.weight.dtype == first.weight.dtype
        and linear.in_features == first.in_features
        and (linear.bias is None) == (first.bias is None)
        for linear in linears
    )


def _can_pack(weight: torch.Tensor) -> bool:
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not has_library:
        return False
    is_bfloat16 = weight.dtype is torch.bfloat16
    has_bfloat16 = bool(_HAS_BFLOAT16())
    return weight.dtype is torch.float32 or (is_bfloat16 and has_bfloat16)


class Product(nn.Module):
    """x W^T + b. Not an `nn.Linear`, because the weight may be packed.

    Args:
        is_small: Whether memory allows a second copy of the weight for few rows.

    Attributes:
        weight: Tensor on the meta device, because some models query its type and shape.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_small: bool = True
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        weight = weight.detach()
        self.weight = weight.to("meta")
        self._is_packed = _can_pack(weight)
        # Not a parameter, because only this forward can read packed weights.
        self._weight = _PACK(weight.contiguous(), _PACKED_FOR_ROWS) if self._is_packed else weight
        self._narrow = NarrowProduct(weight, bias) if is_small and fits_bfloat16(weight) else None

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product. Shape (..., out_features)."""
        if self._narrow is not None and self._narrow.supports(rows):
            return self._narrow(rows)
        if not self._is_packed:
            return functional.linear(rows, self._weight, self.bias)
        out: torch.Tensor = _LINEAR(rows, self._weight, self.bias, "none", [], "")
        return out


class _FusedProduct:
    """One product for several layers. The result is kept from the call of the first layer to that of the last."""

    def __init__(self, linears: Sequence[nn.Linear], *, is_small: bool) -> None:
        self.sizes = [linear.out_features for linear in linears]
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        self.product = Product(torch.cat(weights), bias, is_small=is_small)
        self._rows: torch.Tensor | None = None
        self._outs: tuple[torch.Tensor, ...] = ()

    def take(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Return a layer's columns. The product is computed unless a sibling was just called with the same rows."""
        if self._rows is not rows:
            self._rows, self._outs = rows, self.product(rows).split(self.sizes, dim=-1)
        out = self._outs[index]
        if index == len(self.sizes) - 1:  # the last layer no longer needs the result
            self._rows, self._outs = None, ()
        return out


class _FusedLayer(nn.Module):
    """One of the layers that a `_FusedProduct` replaces.

    Attributes:
        shared: The product.
    """

    def __init__(self, shared: _FusedProduct, index: int) -> None:
        super().__init__()
        self.shared, self._index = shared, index
        self.weight = shared.product.weight

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the layer's output. Shape (..., out_features of the layer)."""
        return self.shared.take(rows, self._index)


def shared_product(layers: Sequence[nn.Module]) -> Product | None:
    """Return the product that replaces exactly these layers in this order, or None."""
    shared = [each.shared for each in layers if isinstance(each, _FusedLayer)]
    is_one = len(shared) == len(layers) == len(shared[0].sizes) and len({*map(id, shared)}) == 1
    return shared[0].product if is_one else None
