"""Makes receipts without an engine."""

import json

import msgspec

from model.sampling.parameters import SamplingParams
from server.receipts import record
from server.receipts.record import Conditions, ReceiptOutput, token_digest

CONDITIONS = Conditions(
    model="bundled", weights="sha256:1", quantization="int8", dtype="float32", kv_cache_dtype="float16",
    kernels="sha256:2", device="x86_64, AVX2", versions={"tessera": "1", "torch": "2"},
)  # fmt: skip


def make_output(token_ids=(4, 5), finish_reason="length", **options):
    return ReceiptOutput(
        prompt=0,
        token_ids=list(token_ids),
        digest=token_digest(token_ids),
        finish_reason=finish_reason,
        **options,
    )


def make_receipt(outputs=None, prompts=((1, 2, 3),), **sampling):
    parameters = SamplingParams(**{"max_new_tokens": 2} | sampling)
    outputs = [make_output()] if outputs is None else outputs
    return record.make_receipt(
        CONDITIONS,
        [list(prompt) for prompt in prompts],
        [(parameters, output) for output in outputs],
        deterministic=True,
    )


def plain_receipt(**sampling):
    """Return the decoded JSON of a receipt, which may be changed."""
    return json.loads(msgspec.json.encode(make_receipt(**sampling)))
