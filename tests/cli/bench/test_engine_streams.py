"""The load of `tessera bench serve` without HTTP: a request begins whenever another ends."""

from __future__ import annotations

import numpy as np
import pytest

from server.cli.bench.engine.run import EngineRun
from server.engine.core.messages import EngineConfig
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_tokens": 1024, "block_size": 8}
    return EngineRun(
        EngineConfig(
            model_path=str(folder), model_id="tiny", device="cpu", quantization="none", **config
        )
    )


@pytest.mark.parametrize(("concurrency", "expected"), [(3, 3), (1, 1), (None, 8)])
def test_as_many_requests_run_as_are_allowed(engine, concurrency, expected):
    lengths = [5, 9, 2, 7, 1, 12, 4, 6]
    running, most, answered = set(), 0, 0

    def count(step):
        nonlocal most, answered
        running.update(step.request_ids)
        most = max(most, len(running))
        for request_id, reason in zip(step.request_ids, step.finish_reasons, strict=True):
            answered += 1
            if reason:
                running.discard(request_id)

    requests = engine.random_requests(lengths, lengths, np.random.default_rng(0))
    trace = engine.run(requests, count, concurrency)

    assert answered == sum(trace.tokens) == sum(lengths)
    assert most == expected
    assert not running
