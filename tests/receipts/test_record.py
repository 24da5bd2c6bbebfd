import json

import msgspec
import pytest

from model.sampling.parameters import SamplingParams
from server.receipts.record import (
    Conditions,
    ReceiptError,
    ReceiptOutput,
    alterations,
    decode_sampling,
    encode_sampling,
    logprob_digest,
    make_receipt,
    read_receipt,
    sampling_of,
    token_digest,
)
from tests.receipts.make import CONDITIONS, plain_receipt

SAMPLING = SamplingParams(
    temperature=0.1 + 0.2,
    top_k=7,
    max_new_tokens=9,
    seed=2**64 - 1,
    logit_bias={5: -1.5, 4095: 2.0},
    bad_words=((1,), (2, 3)),
    stop_token_ids=(8,),
    grammar="start: /a+/",
    prompt_logprobs=True,
)


def test_sampling_parameters_come_back_as_they_were():
    text = json.dumps(encode_sampling(SAMPLING))

    assert decode_sampling(json.loads(text)) == SAMPLING


def test_parameters_without_effect_are_absent():
    assert encode_sampling(SamplingParams(max_new_tokens=3)) == {"max_new_tokens": 3}


def test_a_seed_survives_json_libraries_with_doubles_for_numbers():
    plain = json.loads(json.dumps(encode_sampling(SAMPLING)), parse_int=float)

    assert plain["seed"] == "18446744073709551615"


def test_a_receipt_is_unaltered_however_its_json_is_written():
    text = json.dumps(plain_receipt(temperature=1.5, top_p=0.5), sort_keys=True, indent=3)

    assert alterations(read_receipt(json.loads(text))) == []
    # As JavaScript writes a number without a fraction.
    whole = json.dumps(plain_receipt(temperature=2.0)).replace("2.0", "2")
    assert alterations(read_receipt(json.loads(whole))) == []


def change(place, value):
    def apply(receipt):
        *path, last = place
        for step in path:
            receipt = receipt[step]
        receipt[last] = value

    return apply


@pytest.mark.parametrize(
    "apply",
    [
        change(["outputs", 0, "token_ids", 1], 9),
        change(["sampling", "seed"], "12"),
        change(["sampling", "temperature"], 0.30000000000000001),
        change(["outputs", 0, "finish_reason"], "stop_string"),
        change(["outputs", 0, "logprobs"], "sha256:0"),
        change(["outputs", 0, "digest"], "sha256:0"),
        change(["prompts", 0, 0], 3),
        change(["deterministic"], False),
        change(["conditions", "weights"], None),
        change(["conditions", "versions", "torch"], "9"),
        change(["digest"], ""),
    ],
)
def test_every_change_of_the_content_is_found(apply):
    plain = plain_receipt(temperature=0.5)
    apply(plain)

    assert alterations(read_receipt(plain))


@pytest.mark.parametrize(
    ("apply", "words"),
    [
        (change(["version"], 2), "version must be 1. Given: 2"),
        (change(["other"], 2), "other"),
        (change(["outputs"], []), "outputs must not be empty"),
        (change(["outputs"], {}), "outputs"),
        (change(["prompts"], [[]]), "prompts[0] must not be empty"),
        (change(["prompts", 0, 0], -1), "prompts[0][0] must be a token id. Given: -1"),
        (change(["outputs", 0, "token_ids", 1], 2**31), "outputs[0].token_ids[1] must be a token"),
        (change(["outputs", 0, "prompt"], 1), "outputs[0].prompt must be >= 0 and < 1. Given: 1"),
        (change(["outputs", 0, "finish_reason"], "abort"), "abort"),
        (change(["sampling", "max_new_tokens"], 1), "has 2 tokens"),
        (change(["sampling", "max_new_tokens"], 0), "max_new_tokens is 0"),
        (change(["sampling", "seed"], 5), "must be a text of digits. Given: 5"),
        (change(["sampling", "seed"], "1" * 5000), "must be a text of digits"),
        (change(["sampling", "seed"], str(2**64)), "must be < 2^64"),
        (change(["sampling", "top_p"], 0), "top_p"),
        (change(["sampling", "beams"], 2), "unknown parameter 'beams'"),
        (change(["sampling"], {}), "max_new_tokens"),
    ],
)
def test_what_is_no_receipt_is_refused_with_the_field(apply, words):
    plain = plain_receipt()
    apply(plain)

    with pytest.raises(ReceiptError) as refused:
        read_receipt(plain)
    assert words in str(refused.value)


@pytest.mark.parametrize("plain", [None, 3, "x", [], {}])
def test_what_is_no_object_of_a_receipt_is_refused(plain):
    with pytest.raises(ReceiptError):
        read_receipt(plain)


def test_the_digest_of_log_probabilities_is_of_their_bits():
    digest = logprob_digest([(-0.5, [(1, -0.5)])])

    assert digest == logprob_digest([(-0.5, ((1, -0.5),))])
    assert digest != logprob_digest([(-0.5000000000000001, [(1, -0.5)])])
    assert digest != logprob_digest([(-0.5, [(2, -0.5)])])
    assert logprob_digest([(0.0, ())]) != logprob_digest([(-0.0, ())])


def test_a_receipt_has_all_parameters_that_a_request_has():
    """A parameter that is added is part of receipts, since all of `SamplingParams` is."""
    output = ReceiptOutput(prompt=0, token_ids=[1], digest=token_digest([1]), finish_reason="eos")
    conditions = Conditions(
        model="m", weights=None, quantization="none", dtype="float32", kv_cache_dtype="float32", kernels="k",
        device="d", versions={},
    )  # fmt: skip
    receipt = make_receipt(conditions, [[1]], [(SAMPLING, output)], deterministic=True)

    assert sampling_of(receipt, receipt.outputs[0]) == SAMPLING
    assert alterations(receipt) == []


def test_parameters_of_all_outputs_are_there_once():
    grammar = "x" * 1000
    parameters = [
        SamplingParams(max_new_tokens=2, seed=seed, top_k=top_k, grammar=grammar)
        for seed, top_k in ((0, 5), (1, 5), (2, 0))
    ]
    outputs = [
        ReceiptOutput(prompt=0, token_ids=[i], digest=token_digest([i]), finish_reason="eos")
        for i in range(3)
    ]
    receipt = make_receipt(
        CONDITIONS, [[1]], list(zip(parameters, outputs, strict=True)), deterministic=True
    )

    assert receipt.sampling == {"max_new_tokens": 2, "grammar": grammar}
    assert [it.sampling for it in receipt.outputs] == [
        {"top_k": 5}, {"seed": "1", "top_k": 5}, {"seed": "2"},
    ]  # fmt: skip
    assert [sampling_of(receipt, it) for it in receipt.outputs] == parameters
    # The same parameters at other places have the same digest.
    plain = json.loads(msgspec.json.encode(receipt))
    for output in plain["outputs"]:
        output["sampling"]["grammar"] = grammar
    del plain["sampling"]["grammar"]
    assert alterations(read_receipt(plain)) == []
    del plain["outputs"][2]["sampling"]["grammar"]
    assert alterations(read_receipt(plain)) != []
