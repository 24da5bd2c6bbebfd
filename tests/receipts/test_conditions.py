import msgspec

from server.receipts.conditions import conditions_of, differences, is_deterministic, kernels_digest
from server.version import version
from tests.http.fakes import INFO
from tests.plans import PLAN
from tests.receipts.make import CONDITIONS

replace = msgspec.structs.replace


def test_conditions_are_those_of_the_engine():
    info = replace(INFO, versions={"torch": "2.9", "python": "3", "instructions": "AVX2"})

    found = conditions_of(info, "sha256:5")

    assert (found.model, found.weights, found.dtype) == ("fake", "sha256:5", "float32")
    assert found.device == f"{PLAN.arch_name}, AVX2"
    assert found.versions == {"tessera": version(), "torch": "2.9"}


def test_reasons_and_sizes_of_a_plan_do_not_change_the_digest_of_its_kernels_but_kernels_do():
    digest = kernels_digest(PLAN)
    phase = PLAN.phases[0]

    assert (
        kernels_digest(replace(PLAN, phases=[replace(phase, why="x"), *PLAN.phases[1:]])) == digest
    )
    assert kernels_digest(replace(PLAN, memory_bandwidth_gbs=1)) == digest
    assert (
        kernels_digest(replace(PLAN, phases=[replace(phase, kernel="x"), *PLAN.phases[1:]]))
        != digest
    )


def test_each_condition_that_differs_is_named():
    other = replace(
        CONDITIONS,
        model="elsewhere",
        weights="sha256:" + "3" * 64,
        device="NVIDIA H100",
        versions={"tessera": "1", "torch": "3"},
    )

    assert differences(CONDITIONS, CONDITIONS) == []
    assert differences(CONDITIONS, other) == [
        "weights sha256:333333333333 instead of sha256:1",
        "device NVIDIA H100 instead of x86_64, AVX2",
        "version of torch 3 instead of 2",
    ]


def test_unknown_weights_are_not_equal_to_any():
    unknown = replace(CONDITIONS, weights=None)

    assert differences(unknown, unknown) == ["weights unknown instead of unknown"]


def test_a_request_is_deterministic_by_the_plan_or_because_it_asks():
    everywhere = replace(PLAN, deterministic=replace(PLAN.deterministic, requests="all"))
    asked = replace(PLAN, deterministic=replace(PLAN.deterministic, requests="on request"))

    assert is_deterministic(replace(INFO, plan=everywhere), requested=False)
    assert is_deterministic(replace(INFO, plan=asked), requested=True)
    assert not is_deterministic(replace(INFO, plan=asked), requested=False)
