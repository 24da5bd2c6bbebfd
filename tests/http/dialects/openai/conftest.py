import pytest

from server.http.context import AppContext


@pytest.fixture
def complete(client):
    """Posts a body to /v1/completions and returns the response."""

    async def post(prompt="hello", **fields):
        return await client.post("/v1/completions", json={"prompt": prompt, **fields})

    return post


@pytest.fixture
def templates(monkeypatch):
    """Replaces the chat template by one that joins the messages; collects what it was called with."""
    calls = []

    async def encode_chat(self, messages, **options):
        calls.append((messages, options))
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.tokenizer.encode(text)

    monkeypatch.setattr(AppContext, "encode_chat", encode_chat)
    return calls


@pytest.fixture
def chat(client, templates):
    """Posts a message or messages to /v1/chat/completions and returns the response."""

    async def post(messages="hi", **fields):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await client.post("/v1/chat/completions", json={"messages": messages, **fields})

    return post
