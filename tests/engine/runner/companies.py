"""Random companies of deterministic requests: other requests, limits of a step, chunks, preemptions and prefix hits."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import msgspec

from model.sampling.parameters import SamplingParams
from server.engine.core.request import GenerateRequest, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.local_engine import LocalEngine

NUM_REQUESTS = 64
_WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": True},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.0},
]
"""Ways to sample; every second request takes the first."""


@dataclasses.dataclass(frozen=True)
class Company:
    """What computes the requests beside each other.

    Attributes:
        config: fields of the `EngineConfig`.
        requests: requests in the order of their arrival; several waves, one after the other.
    """

    config: dict[str, Any]
    waves: list[list[GenerateRequest]]


def make_requests(vocab_size: int, seed: int, longest: int = 200) -> list[GenerateRequest]:
    """Make the deterministic requests whose results are compared; some prompts begin alike."""
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(longest // 2)]
    made = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest // 2))]
        way = _WAYS[0] if i % 2 else rng.choice(_WAYS)
        sampling = SamplingParams(
            max_new_tokens=rng.randint(1, longest // 5),
            seed=rng.getrandbits(64),
            logprobs=True,
            **way,
        )
        prompt = prefix[: rng.choice((0, 0, len(prefix)))] + own
        made.append(
            GenerateRequest(
                request_id=i, prompt_token_ids=prompt, sampling=sampling, deterministic=True
            )
        )
    return made


def alone(requests: list[GenerateRequest]) -> Company:
    """Return the company in which each request is computed alone, with a whole prompt and without prefix hits."""
    config = {"max_num_seqs": 1, "max_num_batched_tokens": 4096, "enable_prefix_caching": False}
    return Company({**config, "cuda_graphs": False}, [[request] for request in requests])


def random_company(
    requests: list[GenerateRequest], vocab_size: int, seed: int, block_size: int
) -> Company:
    """Return a random company of all requests, with others that are not deterministic."""
    rng = random.Random(seed)
    most_seqs = rng.choice((1, 2, 3, 8, 17, 40, 64))
    longest = max(len(it.prompt_token_ids) + it.sampling.max_new_tokens for it in requests)
    spacious = rng.random() < 0.5
    config = {
        "max_num_seqs": most_seqs,
        "max_num_batched_tokens": most_seqs + rng.choice((0, 5, 16, 100, 1000)),
        "enable_prefix_caching": rng.random() < 0.7,
        "kv_cache_tokens": (64 if spacious else 3) * longest // block_size * block_size,
        "cuda_graphs": rng.random() < 0.7,
        "overlap": rng.random() < 0.7,
    }
    others = [
        msgspec.structs.replace(
            rng.choice(requests), request_id=1000 + i, deterministic=rng.random() < 0.3
        )
        for i in range(rng.choice((0, 10, 30)))
    ]
    arriving = rng.sample([*requests, *others], len(requests) + len(others))
    waves = []
    while arriving:
        size = rng.choice((1, 7, 30, 100))
        waves.append(arriving[:size])
        arriving = arriving[size:]
    return Company(config, waves)


def results(engine: LocalEngine, company: Company) -> dict[int, list[TokenEvent]]:
    """Compute a company; return the events of its requests by id, which compare equal only if all bits are equal."""
    found: dict[int, list[TokenEvent]] = {}
    for wave in company.waves:
        for request, events in zip(wave, engine.generate(wave), strict=True):
            if request.request_id < NUM_REQUESTS:
                found[request.request_id] = events
    return found


def check_companies(
    make_engine: Callable[..., LocalEngine],
    vocab_size: int,
    count: int,
    block_size: int,
    longest: int = 200,
) -> int:
    """Compare the results of the requests in `count` random companies with those of each alone, bit by bit.

    Args:
        make_engine: makes an engine with changed fields of its configuration.
        vocab_size: ids of the prompts are below it.
        count: random companies.
        block_size: of the engines.
        longest: tokens of the longest prompt, and five times those of the longest output.

    Returns:
        The number of preemptions.
    """
    requests = make_requests(vocab_size, 0, longest)
    company = alone(requests)
    expected = results(make_engine(**company.config), company)
    assert len(expected) == NUM_REQUESTS
    num_preemptions = 0
    for seed in range(count):
        company = random_company(requests, vocab_size, seed, block_size)
        engine = make_engine(**company.config)
        found = results(engine, company)
        wrong = [i for i in range(NUM_REQUESTS) if found[i] != expected[i]]
        assert not wrong, f"requests {wrong} differ in company {seed}: {company.config}"
        num_preemptions += engine.engine.stats().num_preemptions
    return num_preemptions
