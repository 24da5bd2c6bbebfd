"""The reports of several engines are read as that of one."""

import msgspec
import pytest

from server.engine.core.messages import (
    EngineConfig,
    EngineStats,
    EngineTotals,
    encode_totals,
)
from server.engine.link.front_end.combined import (
    EngineReports,
    combine_info,
    combine_past,
    combine_states,
    combine_stats,
)
from server.engine.link.protocol import EngineReport, EngineState
from tests.engine.link.fake_engine import make_info

STARTING, READY, RESTARTING, STOPPED = EngineState
INFO = make_info(EngineConfig(model_path="ok", model_id="fake"), num_blocks=100)


def report(state=READY, phase="", was_ready=True, **fields):
    phase = phase or state.value
    return EngineReport(state=state, phase=phase, info=INFO if was_ready else None, **fields)


def first_start(state=STARTING, phase="loading"):
    return report(state, phase, was_ready=False)


@pytest.mark.parametrize(
    ("reports", "state", "phase"),
    [
        ([report()], READY, "ready"),
        ([first_start()], STARTING, "loading"),
        ([report(), report()], READY, "ready"),
        ([first_start(), first_start()], STARTING, "loading"),
        (
            [report(), first_start()],
            STARTING,
            "1 of 2 engines are ready; engine 1: loading",
        ),
        (
            [report(RESTARTING, "again"), report()],
            READY,
            "1 of 2 engines are ready; engine 0: again",
        ),
        ([report(RESTARTING, "again"), report(RESTARTING, "again")], RESTARTING, "again"),
        (
            [report(STOPPED, "hung"), report(RESTARTING, "again")],
            RESTARTING,
            "0 of 2 engines are ready; engine 0: hung",
        ),
        ([report(STOPPED, "hung"), report()], READY, "1 of 2 engines are ready; engine 0: hung"),
        ([report(STOPPED, "end"), report(STOPPED, "end")], STOPPED, "end"),
        ([report(), first_start(STOPPED, "failed")], STOPPED, None),
        ([report(RESTARTING), first_start()], STARTING, None),
    ],
)
def test_the_service_is_ready_once_all_engines_were_and_then_while_one_is(reports, state, phase):
    found = combine_states(reports)

    assert found[0] is state
    assert phase is None or found[1] == phase


def test_properties_are_those_of_the_first_engine_with_the_sums_of_places_and_blocks():
    other = msgspec.structs.replace(INFO, num_blocks=60, max_total_tokens=400, device="cuda:1")
    found = combine_info([report(), EngineReport(info=other)])

    assert found.num_blocks == 160
    assert found.max_num_seqs == 2 * INFO.max_num_seqs
    assert found.max_total_tokens == 400
    assert found.plan.num_engines == 2
    assert found.device == INFO.device
    assert combine_info([report(), first_start()]) is None
    assert combine_info([report()]) is INFO


def test_statistics_are_sums_and_rates_those_of_the_engines_that_are_ready():
    a = EngineStats(
        num_running=2, num_blocks=100, num_free_blocks=90, kv_usage=0.1, num_steps=5, prompt_rate=10.0,
        num_free_places=3, waiting_by_length=[1, 2],
        totals=encode_totals(EngineTotals(num_ended=[1, 2])),
    )  # fmt: skip
    b = EngineStats(
        engine=1, num_running=1, num_blocks=300, num_free_blocks=200, kv_usage=0.3, num_steps=7, prompt_rate=20.0,
        num_free_places=4, waiting_by_length=[5],
        totals=encode_totals(EngineTotals(num_ended=[3])),
    )  # fmt: skip
    found = combine_stats([report(stats=a), report(stats=b)])

    assert (found.num_running, found.num_blocks, found.num_free_blocks) == (3, 400, 290)
    assert found.kv_usage == pytest.approx(0.25)
    assert (found.num_steps, found.prompt_rate, found.num_free_places) == (12, 30.0, 7)
    assert found.waiting_by_length == [6, 2]
    assert found.decode_totals().num_ended == [4, 2]
    lost = combine_stats([report(stats=a), report(RESTARTING, stats=b)])
    assert (lost.num_steps, lost.prompt_rate, lost.num_free_places) == (12, 10.0, 3)


@pytest.mark.parametrize("field", EngineStats.__struct_fields__)
def test_no_statistic_of_the_second_engine_is_left_out(field):
    kinds = {list: [1], msgspec.Raw: encode_totals(EngineTotals(num_ended=[1]))}
    value = kinds.get(type(getattr(EngineStats(), field)), 1)
    second = EngineStats(**{"num_blocks": 1, field: value})

    combined = combine_stats([report(), report(stats=second)])

    # The first engine's rates are not known, and taken to be those of the second.
    expected = 2 * value if field.endswith("_rate") else value
    if field != "engine":
        assert getattr(combined, field) == expected


def test_names_of_adapters_of_all_engines_are_listed_once():
    a, b = (
        EngineStats(num_blocks=1, running_adapters=names, waiting_adapters=names[:1])
        for names in (["bank", "shop"], ["bank", "cafe"])
    )

    found = combine_stats([report(stats=a), report(stats=b)])

    assert (found.running_adapters, found.waiting_adapters) == (["bank", "cafe", "shop"], ["bank"])
    many = EngineStats(num_blocks=1, running_adapters=[f"{i:03}" for i in range(40)])
    assert len(combine_stats([report(stats=a), report(stats=many)]).running_adapters) == 32


def test_counters_of_earlier_processes_are_sums():
    reports = [report(past=EngineStats(num_steps=n)) for n in (1, 2)]

    assert combine_past(reports).num_steps == 3


def test_what_is_combined_is_one_object_while_nothing_changes():
    engines = EngineReports()
    engines.reports = [report(), report()]
    stats, info = engines.stats, engines.info
    assert engines.stats is stats
    assert engines.info is info
    engines.reports[1].stats = EngineStats(num_running=1)

    assert engines.stats.num_running == 1
    assert engines.info is info
    engines.reports[1].info = msgspec.structs.replace(INFO, num_blocks=1)
    assert engines.info.num_blocks == 101
    assert engines.num_ready == 2
