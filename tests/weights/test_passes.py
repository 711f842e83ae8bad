"""The two passes over the weights on a CPU: what they measure, and what they multiply by."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from normcontrol.scope import SCOPES
from normcontrol.weights.passes import BLOCK, SMALL, measure, multiply_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_tensors_of_all_sizes_are_measured_together(dtype):
    torch.manual_seed(0)
    sizes = (0, 1, 7, BLOCK, SMALL, SMALL + 1, 10 * BLOCK, 30 * BLOCK + 5)
    params = [torch.randn(n).to(dtype) for n in sizes]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.stack([torch.linalg.vector_norm(p.to(wide)) for p in params])
    with torch.no_grad():
        found = measure(params, SCOPES["tensor"])
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1 / 3, 1.0000001, 1e300])
def test_a_float_multiplies_as_torch_does_bit_for_bit(scale):
    torch.manual_seed(0)
    kinds = ([torch.float32] * 3, [torch.float64], [torch.float32, torch.float64])
    for dtypes in kinds:
        params = [torch.randn(40, 30).to(dtype) for dtype in dtypes]
        expected = [p * scale for p in params]
        multiply_(params, SCOPES["global"], scale, torch.tensor(1))
        assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def test_threads_multiply_by_their_own_factors():
    def grow(factor: float) -> list[float]:
        params = [torch.ones(1000) for _ in range(20)]
        for _ in range(300):
            multiply_(params, SCOPES["global"], factor, torch.tensor(1))
            multiply_(params, SCOPES["global"], 1 / factor, torch.tensor(1))
        return [p.sum().item() for p in params]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(grow, [2.0, 4.0, 8.0, 16.0]))
    assert found == [[1000.0] * 20] * 4
