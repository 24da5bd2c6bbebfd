"""Requests share cached prefixes only within their salt and their API key, in every dialect."""

import itertools

import pytest

from server.http.context import AppContext

pytestmark = pytest.mark.anyio

KEYS = ("first-key", "second/key==")
ROUTES = {
    "/generate": {"inputs": "x"},
    "/": {"inputs": "x"},
    "/generate_stream": {"inputs": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/invocations": {"prompt": "x"},
}


@pytest.fixture(autouse=True)
def conversations(monkeypatch):
    async def encode_chat(self, messages, **options):
        return await self.encode(messages[-1]["content"], "messages")

    monkeypatch.setattr(AppContext, "encode_chat", encode_chat)


def body(path, salt):
    fields = ROUTES[path]
    if salt is None:
        return fields
    if "inputs" in fields:
        return fields | {"parameters": {"cache_salt": salt}}
    return fields | {"cache_salt": salt}


@pytest.fixture
def salt_of(engine):
    """Sends a request and returns the salt that the engine gets."""

    async def send(client, key=None, salt=None, path="/generate", headers=()):
        engine.requests.clear()
        given = dict(headers) or ({"X-API-Key": key} if key else {})
        response = await client.post(path, json=body(path, salt), headers=given)
        assert response.status_code == 200, response.text
        return engine.requests[0].cache_salt

    return send


@pytest.mark.parametrize("path", ROUTES)
async def test_every_dialect_takes_a_salt_and_the_namespace_of_the_key(
    open_client, client, salt_of, path
):
    keyed = await open_client(api_key=KEYS)

    assert await salt_of(client, salt="tenant", path=path) == "tenant"
    assert await salt_of(keyed, KEYS[0], "tenant", path) == await salt_of(keyed, KEYS[0], "tenant")


async def test_keys_and_salts_name_distinct_namespaces_that_reveal_neither(open_client, salt_of):
    client = await open_client(api_key=KEYS)
    pairs = list(itertools.product(KEYS, (None, "a", "b", *KEYS)))

    names = [await salt_of(client, key, salt) for key, salt in pairs]

    assert len(set(names)) == len(pairs)
    assert names == [await salt_of(client, key, salt) for key, salt in pairs]
    assert all(len(name) == 64 and not any(key in name for key in KEYS) for name in names)


async def test_no_salt_of_one_key_names_the_namespace_of_another(open_client, salt_of):
    client = await open_client(api_key=KEYS)
    names = {await salt_of(client, KEYS[0], salt) for salt in (None, "a")}

    # Even a client that learned the names of another key's namespaces cannot use them.
    assert not names & {await salt_of(client, KEYS[1], salt) for salt in (*names, None)}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"X-API-Key": "first-key"},
        {"Authorization": "Bearer wrong", "X-API-Key": "first-key"},
        {"Authorization": "Bearer first-key", "X-API-Key": "second/key=="},
    ],
    ids=str,
)
async def test_the_namespace_is_that_of_the_first_valid_key(open_client, salt_of, headers):
    client = await open_client(api_key=KEYS)

    assert await salt_of(client, headers=headers) == await salt_of(client, KEYS[0])


async def test_keys_share_prefixes_where_the_operator_says_so(open_client, salt_of):
    client = await open_client(api_key=KEYS, prefix_cache_sharing="all")

    assert [await salt_of(client, key) for key in KEYS] == [None, None]
    assert await salt_of(client, KEYS[0], "tenant") == "tenant"


@pytest.mark.parametrize("salt", ["x" * 256, "é🙂" * 128, "\x00\n\x7f", "' OR 1=1 --", "ab" * 32])
@pytest.mark.parametrize("keys", [(), KEYS])
async def test_any_text_of_up_to_256_characters_is_a_salt(open_client, salt_of, keys, salt):
    client = await open_client(api_key=keys)

    given = await salt_of(client, KEYS[0], salt)

    if keys:
        assert len(given) == 64
        assert given not in (await salt_of(client, KEYS[0]), await salt_of(client, KEYS[1], salt))
    else:
        assert given == salt


@pytest.mark.parametrize("keys", [(), KEYS])
async def test_a_salt_that_is_no_text_or_too_long_is_refused(open_client, engine, keys):
    client = await open_client(api_key=keys)
    headers = {"X-API-Key": KEYS[0], "Content-Type": "application/json"}

    for path, salt in itertools.product(ROUTES, ("x" * 257, "", "\\ud800", 3, ["a"])):
        request = client.build_request("POST", path, json=body(path, salt))
        content = request.content.replace(rb"\\ud800", rb"\ud800")  # half of a surrogate pair

        response = await client.post(path, content=content, headers=headers)

        is_openai = path.startswith("/v1/") or path == "/invocations"
        is_text = salt != "\\ud800"
        assert response.status_code == (400 if is_openai or not is_text else 422), (path, salt)
        if not is_text:
            assert "not valid JSON" in response.text, (path, response.text)
        else:
            assert "cache_salt" in response.text, (path, response.text)
            # Not in the whole text: an id of a request is random, and one in some hundred has these digits.
            assert ("256 " in response.text) is (salt == "x" * 257), response.text
    assert engine.requests == []
