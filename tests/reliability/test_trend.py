import random

import pytest

from tests.reliability.trend import fit


def noise(seed, size, steps=False):
    rng = random.Random(seed)
    values, level = [], 0.0
    for _ in range(size):
        level = 0.9 * level + rng.gauss(0, 1) if steps else rng.gauss(0, 1)
        values.append(100 + level)
    return values


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [False, True], ids=["independent", "successive samples alike"])
def test_noise_without_growth_has_a_slope_within_a_few_errors_of_0(seed, steps):
    trend = fit(range(400), noise(seed, 400, steps))

    assert abs(trend.slope) < 4 * trend.error


def test_a_line_is_found_exactly():
    trend = fit(range(100), [3 + 0.5 * x for x in range(100)])

    assert trend.slope == pytest.approx(0.5)
    assert trend.error == pytest.approx(0, abs=1e-9)
    assert not trend.is_flat
    assert (trend.first, trend.last) == (pytest.approx(5.25), pytest.approx(50.25))


def test_growth_below_the_noise_of_single_samples_is_found():
    values = [v + 0.01 * x for x, v in enumerate(noise(3, 400))]

    assert not fit(range(400), values).is_flat


def test_a_quantity_that_shrinks_does_not_grow():
    assert fit(range(100), [100.0 - x for x in range(100)]).is_flat
