"""Drafts for the decode rows of an engine's steps: the tokens that the sequences have without drafts, or wrong ones."""

from __future__ import annotations

from model.sampling.parameters import SamplingParams
from server.engine.core.request import GenerateRequest
from tests.engine.core.bookkeeping import propose
from tests.tiny_checkpoint import VOCAB_SIZE

MOST = 7
TOLERANCE = 1e-4
"""Of log-probabilities in float32, where the bits of a token may depend on the other tokens of its step."""
WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": True, "min_new_tokens": 12},
    {"temperature": 0.9, "seed": 5, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.2, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logprobs": True},
    {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.0, "bad_words": ((1,), (2, 3)), "logit_bias": {4: 2.0}},
    {"temperature": 1.0, "seed": 8, "min_p": 0.02, "typical_p": 0.9, "prompt_logprobs": True},
]
"""Sampling parameters that depend on a token's position, on the tokens before it, or on neither."""


def requests(rng, ways=WAYS, *, most_prompt=30, max_new_tokens=25, **fields):
    """Return a request for each of some sampling parameters."""
    return [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=[
                rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, most_prompt))
            ],
            sampling=SamplingParams(max_new_tokens=max_new_tokens, **way),
            **fields,
        )
        for i, way in enumerate(ways)
    ]


def draft(engine, texts, rng, *, wrong=0.0):
    """Give the decode rows of later steps drafts of 0 to 7 tokens.

    Args:
        engine: a `LocalEngine`.
        texts: by request id, the tokens that the request gets without drafts.
        rng: chooses how many of the following tokens are proposed.
        wrong: share of the drafts of which one token is another one.

    Returns:
        A list that receives the started steps that have a draft.
    """
    scheduler = engine.engine._scheduler
    scheduler.drafts.most = 0  # the drafts are those of this function
    schedule, drafted = scheduler.schedule, []

    def propose_some():
        output = schedule()
        drafts = {}
        for sequence in output.decode.batch.sequences:
            known = sequence.num_output_tokens
            tokens = texts[sequence.request_id][known : known + rng.randint(0, MOST)]
            if tokens and rng.random() < wrong:
                at = rng.randrange(len(tokens))
                tokens[at] = (tokens[at] + 1) % VOCAB_SIZE
            drafts[sequence.request_id] = tokens
        output = propose(scheduler, output, drafts)
        if output.decode.drafts is not None:
            drafted.append(output)
        return output

    scheduler.schedule = propose_some
    return drafted


def check(make_engine, asked, rng, *, exact=False, tolerance=TOLERANCE):
    """Check that requests get the replies that they get without drafts, with right drafts and with wrong ones.

    Args:
        make_engine: returns a new engine.
        asked: the requests.
        rng: chooses the drafts.
        exact: whether log-probabilities must have the same bits.
        tolerance: by which they may differ otherwise.

    Returns:
        The steps with a draft.
    """
    expected = without_drafts(make_engine()).generate(asked)
    texts = {
        request.request_id: [event.token_id for event in events]
        for request, events in zip(asked, expected, strict=True)
    }
    assert all(event.error is None for events in expected for event in events)
    steps = []
    for wrong in (0.0, 0.5):
        engine = make_engine()
        drafted = draft(engine, texts, rng, wrong=wrong)
        found = engine.generate(asked)
        for one, other in zip(expected, found, strict=True):
            compare(one, other, exact=exact, tolerance=tolerance)
        stats = engine.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        # Fewer steps than tokens: the right drafts were kept.
        assert wrong or drafted[-1].step < max(map(len, texts.values())) - 1
        steps += drafted
    return steps


def without_drafts(engine):
    """Return a `LocalEngine`, which proposes nothing from now on."""
    engine.engine._scheduler.drafts.most = 0
    return engine


def compare(expected, found, *, exact, tolerance):
    """Check that two requests got the same events."""
    plain = [(it.token_id, it.finish_reason, it.error) for it in found]
    assert plain == [(it.token_id, it.finish_reason, it.error) for it in expected]
    if exact:
        assert found == expected
        return
    for one, other in zip(expected, found, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None:
            assert abs(one.logprob - other.logprob) < tolerance
        for (_, here), (_, there) in zip(one.top_tokens, other.top_tokens, strict=True):
            assert abs(here - there) < tolerance
