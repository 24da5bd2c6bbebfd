from __future__ import annotations

import numpy as np
import pytest
import torch

from model.sampling.noise import HostNoise, noise_key, noise_keys
from tests.model.sampling.torch_noise import gumbel_noise


def noise_of(size: int, seed: int, position: int) -> np.ndarray:
    low, high = torch.tensor(noise_key(seed, position), dtype=torch.float64)
    return gumbel_noise(torch.arange(size), low[None, None], high[None, None])[0].numpy()


def test_the_keys_of_many_tokens_are_those_of_each() -> None:
    seeds = [0, 1, 7, 2**63, 2**64 - 1, 2**64 + 5, 12345678901234567890]
    positions = [0, 10**6, 3, 2**31, 1, 9, 131071]

    assert [tuple(key) for key in noise_keys(seeds, positions).T.tolist()] == [
        noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)
    ]


def test_noise_is_pinned_so_that_seeds_keep_their_meaning() -> None:
    keys = [noise_key(s, p) for s, p in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 10**6))]

    assert keys == [
        (1293516399, 2802244911),
        (4097920862, 3011683077),
        (1949917470, 1581361928),
        (4155295595, 1980544575),
    ]
    assert noise_of(4, 0, 0).tolist() == pytest.approx(
        [-0.2791177, -0.0769775, 0.2926565, -0.4509068], abs=1e-5
    )
    assert noise_of(262144, 7, 9)[[1, 1000, 151935, 262143]].tolist() == pytest.approx(
        [0.1187951, 1.0206308, 2.3079987, -0.3772759], abs=1e-5
    )


@pytest.mark.parametrize("along", ["seed", "position", "id"])
def test_noise_has_the_gumbel_distribution_and_is_uncorrelated(along) -> None:
    n, bins = 20_000, 50
    if along == "id":
        noise = noise_of(n, 3, 4)
    else:
        pairs = [(i, 5) if along == "seed" else (5, i) for i in range(n)]
        noise = np.array([noise_of(1, *pair)[0] for pair in pairs])

    uniform = np.exp(-np.exp(-noise.astype(np.float64)))

    counts = np.histogram(uniform, bins=bins, range=(0, 1))[0]
    assert ((counts - n / bins) ** 2 / (n / bins)).sum() < 85.4  # 49 degrees of freedom, p = 0.001
    for lag in (1, 2, 3, 32):
        correlation = np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(n)


def test_the_noise_of_neighbouring_positions_is_uncorrelated() -> None:
    n = 20_000
    rows = np.stack([noise_of(n, 3, position) for position in range(8)])

    correlations = np.corrcoef(rows) - np.eye(8)

    assert np.abs(correlations).max() < 4 / np.sqrt(n)


@pytest.mark.parametrize("size", [1, 2, 50, 5000])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 30.0, 1e30])
def test_the_token_of_the_host_is_the_argmax_of_noise_minus_distance(size, spread) -> None:
    generator = np.random.default_rng(size)
    host = HostNoise(size)
    for position in range(40):
        distances = generator.exponential(size=size).astype(np.float32) * np.float32(spread)
        distances[generator.integers(size)] = 0.0
        distances[distances > 60] = np.inf
        kept = generator.permutation(size)[: size // 2 + 1]
        kept = kept[np.isfinite(distances[kept])]
        sums = noise_of(size, 1, position) - distances

        assert host.argmax(distances, noise_key(1, position), None) == sums.argmax()
        if len(kept):
            place = host.argmax(distances[kept], noise_key(1, position), kept)
            assert kept[place] == kept[sums[kept].argmax()]


def test_no_noise_is_further_from_zero_than_documented() -> None:
    class Words(HostNoise):
        def _hash(self, count, key, ids):
            return np.array([0, 2**32 - 1], np.uint32)

    first, last = (
        torch.tensor([(word + 0.5) * 2.0**-32]).clamp_max(1 - 2**-24) for word in (0, 2**32 - 1)
    )
    greatest, least = (-torch.log(-torch.log1p(-v)) for v in (first, last))
    assert -2.9 < least.item() < greatest.item() < 22.9
    for distance, winner in ((25.0, 0), (25.7, 1)):
        assert Words(2).argmax(np.array([distance, 0.0], np.float32), (0, 0), None) == winner
