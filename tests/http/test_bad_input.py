"""Invalid requests: each gets a clear error in JSON, and later requests are served normally."""

import json

import pytest

from model.errors import TokenizerError
from server.http.body.request_body import decode
from tests.http.fakes import EOS_ID

pytestmark = pytest.mark.anyio

ROUTES = ("/generate", "/generate_stream", "/", "/tokenize")


@pytest.fixture(autouse=True)
async def later_requests_are_served(client, engine):
    yield
    response = await client.post("/generate", json={"inputs": "x"})
    assert response.status_code == 200
    assert engine.running == set()


async def refused(client, content, path="/generate", status=422, headers=None):
    response = await client.post(
        path, content=content, headers={"content-type": "application/json"} | (headers or {})
    )
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error", "error_type"}
    assert "Traceback" not in body["error"]
    return body["error"]


def parameters(**values):
    return json.dumps({"inputs": "x", "parameters": values})


BAD_PARAMETERS = [
    ({"best_of": 0}, "`best_of` must be >= 1. Given: 0"),
    ({"best_of": -1}, "`best_of` must be >= 1. Given: -1"),
    ({"best_of": 10**9, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 1000000000"),
    ({"best_of": True}, "`best_of` must be an integer. Given: true"),
    ({"best_of": "2"}, "`best_of` must be an integer. Given: a string"),
    ({"best_of": 2.0}, "`best_of` must be an integer. Given: 2.0"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "temperature": 0}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"temperature": -0.1}, "`temperature` must be >= 0. Given: -0.1"),
    ({"temperature": 101}, "`temperature` must be <= 100. Given: 101"),
    ({"temperature": 1e-320}, "`temperature` must be 0 (greedy) or >= 1e-06. Given: 1e-320"),
    ({"temperature": "hot"}, "`temperature` must be a number. Given: a string"),
    ({"temperature": True}, "`temperature` must be a number. Given: true"),
    ({"top_k": 0}, "`top_k` must be >= 1. Given: 0"),
    ({"top_k": 2**31}, "`top_k` must be <= 2147483647. Given: 2147483648"),
    ({"top_p": 0}, "`top_p` must be > 0. Given: 0"),
    ({"top_p": 1.01}, "`top_p` must be <= 1. Given: 1.01"),
    ({"typical_p": 0}, "`typical_p` must be > 0. Given: 0"),
    ({"min_p": -0.5}, "`min_p` must be >= 0. Given: -0.5"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be >= 0.01. Given: 0"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be <= 2. Given: 2.5"),
    ({"presence_penalty": -2.5}, "`presence_penalty` must be >= -2. Given: -2.5"),
    ({"logit_bias": {"5": 101}}, "`logit_bias.5` must be <= 100. Given: 101"),
    ({"logit_bias": {"5": -100.5}}, "`logit_bias.5` must be >= -100. Given: -100.5"),
    ({"logit_bias": {"5": "1"}}, "`logit_bias.5` must be a number. Given: a string"),
    ({"logit_bias": {"5": True}}, "`logit_bias.5` must be a number. Given: true"),
    ({"logit_bias": [5]}, "`logit_bias` must be an object. Given: a list"),
    (
        {"logit_bias": {"300": 1}},
        "the keys of `logit_bias` must be token ids, 0 to 299. Given: `300`",
    ),
    (
        {"logit_bias": {"-1": 1}},
        "the keys of `logit_bias` must be token ids, 0 to 299. Given: `-1`",
    ),
    ({"logit_bias": {"1.0": 1}}, "must be token ids, 0 to 299. Given: `1.0`"),
    ({"logit_bias": {"a\nb": 1}}, "must be token ids, 0 to 299. Given: `a\\nb`"),
    ({"logit_bias": {"a\nb": 101}}, "`logit_bias.a\\nb` must be <= 100. Given: 101"),
    ({"logit_bias": {"9" * 9000: 1}}, "Given: `" + "9" * 60 + "...`"),
    (
        {"logit_bias": {str(i): "x" for i in range(60_000)}},
        "`logit_bias` supports up to 1024 entries. Given: 60000",
    ),
    ({"bad_words": "a"}, "`bad_words` must be a list. Given: a string"),
    ({"bad_words": ["a", ""]}, "`bad_words.1` cannot be empty"),
    ({"bad_words": ["a", 5]}, "`bad_words.1` must be a string. Given: 5"),
    ({"bad_words": ["a", "x" * 101]}, "`bad_words.1` must have at most 100 characters. Given: 101"),
    ({"bad_words": ["x"] * 65}, "`bad_words` supports up to 64 entries. Given: 65"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be >= 1. Given: 0"),
    ({"max_new_tokens": -1}, "`max_new_tokens` must be >= 1. Given: -1"),
    ({"max_new_tokens": 10**12}, "`max_new_tokens` must be <= 4294967295. Given: 1000000000000"),
    ({"max_new_tokens": 1.5}, "`max_new_tokens` must be an integer. Given: 1.5"),
    (
        {"max_new_tokens": 128},
        "`inputs` tokens + `max_new_tokens` must be <= 128. "
        "Given: 1 `inputs` tokens and 128 `max_new_tokens`",
    ),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "`min_new_tokens` must be <= 4"),
    ({"truncate": 0}, "`truncate` must be >= 1. Given: 0"),
    ({"truncate": 128}, "`truncate` must be > 0 and <= 127. Given: 128"),
    ({"truncate": 10**4000}, "Given: " + str(10**39) + "..."),
    ({"seed": -1}, "`seed` must be >= 0. Given: -1"),
    ({"seed": 2**64}, "`seed` must be <= 18446744073709551615. Given: 18446744073709551616"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"top_n_tokens": 10**9}, "`top_n_tokens` must be >= 0 and <= 5. Given: 1000000000"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, "`stop.0` cannot be empty"),
    ({"stop": ["a", 1]}, "`stop.1` must be a string. Given: 1"),
    ({"stop": "a"}, "`stop` must be a list. Given: a string"),
    ({"stop": ["x" * 1001]}, "`stop.0` must have at most 1000 characters. Given: 1001"),
    ({"stop": ["x"] * 10_000}, "`stop` supports up to 4 stop sequences. Given: 10000"),
    ({"stop_token_ids": [300]}, "`stop_token_ids` must be < 300, the size of the vocabulary"),
    ({"stop_token_ids": [-1]}, "`stop_token_ids.0` must be >= 0. Given: -1"),
    ({"stop_token_ids": [1.0]}, "`stop_token_ids.0` must be an integer. Given: 1.0"),
    ({"stop_token_ids": [1] * 65}, "`stop_token_ids` supports up to 64 ids. Given: 65"),
    ({"details": 1}, "`details` must be true or false. Given: 1"),
    ({"do_sample": "yes"}, "`do_sample` must be true or false. Given: a string"),
    ({"watermark": 0}, "`watermark` must be true or false. Given: 0"),
    ({"grammar": {"value": {}}}, "`grammar` must have the key `type`: json, regex or json_schema"),
    (
        {"grammar": {"type": "ebnf", "value": ""}},
        "`grammar` must have one of the types json, regex",
    ),
    ({"grammar": {"type": "json"}}, "`grammar.json.value` is required"),
    ({"grammar": {"type": "regex", "value": "a", "x": 1}}, "`grammar.regex.x` is an unknown field"),
    (
        {"grammar": {"type": "regex", "value": 5}},
        "`grammar.regex.value` must be a string. Given: 5",
    ),
    ({"grammar": {"type": "regex", "value": "("}}, "`grammar.value`: "),
    (
        {"grammar": {"type": "json", "value": 5}},
        "`grammar.json.value` must be an object or a string. Given: 5",
    ),
    (
        {"grammar": {"type": "json", "value": {"items": {"type": "text"}}}},
        "`grammar.value`: `type` at `/items` must be of null, boolean, integer, number, string, array, object. "
        "Given: text",
    ),
    ({"adapter_id": 1}, "`adapter_id` must be a string"),
    ({"topp": 0.5}, "unknown field `parameters.topp`; did you mean `parameters.top_p`?"),
    ({"a\nb": 1}, "unknown field `parameters.a\\nb`"),
]


@pytest.mark.parametrize(("values", "message"), BAD_PARAMETERS, ids=lambda v: str(v)[:40])
async def test_a_bad_parameter_is_named_with_value_and_limit(client, engine, values, message):
    error = await refused(client, parameters(**values))

    assert error.startswith("Input validation error: ")
    assert message in error
    assert engine.requests == []


async def test_a_bad_word_that_cannot_be_banned_is_named(client, tokenizer, monkeypatch):
    def encode(text, add_special_tokens=True):
        if "?" in text:
            raise TokenizerError("no such character")
        return [] if text.strip() == "!" else [1]

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode", encode)
        empty = await refused(client, parameters(bad_words=["a", "!"]))
        broken = await refused(client, parameters(bad_words=["?"]))

    assert "`bad_words.1` has no tokens" in empty
    assert "`bad_words.0` cannot be tokenized: no such character" in broken


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_refuses_a_body_that_violates_the_schema(client, path):
    assert "`top_k`" in await refused(client, parameters(top_k=0), path)
    assert "`inputs` is required" in await refused(client, "{}", path)


async def test_details_of_the_prompt_and_best_of_are_refused_for_streams(client):
    for path, extra in (("/generate_stream", {}), ("/", {"stream": True})):
        body = {"inputs": "x", "parameters": {"decoder_input_details": True}} | extra
        error = await refused(client, json.dumps(body), path)
        assert "`decoder_input_details` == true is not supported when streaming" in error
        body["parameters"] = {"best_of": 2, "do_sample": True}
        error = await refused(client, json.dumps(body), path)
        assert "`best_of` != 1 is not supported when streaming tokens" in error


async def test_a_route_that_contradicts_stream_names_the_right_one(client):
    error = await refused(client, '{"inputs": "x", "stream": true}', "/generate")
    assert "use /generate_stream" in error
    error = await refused(client, '{"inputs": "x", "stream": false}', "/generate_stream")
    assert "use /generate" in error


async def test_several_problems_are_listed_together(client):
    error = await refused(client, parameters(top_k=0, top_p=2, zzz=1, temperatur=1))

    assert "`parameters.zzz`" in error
    assert "`parameters.temperatur`; did you mean `parameters.temperature`?" in error

    error = await refused(client, parameters(top_k=0, top_p=2))

    assert "`top_k`" in error
    assert "`top_p`" in error


async def test_the_error_for_a_misplaced_parameter_names_the_right_place(client):
    error = await refused(client, '{"inputs": "x", "top_k": 3}')

    assert "unknown field `top_k`; did you mean `parameters.top_k`?" in error


async def test_sixty_thousand_unknown_fields_are_counted_not_listed(client):
    body = {"inputs": "x"} | {f"k{i}": 0 for i in range(60_000)}

    error = await refused(client, json.dumps(body))

    assert error.endswith("and 59995 more")
    assert len(error) < 1000


@pytest.mark.parametrize("path", ROUTES)
async def test_a_hundred_thousand_fields_are_too_many_to_decode(client, path):
    fields = [{"inputs": "x"} | {f"k{i}": 0 for i in range(100_000)}]
    fields.append(parameters(logit_bias={str(i): 1 for i in range(100_000)}))
    for body in fields:
        error = await refused(client, body if isinstance(body, str) else json.dumps(body), path)
        assert "at most 65536 keys. Given: 10000" in error


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("", "`inputs` cannot be empty"),
        (None, "`inputs` must be a string. Given: null"),
        ([], "`inputs` must be a string. Given: a list"),
        (["x"], "`inputs` must be a string. Given: a list"),
        (5, "`inputs` must be a string. Given: 5"),
        ("x" * 128, "`inputs` must have at most 127 tokens, one less than the 128 that prompt"),
        ("x" * 5000, "Given: at least 500 tokens"),  # the longest has 10 bytes
    ],
)
async def test_a_bad_prompt_is_refused(client, engine, inputs, message):
    error = await refused(client, json.dumps({"inputs": inputs}))

    assert message in error
    assert "xxx" not in error
    assert engine.requests == []


@pytest.mark.parametrize("length", [126, 127])
async def test_the_longest_prompts_are_accepted(client, length):
    response = await client.post("/generate", json={"inputs": "x" * length})

    assert response.status_code == 200
    assert response.headers["x-prompt-tokens"] == str(length)


async def test_a_token_outside_the_models_vocabulary_is_refused(client, engine):
    import msgspec

    engine.info = msgspec.structs.replace(engine.info, vocab_size=200)

    error = await refused(client, '{"inputs": "</s>"}')

    assert f"Given: token {EOS_ID}" in error
    engine.info = msgspec.structs.replace(engine.info, vocab_size=300)


@pytest.mark.parametrize("value", ["[]", '"x"', "1", "null", "true"])
async def test_a_body_that_is_not_an_object_is_refused(client, value):
    assert "the body must be a JSON object" in await refused(client, value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"inputs": "x"',
        b'{"inputs": "x"} x',
        b"inputs=x",
        b'{"inputs": NaN}',
        b'{"inputs": "x", "parameters": {"temperature": NaN}}',
        b'{"inputs": "x", "parameters": {"temperature": Infinity}}',
        b'{"inputs": "x", "parameters": {"temperature": -Infinity}}',
        b'{"inputs": "x", "parameters": {"temperature": 1e400}}',
        b'{"inputs": "x", "parameters": {"seed": ' + b"9" * 5000 + b"}}",
        b'{"inputs": "\\ud800"}',
        b'{"inputs": "\\ud800 and more text"}',
        b'{"inputs": "\\udc00\\ud800"}',
        b'{"inputs": "\xff"}',
        b'{"inputs": "\xed\xa0\x80"}',
        b'{"inputs": "\xc0\xaf"}',
        b"\xef\xbb\xbf\xef\xbb\xbf" + b'{"inputs": "x"}',
        b'{"inputs": "a\nb"}',
        b'{"inputs":' + b"[" * 100_000,
        b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=lambda b: repr(b[:50]),
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_body_that_is_not_json_is_refused(client, engine, path, body):
    error = await refused(client, body, path, status=400)

    assert error.startswith("the request body is ")
    assert len(error) < 200
    assert engine.requests == []


async def test_nested_lists_within_the_depth_limit_are_of_the_wrong_type(client):
    body = b'{"inputs": ' + b"[" * 500 + b"]" * 500 + b"}"

    assert "`inputs` must be a string" in await refused(client, body)


async def test_the_last_of_duplicate_keys_counts(client, engine, tokenizer):
    response = await client.post("/generate", content=b'{"inputs": "a", "inputs": "b"}')

    assert response.status_code == 200
    assert engine.requests[0].prompt_token_ids == tokenizer.encode("b")


async def test_nul_and_every_plane_of_unicode_may_be_in_a_prompt(client, engine, tokenizer):
    response = await client.post("/generate", json={"inputs": "\x00\u0300é🙂\U0010ffff"})

    assert response.status_code == 200
    assert tokenizer.decode(engine.requests[0].prompt_token_ids) == "\x00\u0300é🙂\U0010ffff"


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON",
     "application/vnd.api+json", "application/json; charset=\"UTF-8\""],
)  # fmt: skip
async def test_json_content_types_are_accepted(client, content_type):
    response = await client.post(
        "/generate", content=b'{"inputs": "x"}', headers={"content-type": content_type}
    )

    assert response.status_code == 200


async def test_a_missing_content_type_means_json(client):
    response = await client.post("/generate", content=b'{"inputs": "x"}')

    assert "content-type" not in response.request.headers
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": ""},
        {"content-type": "json"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-encoding": "gzip"},
        {"content-encoding": "gzip, identity"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ROUTES)
async def test_other_media_types_are_refused(client, path, headers):
    await refused(client, b'{"inputs": "x"}', path, status=415, headers=headers)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/generate", "POST"),
        ("HEAD", "/generate", "POST"),
        ("OPTIONS", "/generate", "POST"),
        ("PUT", "/generate_stream", "POST"),
        ("DELETE", "/", "GET, HEAD, POST"),
        ("POST", "/health", "GET, HEAD"),
        ("TRACE", "/metrics", "GET"),
        ("POST", "/info", "GET"),
    ],
)
async def test_the_reply_to_an_unsupported_method_lists_the_supported_ones(
    client, method, path, allowed
):
    response = await client.request(method, path)

    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    if method != "HEAD":
        assert response.json()["error_type"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path", ["/nothing", "/generate//", "/x//generate", "/GENERATE", "/v2%2f..%2fgenerate", "/%00"]
)
async def test_an_unknown_path_is_not_found(client, path):
    response = await client.post(path, json={"inputs": "x"})

    assert response.status_code == 404
    assert response.json()["error_type"] == "not_found"
    assert response.json()["error"].startswith("there is no such route; ")


async def test_no_cors_headers_are_sent(client):
    response = await client.post(
        "/generate", json={"inputs": "x"}, headers={"origin": "http://evil.example"}
    )

    assert not [name for name in response.headers if name.startswith("access-control")]


def test_integers_keep_their_precision():
    assert decode(b"18446744073709551615") == 2**64 - 1
