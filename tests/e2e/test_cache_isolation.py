"""A client with one API key cannot find out by the prefix cache what another has sent."""

import time

import pytest

from tests.e2e.conftest import CLIENT

pytestmark = pytest.mark.e2e

KEYS = ("key-of-alice", "key-of-bob")


@pytest.mark.slow
def test_a_prefix_of_another_key_or_salt_is_cold(start_service):
    service = start_service("--device=cpu", *(f"--api-key={key}" for key in KEYS))
    service.wait_until_healthy()

    def send(key, prompt, salt=None):
        """Return the cached tokens of the prompt and the seconds to its only token."""
        parameters = {"max_new_tokens": 1, "temperature": 0} | (
            {"cache_salt": salt} if salt else {}
        )
        began = time.monotonic()
        response = CLIENT.post(
            f"{service.url}/generate",
            json={"inputs": prompt, "parameters": parameters},
            headers={"X-API-Key": key},
        )
        seconds = time.monotonic() - began
        assert response.status_code == 200, response.text
        return int(response.headers["x-tessera-cached-prompt-tokens"]), seconds

    alice, bob = KEYS
    send(alice, "warm up")
    cold, warm, foreign = [], [], []
    for i in range(2):
        secret = f"def secret_{i}(a, b):\n    return a\n\n\n" * 20
        for times, expect_cached in ((cold, False), (warm, True)):
            cached, seconds = send(alice, secret)
            assert (cached > 0) is expect_cached
            times.append(seconds)
        for key, salt in ((bob, None), (bob, alice), (alice, "another")):
            cached, seconds = send(key, secret, salt)
            assert cached == 0, (key, salt)
            foreign.append(seconds)

    # The prefix saves its owner most of the time, and nobody else any.
    assert min(warm) < 0.5 * min(cold)
    assert min(warm) < 0.5 * min(foreign)
