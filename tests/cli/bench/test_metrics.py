"""Metrics of a run, computed from synthetic requests."""

import pytest

from server.cli.bench.serve.metrics import Distribution, Limits, RequestRecord, summarize


def record(started=10.0, times=(10.5, 10.6, 10.8), **fields):
    fields = {"asked_tokens": len(times), "output_tokens": len(times)} | fields
    fields = {"prompt_tokens": 5, "reads": len(times), "counted": True} | fields
    return RequestRecord(started=started, times=list(times), **fields)


def failed(error, detail="", started=10.0):
    return RequestRecord(started=started, asked_tokens=3, error=error, detail=detail)


def test_the_first_token_is_timed_from_the_request():
    assert record().ttft == 0.5


def test_time_per_token_excludes_the_first_token():
    assert record(times=(1.0, 1.25, 2.0), started=0.0).tpot == 0.5


def test_time_per_token_divides_by_the_tokens_that_the_server_counts():
    assert record(times=(1.0, 2.0), started=0.0, output_tokens=5).tpot == 0.25


def test_one_token_has_no_time_per_token():
    assert record(times=(1.0,)).tpot is None


def test_end_to_end_is_until_the_last_token():
    assert record(times=(1.0, 1.25, 2.0), started=0.5).e2e == 1.5


def test_inter_token_latency_has_all_gaps_and_0_for_tokens_that_arrive_together():
    summary = summarize(
        [record(0.0, (1.0, 1.5, 1.5)), record(0.0, (2.0, 3.0)), record(0.0, (7.0,))]
    )

    assert summary.itl_ms.count == 3
    assert summary.itl_ms.mean == 500.0
    assert summary.itl_ms.largest == 1000.0
    assert summary.itl_ms.percentiles[50] == 500.0


def test_percentiles_are_interpolated_linearly_between_the_sorted_values():
    values = Distribution.of_seconds([0.04, 0.01, 0.02, 0.03])

    assert values.mean == 25.0
    assert values.percentiles == pytest.approx({50: 25.0, 90: 37.0, 95: 38.5, 99: 39.7})
    assert Distribution.of_seconds([0.25]).percentiles == {50: 250, 90: 250, 95: 250, 99: 250}
    assert Distribution.of_seconds([]) is None


def test_rates_are_over_the_time_from_the_first_request_to_the_last_token():
    summary = summarize([record(10.0, (11.0, 12.0)), record(11.0, (13.0, 13.5, 14.0))])

    assert summary.seconds == 4.0
    assert summary.requests_per_second == 0.5
    assert summary.output_tokens_per_second == 5 / 4
    assert summary.total_tokens_per_second == (5 + 10) / 4


def test_failures_are_counted_by_category_with_an_example():
    summary = summarize(
        [
            failed("HTTP 429", "first", started=9.0),
            record(10.0, (11.0, 12.0)),
            failed("HTTP 429", "second"),
            failed("timeout"),
        ]
    )

    assert summary.completed == 1
    assert summary.failed == 3
    assert summary.errors == {"HTTP 429": 2, "timeout": 1}
    assert summary.examples["HTTP 429"] == "first"
    assert summary.output_tokens == 2
    assert summary.ttft_ms.count == 1
    assert summary.seconds == 3.0  # the load begins with the failed request


def test_a_run_without_complete_responses_has_no_latencies_and_rates_of_0():
    summary = summarize([failed("cannot connect")])

    assert (summary.completed, summary.failed) == (0, 1)
    assert summary.ttft_ms is None
    assert summary.itl_ms is None
    assert summary.output_tokens_per_second == 0.0


def test_short_and_uncounted_responses_are_reported():
    summary = summarize([record(asked_tokens=9), record(counted=False)])

    assert (summary.short, summary.uncounted) == (1, 1)


def test_tokens_per_read_shows_tokens_that_arrive_together():
    assert summarize([record(times=(1.0, 1.0, 2.0, 2.0), reads=2)]).tokens_per_read == 2.0


def test_the_lag_is_reported_for_requests_with_a_planned_arrival():
    records = [record(lag=0.001), record(lag=0.003)]

    assert summarize(records).lag_ms is None
    assert summarize(records, planned=True).lag_ms.mean == 2.0


def test_goodput_counts_requests_within_every_limit():
    records = [
        record(0.0, (0.25, 0.5, 0.75)),  # 250 ms, then 250 a token
        record(0.0, (0.5, 0.75, 1.0)),
        record(0.0, (0.25, 1.0, 2.0)),  # 875 a token
        failed("timeout", started=0.0),
    ]

    assert summarize(records, Limits(ttft=250, tpot=250)).goodput == 1 / 2
    assert summarize(records, Limits(ttft=500)).goodput == 3 / 2
    assert summarize(records, Limits(e2e=1000)).goodput == 2 / 2
    assert summarize(records).goodput is None


def test_a_single_token_meets_any_limit_on_the_time_per_token():
    assert summarize([record(0.0, (1.0,))], Limits(tpot=1)).goodput == 1.0


def test_limits_are_parsed():
    assert Limits.parse("ttft:200,tpot:20") == Limits(ttft=200, tpot=20)
    assert Limits.parse("e2e:1500.5") == Limits(e2e=1500.5)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:0", "ttft:x", "itl:3", "ttft:1,ttft:2", "e2e:nan"]
)
def test_invalid_limits_are_refused(text):
    with pytest.raises(ValueError, match=r"ttft|limit"):
        Limits.parse(text)
