"""The record of a receipt, its digests, and its check.

A receipt has prompts and outputs as token ids, their sampling parameters, and the conditions under which
they were computed. Nothing in it depends on how its JSON is written: the order of fields, white space, and whether a
number is 1 or 1.0. A seed has 64 bits, which many JSON libraries cannot represent as a number, and is a text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from model.sampling.parameters import SamplingParams
from server.engine.core.request import FinishReason

VERSION: Final = 1
OUTSIDE: Final = ("stop_string", "timeout")
"""Values of `ReceiptOutput.finish_reason` for ends that the tokens alone do not decide."""
_PREFIX: Final = "sha256:"
_SEED: Final = "seed"
_SEEDS: Final = 2**64
_DIGITS: Final = 20
_is_commit: Final = re.compile(r"[0-9a-f]{40}").fullmatch
_MAX_TOKEN: Final = 2**31
_NEUTRAL: Final = {
    field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    for field in msgspec.structs.fields(SamplingParams)
    if not field.required
}

Reason = Literal["eos", "stop", "length", "stop_string", "timeout"]
REASONS: Final = {reason: reason.name.lower() for reason in FinishReason}
"""How a receipt names the end that the engine reports; only those of `Reason` occur in one."""
Logprobs = tuple[float | None, Sequence[tuple[int, float]]]
"""Log-probability of a token, and the most likely tokens at its position with theirs."""


class ReceiptError(ValueError):
    """A text is no receipt, or one that contradicts itself."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What computed the tokens. Equal conditions give equal tokens, and other ones may.

    Attributes:
        model: name of the model.
        revision: commit of the model's repository; null for a folder that is no snapshot of one.
        weights: digest of the checkpoint's files; null where it is not known.
        adapter: digest of the adapter's files; absent for the model alone.
        quantization: format of the weights in use.
        dtype: of the computation.
        kv_cache_dtype: of the KV cache.
        kernels: digest of the executors and kernels of the plan.
        device: the GPU, or the processor and its instruction set.
        versions: of Tessera and PyTorch.
    """

    model: str
    revision: str | None = None
    weights: str | None
    quantization: str
    dtype: str
    kv_cache_dtype: str
    kernels: str
    device: str
    versions: dict[str, str]
    adapter: str | UnsetType = UNSET


class ReceiptOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice of a reply.

    Attributes:
        prompt: index of its prompt.
        sampling: its sampling parameters that not all outputs have, by name; absent if there are none.
        token_ids: generated tokens, with the one that ended it.
        digest: of the tokens.
        logprobs: digest of log-probabilities and most likely tokens, bit by bit; absent if they were not computed.
        prompt_logprobs: likewise of the prompt's tokens.
        finish_reason: `eos`, `stop` (a stop token) and `length` follow from the tokens; `stop_string` and `timeout` do
            not, so that only the tokens before such an end are compared.
    """

    prompt: int
    sampling: dict[str, Any] | UnsetType = UNSET
    token_ids: list[int]
    digest: str
    logprobs: str | UnsetType = UNSET
    prompt_logprobs: str | UnsetType = UNSET
    finish_reason: Reason


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reply was computed from and by. It contains the prompt.

    Attributes:
        version: of this format.
        conditions: what computed it.
        deterministic: whether the tokens have the same bits whatever else was computed at the same time.
        prompts: as token ids.
        sampling: the sampling parameters of all outputs, by the names of `SamplingParams`; those without effect are
            absent.
        outputs: one for each choice of the reply, in its order.
        digest: of all other fields. It finds mistakes and careless changes; it is no signature.
    """

    version: int = VERSION
    conditions: Conditions
    deterministic: bool
    prompts: list[list[int]]
    sampling: dict[str, Any]
    outputs: list[ReceiptOutput]
    digest: str = ""


def make_receipt(
    conditions: Conditions,
    prompts: list[list[int]],
    outputs: Sequence[tuple[SamplingParams, ReceiptOutput]],
    *,
    deterministic: bool,
) -> Receipt:
    """Return a receipt with its digest.

    Args:
        conditions: what computed it.
        prompts: as token ids.
        outputs: each with its sampling parameters, and without `ReceiptOutput.sampling`.
        deterministic: as `Receipt.deterministic`.
    """
    receipt = Receipt(
        conditions=conditions,
        deterministic=deterministic,
        prompts=prompts,
        sampling={},
        outputs=[output for _, output in outputs],
    )
    receipt = _with_sampling(receipt, [sampling for sampling, _ in outputs])
    return replace(receipt, digest=_digest_of(receipt))


def content_digest(receipt: Receipt) -> str:
    """Return the digest of all fields but `digest`.

    Raises:
        ReceiptError: sampling parameters are not valid.
    """
    # Written in one way, whichever parameters the receipt has at which place, and 1 or 1.0.
    return _digest_of(_with_sampling(receipt, [sampling_of(receipt, it) for it in receipt.outputs]))


def _digest_of(receipt: Receipt) -> str:
    return _digest(msgspec.json.encode(replace(receipt, digest=""), order="sorted"))


def sampling_of(receipt: Receipt, output: ReceiptOutput) -> SamplingParams:
    """Return the sampling parameters of an output.

    Raises:
        ReceiptError: as `decode_sampling`.
    """
    own = {} if output.sampling is UNSET else output.sampling
    return decode_sampling({**receipt.sampling, **own})


def _with_sampling(receipt: Receipt, parameters: Iterable[SamplingParams]) -> Receipt:
    """Return a receipt with the sampling parameters of each output: once, those that all have."""
    plain = [encode_sampling(it) for it in parameters]
    first, *others = plain
    shared = {
        name: value
        for name, value in first.items()
        if all(name in it and it[name] == value for it in others)
    }
    outputs = []
    for output, every in zip(receipt.outputs, plain, strict=True):
        own = {name: value for name, value in every.items() if name not in shared}
        outputs.append(replace(output, sampling=own or UNSET))
    return replace(receipt, sampling=shared, outputs=outputs)


def token_digest(token_ids: Sequence[int]) -> str:
    """Return the digest of tokens."""
    return _digest(msgspec.json.encode([int(it) for it in token_ids]))


def logprob_digest(logprobs: Iterable[Logprobs]) -> str:
    """Return the digest of log-probabilities: of the bits of each number."""
    digest = LogprobDigest()
    digest.update(logprobs)
    return digest.text


class LogprobDigest:
    """Computes the digest of log-probabilities in steps; see `logprob_digest`."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._encode = msgspec.msgpack.Encoder().encode

    def update(self, logprobs: Iterable[Logprobs]) -> None:
        """Add those of further tokens; a token with 20 alternatives takes 5 us."""
        for own, top in logprobs:
            row = None if own is None else float(own), [(int(i), float(value)) for i, value in top]
            self._hash.update(self._encode(row))

    @property
    def text(self) -> str:
        """The digest of those that were added."""
        return f"{_PREFIX}{self._hash.hexdigest()}"


def encode_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as plain data, without those that have no effect."""
    plain: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
    for name, neutral in _NEUTRAL.items():
        if getattr(sampling, name) == neutral:
            del plain[name]
    if _SEED in plain:
        plain[_SEED] = str(plain[_SEED])
    return plain


def decode_sampling(plain: dict[str, Any]) -> SamplingParams:
    """Read what `encode_sampling` returned.

    Raises:
        ReceiptError: a parameter is unknown, of the wrong type, or outside its range.
    """
    if unknown := sorted(plain.keys() - set(SamplingParams.__struct_fields__)):
        raise ReceiptError(f"sampling has the unknown parameter {unknown[0]!r}")
    seed = plain.get(_SEED, "0")
    if not (isinstance(seed, str) and seed.isascii() and seed.isdigit() and len(seed) <= _DIGITS):
        raise ReceiptError(f"sampling.seed must be a text of digits. Given: {seed!r:.60}")
    if int(seed) >= _SEEDS:
        raise ReceiptError(f"sampling.seed must be < 2^64. Given: {seed}")
    try:
        return msgspec.convert({**plain, _SEED: int(seed)}, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise ReceiptError(f"sampling: {error}") from None


def read_receipt(plain: object) -> Receipt:
    """Check decoded JSON and return the receipt that it is. Its digests are not compared: see `alterations`.

    Raises:
        ReceiptError: it is no receipt that this version can compute again.
    """
    version = plain.get("version") if isinstance(plain, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise ReceiptError(f"version must be {VERSION}. Given: {version}")
    try:
        receipt = msgspec.convert(plain, Receipt)
    except msgspec.ValidationError as error:
        raise ReceiptError(str(error)) from None
    if not _is_commit(receipt.conditions.revision or "0" * 40):
        raise ReceiptError(
            f"conditions.revision must be a commit. Given: {receipt.conditions.revision!r:.60}"
        )
    if not receipt.outputs:
        raise ReceiptError("outputs must not be empty")
    for i, prompt in enumerate(receipt.prompts):
        if not prompt:
            raise ReceiptError(f"prompts[{i}] must not be empty")
        _check_tokens(prompt, f"prompts[{i}]")
    for i, output in enumerate(receipt.outputs):
        if not 0 <= output.prompt < len(receipt.prompts):
            raise ReceiptError(
                f"outputs[{i}].prompt must be >= 0 and < {len(receipt.prompts)}. Given: {output.prompt}"
            )
        _check_tokens(output.token_ids, f"outputs[{i}].token_ids")
        limit = sampling_of(receipt, output).max_new_tokens
        if limit < max(1, len(output.token_ids)):
            raise ReceiptError(
                f"outputs[{i}] has {len(output.token_ids)} tokens; its sampling.max_new_tokens is {limit}"
            )
    return receipt


def alterations(receipt: Receipt) -> list[str]:
    """Return a sentence for each digest that is not that of what it is about; none of an unaltered receipt."""
    found = [
        f"outputs[{i}].token_ids do not have the digest {output.digest:.80}"
        for i, output in enumerate(receipt.outputs)
        if output.digest != token_digest(output.token_ids)
    ]
    if receipt.digest != content_digest(receipt):
        found.append(f"its content does not have the digest {receipt.digest:.80}")
    return found


def _check_tokens(token_ids: list[int], name: str) -> None:
    for i, token in enumerate(token_ids):
        if not 0 <= token < _MAX_TOKEN:
            raise ReceiptError(f"{name}[{i}] must be a token id. Given: {token}")


def _digest(content: bytes) -> str:
    return f"{_PREFIX}{hashlib.sha256(content).hexdigest()}"
