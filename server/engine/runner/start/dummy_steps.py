"""Dummy steps for the warm-up: steps that use every kernel, and the step that needs the most memory.

All positions of a dummy sequence are in block 0, so a cache of one block is enough. The keys and values that the steps
read are meaningless, and those that they write are overwritten later.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import msgspec

from model.sampling.parameters import SamplingParams
from server.engine.core.request import GenerateRequest
from server.engine.core.sequence import Sequence
from server.engine.core.step import DecodeRows, ScheduledSequence, SchedulerOutput
from server.engine.runner.step.shared_prefix import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from server.engine.core.limits import SchedulerConfig

_CHUNK_TOKENS: Final = 64
_TOP_LOGPROBS: Final = 5
_TOP_K: Final = 2
_GREEDY: Final = SamplingParams(max_new_tokens=1, temperature=0.0)


def first_steps(length: int, limits: SchedulerConfig, block_size: int) -> Iterator[SchedulerOutput]:
    """Yield a step with a chunk of a prompt and a step with one token.

    Args:
        length: tokens of the sequence, at least 2; kernels are selected for this length.
        limits: of a step.
        block_size: tokens per block.
    """
    chunk = min(_CHUNK_TOKENS, limits.max_num_batched_tokens, length)
    sequence = _sequence(length, block_size, _GREEDY)
    yield _output((), (_chunk(sequence, chunk),))
    yield _output((_chunk(sequence, 1),), ())


def short_prompt(block_size: int) -> SchedulerOutput:
    """Return a step with a whole prompt, which reads no keys and values but its own.

    Args:
        block_size: tokens per block.
    """
    return _output((), (_chunk(_sequence(2, block_size, _GREEDY), 2),))


def longest_chunk(limits: SchedulerConfig, block_size: int) -> SchedulerOutput:
    """Return a step with as many tokens of one prompt as the limits allow: kernels for many tokens differ.

    Args:
        limits: of a step.
        block_size: tokens per block.
    """
    tokens = min(limits.prefill_budget, limits.max_model_len)
    return _output((), (_chunk(_sequence(tokens, block_size, _GREEDY), tokens),))


def unsampled_token(length: int, block_size: int) -> SchedulerOutput:
    """Return a step of one token without logits. It is computed layer by layer even if decode steps are one launch.

    Args:
        length: tokens of the sequence.
        block_size: tokens per block.
    """
    sequence = _sequence(length, block_size, _GREEDY)
    return _output((ScheduledSequence(sequence, length - 1, 1, num_logits=0),), ())


def draft(block_size: int) -> SchedulerOutput:
    """Return a step of a decode row with a draft of one token: recurrent mixers have other kernels for such rows.

    Args:
        block_size: tokens per block.
    """
    sequence = _sequence(2, block_size, _GREEDY)
    return _output((ScheduledSequence(sequence, 0, 2, num_logits=2, draft=(0,)),), ())


def crowds(length: int, limits: SchedulerConfig, block_size: int) -> Iterator[SchedulerOutput]:
    """Yield decode and prompt steps of 1, 2, 4, ... sequences up to the limit: kernels are compiled per power of two.

    Args:
        length: tokens of the longest sequence, at least 2.
        limits: of a step.
        block_size: tokens per block.
    """
    count = 1
    while count < 2 * limits.max_num_seqs:
        longest = _sequence(length, block_size, _GREEDY)
        others = [_sequence(2, block_size, _GREEDY) for _ in range(count - 1)]
        members = (longest, *others)
        yield _output(tuple(_chunk(s, 1) for s in members), ())
        yield _output((), tuple(_chunk(s, 2) for s in members))
        count *= 2


def few_rows(
    counts: Iterable[int], limits: SchedulerConfig, block_size: int
) -> Iterator[SchedulerOutput]:
    """Yield steps with these numbers of tokens: decode rows if the limits allow as many, else the fewest prompts.

    Args:
        counts: numbers of tokens for which linear layers have special kernels; larger ones are cut to the limits.
        limits: of a step.
        block_size: tokens per block.
    """
    longest = limits.max_model_len
    most = min(limits.prefill_budget, limits.max_num_seqs * longest)
    for count in sorted({min(count, most) for count in counts}):
        if count <= limits.max_num_seqs:
            members = [_sequence(2, block_size, _GREEDY) for _ in range(count)]
            yield _output(tuple(_chunk(s, 1) for s in members), ())
        else:
            whole, rest = divmod(count, longest)
            lengths = [longest] * whole + [rest] * bool(rest)
            yield _output((), tuple(_chunk(_sequence(n, block_size, _GREEDY), n) for n in lengths))


def prompts(
    counts: Iterable[int], limits: SchedulerConfig, block_size: int
) -> Iterator[SchedulerOutput]:
    """Yield steps of one prompt with these numbers of tokens, computed layer by layer even if decode rows are not.

    Args:
        counts: numbers of tokens; larger ones than the limits are left out.
        limits: of a step.
        block_size: tokens per block.
    """
    for count in counts:
        if count <= min(limits.max_num_batched_tokens, limits.max_model_len):
            yield _output((), (_chunk(_sequence(count, block_size, _GREEDY), count),))


def sampling_ways(block_size: int) -> Iterator[SchedulerOutput]:
    """Yield decode steps of one sequence for each set of sampling kernels; with a penalty these read float32 logits.

    Args:
        block_size: tokens per block.
    """
    for top_k, penalty in itertools.product((0, _TOP_K), (1.0, 1.1)):
        sampling = SamplingParams(
            max_new_tokens=1,
            temperature=1.0,
            top_k=top_k,
            repetition_penalty=penalty,
            logprobs=True,
        )
        yield _output((_chunk(_sequence(2, block_size, sampling), 1),), ())


def sharing(length: int, limits: SchedulerConfig, block_size: int) -> Iterator[SchedulerOutput]:
    """Yield a decode step of two sequences with the shortest shared prefix, if the limits allow one.

    Args:
        length: tokens of the longer sequence after the shared prefix, at least 2.
        limits: of a step.
        block_size: tokens per block.
    """
    shared = ALIGNMENT * block_size
    if shared < limits.max_model_len and limits.max_num_seqs > 1:
        shorter = _sequence(shared + 1, block_size, _GREEDY)
        longer = _sequence(min(shared + length, limits.max_model_len), block_size, _GREEDY)
        yield _output((_chunk(shorter, 1), _chunk(longer, 1)), ())


def largest_steps(
    length: int, limits: SchedulerConfig, vocab_size: int, block_size: int
) -> Iterator[SchedulerOutput]:
    """Yield steps with the most sequences and tokens, sampled in the way that needs the most memory.

    In the first as many sequences decode as the limits allow; the second, if it may have more tokens, has only prompts.

    Args:
        length: tokens of each sequence, at least 2.
        limits: of a step.
        vocab_size: size of the vocabulary.
        block_size: tokens per block.
    """
    sampling = SamplingParams(
        max_new_tokens=1,
        temperature=1.0,
        # More than the sampler's first candidates, so that it sorts the whole vocabulary.
        top_k=vocab_size,
        typical_p=0.9,
        repetition_penalty=1.1,
        logprobs=True,
        top_logprobs=min(_TOP_LOGPROBS, vocab_size),
        prompt_logprobs=True,
        prompt_top_logprobs=min(_TOP_LOGPROBS, vocab_size),
    )
    longest = _sequence(length, block_size, sampling)
    chunks: list[ScheduledSequence] = []
    spare = limits.max_num_batched_tokens - limits.max_num_seqs
    while spare > 0 and len(chunks) < limits.max_num_seqs:
        more = min(spare, length - 1)
        chunks.append(_chunk(longest, 1 + more))
        spare -= more
    decoded = [_chunk(longest, 1)] * (limits.max_num_seqs - len(chunks))
    yield _output(tuple(decoded), tuple(chunks))
    if limits.prefill_budget > limits.max_num_batched_tokens:
        whole, rest = divmod(limits.prefill_budget, length)
        counts = [*[length] * whole, rest][: limits.max_num_seqs]
        yield _output((), tuple(_chunk(longest, count) for count in counts if count > 1))


def _sequence(length: int, block_size: int, sampling: SamplingParams) -> Sequence:
    """Return a sequence with a prompt of `length` tokens with id 0."""
    # No request has the id -1.
    sequence = Sequence(
        GenerateRequest(request_id=-1, prompt_token_ids=[0] * length, sampling=sampling)
    )
    sequence.block_table = [0] * -(-length // block_size)
    return sequence


def deterministic(output: SchedulerOutput) -> SchedulerOutput:
    """Make a step's sequences deterministic; return the step with them."""
    for scheduled in (*output.decode, *output.prefill):
        scheduled.sequence.deterministic = True
    return msgspec.structs.replace(output, decode=DecodeRows.of(output.decode))


def _chunk(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """Schedule the last tokens of a sequence."""
    return ScheduledSequence(sequence, sequence.num_tokens - num_tokens, num_tokens, num_logits=1)


def _output(
    decode: tuple[ScheduledSequence, ...], prefill: tuple[ScheduledSequence, ...]
) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        decode=DecodeRows.of(decode),
        prefill=prefill,
        num_tokens=sum(s.num_tokens for s in (*decode, *prefill)),
        first_scheduled=(),
        preempted=(),
    )
