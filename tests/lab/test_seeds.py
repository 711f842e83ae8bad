"""Every integer is a seed. Those of 32 bits give the numbers that stored results were made with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normcontrol.lab import seeds
from normcontrol.lab.data.batches import Batches
from normcontrol.lab.training.config import Model
from normcontrol.lab.training.model import GPT

WIDE = [
    *(0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**53, 2**53 + 1),
    *(2**61 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 2**64, 2**64 + 1, 10**5000),
    *(-1, -2, -3, -(2**31), -(2**32), -(2**63), -(2**63) - 1, -(2**64)),
]
"""Seeds that some generator, or a way through another type, makes equal to another one."""


def batch(seed):
    data = [np.arange(4096, dtype=np.uint16)]
    return tuple(Batches(data, context=8, rows=4, seed=seed)(0, slice(0, 4))[0].flatten().tolist())


def weights(seed):
    model = GPT.initialised(Model(layers=1, heads=1, width=8, context=4), vocab=64)
    model.initialise(seed)
    return tuple(model.wte.weight.flatten().tolist())


def dropout(seed):
    """What dropout is seeded with in a few steps, as far as a CPU uses it."""
    return tuple(seeds.mixed(seed, step, 0, 0) % 2**32 for step in range(1, 5))


@pytest.mark.parametrize("numbers", [batch, weights, dropout])
def test_no_two_seeds_give_the_same_numbers(numbers):
    assert len({numbers(seed) for seed in WIDE}) == len(WIDE)
    assert [numbers(seed) for seed in WIDE] == [numbers(seed) for seed in WIDE]


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 - 1, 2**31])
def test_seeds_of_32_bits_give_the_numbers_of_stored_results(seed):
    for epoch in (0, 3):
        key = np.array([seed, epoch], dtype=np.uint64)
        plain = np.random.Generator(np.random.Philox(key=key))
        assert seeds.for_numpy(seed, epoch).integers(2**62, size=5).tolist() == (
            plain.integers(2**62, size=5).tolist()
        )
    plain = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.randn(40, generator=seeds.for_torch(seed)), plain)
    assert seeds.mixed(seed, 5, 1, 0) == hash((seed, 5, 1, 0)) % (1 << 63)


def test_the_words_of_a_state_are_where_torch_reads_them():
    """torch and NumPy continue from the same 624 words with the same numbers."""
    numpy = np.random.MT19937([1, 2, 3])
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    words = numpy.state["state"]["key"].astype(np.int64)
    state[seeds.WORDS].view(torch.int64).copy_(torch.from_numpy(words))
    generator.set_state(state)
    numpy.random_raw()  # NumPy begins with the last of them
    drawn = torch.randint(2**16, (1000,), generator=generator)
    assert [int(numpy.random_raw()) % 2**16 for _ in range(1000)] == drawn.tolist()
