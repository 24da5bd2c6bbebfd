"""The benchmark of recurrent mixers: what a case must do at least, and a run on the CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks import recurrent
from kernels.arch import CATALOGUE
from kernels.recurrent.problem import GatedDeltaShape, Mamba2Shape, ShortConvShape


def test_the_mixers_of_all_models_are_found():
    found = {type(shape) for model in recurrent.MODELS for shape in recurrent.mixers(model)}

    assert found == {GatedDeltaShape, Mamba2Shape, ShortConvShape}
    assert all(recurrent.mixers(model) for model in recurrent.MODELS)


def test_a_decode_row_moves_its_states_twice_and_a_new_prompt_once():
    shape = Mamba2Shape(2, 4, 8, 1, 4, None)
    token, state = 2 * (8 + 24 + 2 + 8), 4 * (3 * 24 + 2 * 4 * 8)

    decode = recurrent.work(recurrent.Case("", shape, "decode", 3), 2)
    prompt = recurrent.work(recurrent.Case("", shape, "prompt", 3), 2)

    assert decode == (3 * (token + 2 * state), 0)
    assert prompt.num_bytes == 3 * token + state
    # Products of c with b and with the state, of the factors with x, and the growth of the state.
    assert prompt.flops == 3 * 2 * (64 * 8 + 2 * (2 * 8 * 4 + 64 * 4))


@pytest.mark.parametrize(("moved", "flops", "kind"), [(10**9, 1, "memory"), (1, 10**13, "flops")])
def test_the_bound_is_the_longer_of_both_times(moved, flops, kind):
    arch = CATALOGUE["h100"]
    us, what = recurrent.Work(moved, flops).bound_us(arch)

    assert what == kind
    peak = (
        moved / arch.memory_bandwidth_gbs / 1e3
        if kind == "memory"
        else flops / arch.half_tflops / 1e6
    )
    assert us == pytest.approx(peak)


def test_a_kernel_that_was_asked_for_and_cannot_compute_a_case_is_told(tmp_path, capsys):
    recurrent.main(
        ["--device=cpu", "--models", "lfm2-1.2b", "--rows", "1", "--prompts", "--round-seconds=0",
         "--kernels", "triton_recurrent", "torch_recurrent", f"--out={tmp_path}", "--commit=abc"]
    )  # fmt: skip

    assert (
        "triton_recurrent cannot compute ShortConv in float32: needs a GPU"
        in capsys.readouterr().out
    )


def test_a_run_on_the_cpu_writes_a_row_of_each_case(tmp_path):
    recurrent.main(
        ["--device=cpu", "--models", "lfm2-1.2b", "--rows", "1", "--prompts", "5", "--round-seconds=0",
         "--kernels", "torch_recurrent", f"--out={tmp_path}", "--commit=abc"]
    )  # fmt: skip

    record = json.loads((tmp_path / "cpu-recurrent-abc.json").read_text())
    assert [(row["kind"], row["tokens"]) for row in record["rows"]] == [
        ("decode", 1),
        ("prompt", 5),
    ]
    assert all(row["us"] > 0 and row["difference"] == 0 for row in record["rows"])
