"""What a service generates for token ids, beside the tokens of transformers."""


def assert_equal_tokens(client, url, prompt, theirs, tolerance):
    """Compare a greedy completion of the served model `it` with what transformers generates.

    Args:
        client: an `httpx.Client`.
        url: of the service.
        prompt: token ids.
        theirs: from `tests.model.oracle.generated`.
        tolerance: of log-probabilities.
    """
    body = {
        "model": "it",
        "prompt": prompt,
        "max_tokens": len(theirs.tokens),
        "temperature": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
    }
    reply = client.post(f"{url}/v1/completions", json=body, timeout=180).json()
    found = reply["choices"][0]["logprobs"]
    assert [int(it.removeprefix("token_id:")) for it in found["tokens"]] == theirs.tokens
    pairs = zip(found["token_logprobs"], theirs.logprobs, strict=True)
    assert max(abs(ours - other) for ours, other in pairs) < tolerance
