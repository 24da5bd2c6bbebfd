"""The measurement of prefix hits compares with what an unlimited cache would find."""

import pytest

from benchmarks.prefix_hits import Reply, hit_rates


def test_the_luckiest_request_of_a_prefix_is_what_an_unlimited_cache_finds():
    replies = [
        Reply(0, cached=320, computed=30),
        Reply(0, cached=0, computed=350),
        Reply(1, cached=160, computed=40),
        Reply(1, failed=True),
    ]

    found, of_ideal = hit_rates(replies)

    assert found == pytest.approx(480 / 900)
    assert of_ideal == pytest.approx(480 / 800)


def test_replies_without_hits_have_rates_of_zero():
    assert hit_rates([Reply(0, computed=10), Reply(1, failed=True)]) == (0, 0)
