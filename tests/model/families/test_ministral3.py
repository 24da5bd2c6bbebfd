"""Ministral 3 within its original context needs no scale of queries, so that the fast paths compute it."""

import pytest

from model.checkpoint.config import ModelConfig
from model.executors import cpu_library
from model.network.spec import QueryScale
from tests.model.checkpoint.hf_checkpoints import CASES

CASE = CASES["ministral3"]  # whose original context has 48 tokens


@pytest.mark.parametrize(("limit", "is_scaled"), [(None, True), (49, True), (48, False)])
def test_the_scale_of_queries_is_dropped_if_no_sequence_is_longer_than_the_context(
    tmp_path, limit, is_scaled
):
    CASE.save(tmp_path)

    network = ModelConfig.from_folder(tmp_path).within(limit).network

    scale = QueryScale(0.5, 48) if is_scaled else None
    assert {mixer.query_scale for mixer in network.attentions} == {scale}
    reason = "no scale of queries by position beyond the original context"
    assert (reason in cpu_library.unsupported(network)) == is_scaled
