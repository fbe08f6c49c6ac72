"""Norms: eager, and as a Triton kernel, against float64."""

from __future__ import annotations

import pytest
import torch

from paceline.layers.norm import Norm, zero_centered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
ROWS, SIZE = 5, 48


def norms(dtype: torch.dtype) -> dict[str, Norm]:
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(2, SIZE, generator=generator).to(DEVICE, dtype)
    return {
        "rms": Norm(weight),
        "zero-centered": zero_centered(weight),
        "layer": Norm(weight, bias, centers=True),
        "layer without bias": Norm(weight, centers=True),
    }


def exact(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.double()
    centered = x - x.mean(-1, keepdim=True) if norm.centers else x
    normed = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
    return normed if norm.bias is None else normed + norm.bias.double()


@pytest.mark.parametrize("name", list(norms(torch.float32)))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_eager_norms_agree_with_float64(name: str, dtype: torch.dtype, tolerance: float) -> None:
    norm, x = norms(dtype)[name], torch.randn(ROWS, SIZE, device=DEVICE).to(dtype)
    out = norm(x, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact(x, norm), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", list(norms(torch.float32)))
def test_the_kernel_agrees_with_float64(name: str, residual: bool) -> None:
    pytest.importorskip("triton")
    from paceline.layers.gemm import GemmLauncher

    norm, x = norms(torch.float32)[name], torch.randn(ROWS, SIZE, device=DEVICE)
    added = torch.randn(ROWS, SIZE, device=DEVICE) if residual else None
    out = GemmLauncher(torch.float32, x.device, EPS).norm(x, norm, added)
    expected = exact(x, norm) + (0.0 if added is None else added.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_zero_centered_weight_keeps_its_small_values_in_sixteen_bits() -> None:
    stored = torch.tensor([0.001, -0.002], dtype=torch.bfloat16)
    torch.testing.assert_close(zero_centered(stored).weight, 1.0 + stored.float(), rtol=0, atol=0)
