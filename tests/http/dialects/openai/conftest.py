import pytest


@pytest.fixture
def complete(client):
    """Posts a body to /v1/completions and returns the response."""

    async def post(prompt="hello", **fields):
        return await client.post("/v1/completions", json={"prompt": prompt, **fields})

    return post
