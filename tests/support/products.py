"""Operands of scaled FP8 products, and their exact results in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8dist_kernels.reference.matmuls import Scaling
from tests.support.devices import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))


@dataclass(frozen=True)
class Product:
    """Arguments of a product, on the device."""

    a: Tensor
    b: Tensor
    inv_scale_a: Tensor
    inv_scale_b: Tensor
    scaling: Scaling
    bias: Tensor | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a, self.b, self.inv_scale_a, self.inv_scale_b

    def exact(self, magnitudes: bool = False) -> Tensor:
        """Return [m, n] in float64, on the CPU. With ``magnitudes``: the product of |a| and |b|, without bias."""
        wide = 32 if self.scaling is Scaling.MX else 128
        a = _spread(self.a, self.inv_scale_a, 1, wide)
        b = _spread(self.b, self.inv_scale_b, 128 if self.scaling is Scaling.BLOCKWISE else 1, wide)
        if magnitudes:
            return a.abs() @ b.abs().T
        return a @ b.T if self.bias is None else a @ b.T + self.bias.cpu().double()


def shapes_of_scales(m: int, n: int, k: int, scaling: Scaling) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of both inverse scales."""
    blocks = (k + 127) // 128
    return {
        Scaling.TENSORWISE: ((), ()),
        Scaling.ROWWISE: ((m, 1), (n, 1)),
        Scaling.BLOCKWISE: ((m, blocks), ((n + 127) // 128, blocks)),
        Scaling.BLOCKWISE_1D: ((m, blocks), (n, blocks)),
        Scaling.MX: ((m, k // 32), (n, k // 32)),
    }[scaling]


def small_integers(
    m: int, n: int, k: int, scaling: Scaling, pair: tuple[torch.dtype, torch.dtype] = PAIRS[0], biased: bool = False
) -> Product:
    """Return integers up to 2 with power-of-two scales: any order of additions is exact in float32, and in the
    accumulators of FP8 tensor cores, which keep 13 bits."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randint(-2, 3, (m, k), generator=generator).float().to(pair[0])
    b = torch.randint(-2, 3, (n, k), generator=generator).float().to(pair[1])
    scales = (2.0 ** torch.randint(-2, 2, shape, generator=generator) for shape in shapes_of_scales(m, n, k, scaling))
    scales = (scale.to(torch.float8_e8m0fnu) if scaling is Scaling.MX else scale for scale in scales)
    bias = torch.randint(-8, 9, (n,), generator=generator).float() if biased else None
    return _on_device(a, b, *scales, scaling, bias)


def random_numbers(
    m: int, n: int, k: int, scaling: Scaling, pair: tuple[torch.dtype, torch.dtype] = PAIRS[0], biased: bool = False
) -> Product:
    """Return normally distributed operands, with scales of all mantissas."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randn(m, k, generator=generator).to(pair[0])
    b = torch.randn(n, k, generator=generator).to(pair[1])
    scales = (torch.rand(shape, generator=generator) + 0.01 for shape in shapes_of_scales(m, n, k, scaling))
    bias = torch.randn(n, generator=generator) if biased else None
    return _on_device(a, b, *scales, scaling, bias)


def _on_device(
    a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, scaling: Scaling, bias: Tensor | None
) -> Product:
    a, b, inv_scale_a, inv_scale_b = (x.to(DEVICE) for x in (a, b, inv_scale_a, inv_scale_b))
    return Product(a, b, inv_scale_a, inv_scale_b, scaling, bias if bias is None else bias.to(DEVICE))


def _spread(fp8: Tensor, inv_scale: Tensor, tall: int, wide: int) -> Tensor:
    """Expand the scales to elements, by index."""
    rows, columns = fp8.shape
    numbers = fp8.cpu().double()
    scales = inv_scale.cpu().double()
    if scales.ndim == 0:
        return numbers * scales
    down, across = torch.arange(rows) // tall, torch.arange(columns) // wide
    return numbers * scales[down][:, across if scales.shape[1] > 1 else torch.zeros_like(across)]
