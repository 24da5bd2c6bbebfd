import json
import subprocess
import sys

import pytest

from benchmarks.cpu_peers.build import InstructionSet, build_folder, flags_of
from benchmarks.cpu_peers.contenders import ContenderError, Round, read_llama_bench
from benchmarks.cpu_peers.other_load import busy_seconds, other_load
from benchmarks.cpu_peers.streams import Llama, memory_mib
from benchmarks.cpu_peers.work import Work
from server.cli.bench.serve.apis import OpenAI
from tests.reliability.processes import process_tree

PROMPT = {"n_prompt": 512, "n_gen": 0, "avg_ts": 123.5, "samples_ts": [123.5]}
DECODE = {"n_prompt": 0, "n_gen": 128, "n_depth": 32, "avg_ts": 45.25, "samples_ts": [45.25]}


def test_llama_bench_figures_are_named_by_prompt_and_decode():
    figures = read_llama_bench(
        json.dumps([PROMPT, PROMPT | {"n_prompt": 128, "avg_ts": 99}, DECODE])
    )

    assert figures == {"prefill_512": 123.5, "prefill_128": 99.0, "decode_1": 45.25}


@pytest.mark.parametrize("text", ["", "error: no model", '{"n_prompt": 1}', '[{"n_prompt": 0}]'])
def test_other_output_of_llama_bench_is_an_error(text):
    with pytest.raises(ContenderError, match="llama-bench wrote"):
        read_llama_bench(text)


@pytest.mark.parametrize(
    ("api", "event", "count"),
    [
        (Llama, {"tokens_predicted": 128, "stop": True}, 128),
        (OpenAI, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 64}}, 64),
        (OpenAI, {"choices": [{"text": "a"}], "usage": None}, None),
    ],
)
def test_the_last_event_of_either_server_reports_its_tokens(api, event, count):
    assert api().read(json.dumps(event).encode()).output_tokens == count


def test_the_work_is_passed_on_unchanged():
    work = Work(streams=(1, 2), tokens=9)

    assert Work.decode(work.encode()) == work


def test_builds_of_different_instructions_do_not_share_a_folder(tmp_path):
    folders = {build_folder(tmp_path, "0.3.36", isa) for isa in ("native", "avx2")}

    assert len(folders | {build_folder(tmp_path, "0.3.35", "native")}) == 3


def test_the_avx2_build_has_no_avx512():
    flags = flags_of("avx2")

    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512=OFF"} <= set(flags)


def test_only_shapes_have_random_weights():
    shared = (Work(), 2, InstructionSet((), {}).environment)

    assert "--load-format=dummy" in Round("qwen3-0.6b", *shared).settings("int8")
    assert "--load-format=dummy" not in Round("bundled", *shared).settings("int8")


def test_prompts_have_the_works_length_and_are_the_same_for_all_contenders():
    round_ = Round("bundled", Work(prompt=32), 2, {})

    prompts = round_.prompts(8)

    assert [len(prompt) for prompt in prompts] == [32] * 8
    assert prompts == round_.prompts(8)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_process_includes_its_grandchildren():
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", nested], **pipes) as child:
        child.stdout.readline()
        grandchild = process_tree(child.pid)[1].pid
        memory = memory_mib(child.pid)
        child.communicate(b"\n")

    assert grandchild != child.pid
    assert memory["rss"] >= memory["pss"] > 1


def test_busy_time_includes_stolen_time_but_no_idle_time():
    assert busy_seconds("cpu  100 20 30 4000 500 6 7 80 900 900", 100) == 2.43


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processor_time_of_a_child_is_no_other_load():
    work = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"]
    with other_load() as alone:
        subprocess.run(work, check=True)
    with subprocess.Popen([*work[:2], work[2].replace("0.5", "60")]) as other:
        with other_load() as beside:
            subprocess.run(work, check=True)
        other.kill()

    assert len(alone) == 1
    assert beside[0] > 0.3
