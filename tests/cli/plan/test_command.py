"""`tessera plan`: plans for all known processors on any machine, and error messages."""

import json
import shutil
import subprocess
import sys

import huggingface_hub
import msgspec
import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.cpu.library import load
from model.hub.resolve import resolve
from server.cli.bench.engine.options import SHAPES
from server.cli.plan.command import WIDTH, render
from server.engine.core.plan_report import PlanReport
from tests.plans import PLAN


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that writes a folder with a changed configuration of the bundled model."""

    def make(**changes):
        config = json.loads((resolve("bundled") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return str(tmp_path)

    return make


@pytest.fixture
def cpu_library():
    """Skip the test where the CPU library is not built for this processor."""
    if isinstance(found := load(), str):
        pytest.skip(found)


@pytest.mark.parametrize("arch", CATALOGUE)
def test_every_known_processor_has_a_plan_for_the_bundled_model(tessera, arch):
    status, out, err = tessera("plan", "--quantization=none", "--arch", arch)

    assert (status, err) == (0, "")
    assert out.startswith(CATALOGUE[arch].name)
    assert "bundled in" in out
    kernel = "portable" if CATALOGUE[arch].has_triton_tensor_cores else "torch"
    if CATALOGUE[arch].is_cpu and not isinstance(load(), str):
        kernel = "cpu"
    decode = f"{kernel}_decode"
    if CATALOGUE[arch].sm == 90:
        kernel, decode = "hopper", "hopper_keys_on_m_decode"
    assert f"{kernel}_prefill" in out
    assert decode in out


def test_a_shape_of_the_benchmark_is_planned_by_its_name(tessera):
    named = tessera("plan", "qwen3-0.6b", "--arch=h100", "--json")
    folder = tessera("plan", str(SHAPES / "qwen3-0.6b"), "--arch=h100", "--json")

    assert named == folder
    assert named[0] == 0


def test_kernels_that_never_ran_are_planned_with_the_flag_only(tessera):
    asked = ("plan", "--arch=b200", "--model", str(SHAPES / "llama-3.1-8b"))

    _, default, _ = tessera(*asked)
    _, allowed, _ = tessera(*asked, "--unmeasured-kernels")

    assert "prefill: portable_prefill" in default
    assert "blackwell_prefill: never run" in default
    assert "layer by layer: never run, and unmeasured kernels are not allowed" in default
    assert "prefill: blackwell_prefill (FlashAttention-4 style)" in allowed
    assert "in one launch" in allowed
    assert "never run" in allowed


def test_the_plan_tells_the_memory_of_weights_and_of_the_longest_sequence(tessera):
    shape = str(SHAPES / "llama-3.1-8b")

    _, out, _ = tessera("plan", "--arch=h100", "--model", shape)
    _, fp8, _ = tessera("plan", "--arch=h100", "--model", shape, "--kv-cache-dtype=fp8")
    _, cpu, _ = tessera("plan", "--device=cpu", "--quantization=int8")

    # 2 (keys, values) x 32 layers x 8 heads x 128 x 2 bytes a token
    sequence = "KV cache 128 KiB a token, 16.00 GiB for one sequence of 131072 tokens"
    assert f"memory: weights 14.96 GiB; {sequence}" in out
    assert "KV cache 66 KiB a token" in fp8  # a float32 scale for each head's key and value
    assert "memory: KV cache " in cpu


def test_the_plan_of_gemma_shows_its_windows_and_its_softcap(tessera, tmp_path):
    gemma3 = SHAPES / "gemma-3-1b"
    config = json.loads((gemma3 / "config.json").read_text())
    config |= {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    _, third, _ = tessera("plan", "--arch=h100", "--model", str(gemma3))
    _, second, _ = tessera("plan", "--arch=h100", "--model", str(tmp_path))

    assert "head dim 256" in third
    assert "prefill: hopper_prefill (FlashAttention-3 style)\n" in third
    assert "decode, window 512: hopper_decode (FlashAttention-3 style)\n" in third
    assert "decode, window 512, softcap 50: hopper_decode (FlashAttention-3 style)\n" in second


@pytest.mark.parametrize("shape", ["gemma-3-1b", "gpt2", "opt-125m"])
def test_the_fast_paths_that_do_not_support_a_family_say_so(tessera, shape):
    model = ("--model", str(SHAPES / shape))

    _, out, _ = tessera("plan", "--arch=h100", *model)
    planned = tessera("plan", "--arch=cpu", "--quantization=int8", "--json", *model)[1]

    gemma = shape.startswith("gemma")
    way = "in one launch; 2, 4, 8 sequences layer by layer: no " if gemma else "layer by layer: no "
    assert f"one sequence is decoded {way}" in out
    missing = "norms after attention and MLP" if gemma else "learned positions"
    step = json.loads(planned)["steps"][0]
    refused = {it["kernel"]: it["reasons"] for it in step["refused"]}
    assert step["executor"] == "layers"
    assert f"no {missing}" in "; ".join(refused["cpu_library"])


@pytest.mark.parametrize(("arch", "expected"), [("cpu", 0), ("a100", 2), ("h100", 0)])
def test_the_plan_says_if_no_gpu_of_an_architecture_ever_ran_a_kernel(tessera, arch, expected):
    _, out, _ = tessera("plan", "--arch", arch)

    assert out.count("has ever run it") == expected


def test_the_plan_names_a_kernels_flash_attention_generation(tessera):
    _, out, _ = tessera("plan", "--arch=h100")

    assert "prefill: hopper_prefill (FlashAttention-3 style)\n" in out
    assert "decode: hopper_keys_on_m_decode (FlashAttention-3 style)\n" in out
    assert "prefill: torch_prefill (PyTorch)\n" in tessera("plan", "--arch=t4")[1]


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("arch", CATALOGUE)
def test_the_printed_plan_has_every_reason_and_launch_within_its_width(tessera, arch, quantization):
    asked = ("plan", "--arch", arch, "--quantization", quantization)
    plan = json.loads(tessera(*asked, "--json")[1])
    text = tessera(*asked)[1]

    words = [line[:8].strip() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= WIDTH
    assert words.count("why") == len(plan["phases"])
    assert words.count("not") == sum(len(phase["refused"]) for phase in plan["phases"])
    assert words.count("launch") == sum(len(phase["launches"]) for phase in plan["phases"])


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "gemma-3-1b", "gpt2"])
@pytest.mark.parametrize("arch", CATALOGUE)
def test_the_printed_plan_names_every_kernel_of_a_step_and_every_reason_in_100_columns(
    tessera, arch, shape
):
    asked = ("plan", shape, "--arch", arch)
    plan = json.loads(tessera(*asked, "--json")[1])
    lines = tessera(*asked)[1].splitlines()

    starts = [i for i, line in enumerate(lines) if line.startswith(("decode of", "prompt of"))]
    part = lines[starts[0] : lines.index("", starts[0])]
    assert max(map(len, part)) <= 100
    words = " ".join(" ".join(lines).split())
    for step in plan["steps"]:
        assert f" by {step['executor']}" in words
        for row in (step, *step["operations"]):
            assert row.get("kernel", "") in words
            assert all(reason in words for it in row["refused"] for reason in it["reasons"])


def test_steps_that_are_computed_alike_are_printed_once():
    prompt = PLAN.steps[1]
    steps = [
        msgspec.structs.replace(prompt, step=f"decode of {n} sequences", decode_rows=n)
        for n in (2, 4)
    ]

    text = render(msgspec.structs.replace(PLAN, steps=[*PLAN.steps, *steps]), "a model")

    assert "decode of 1 sequence by single_launch\n" in text
    assert "prompt of 1024 tokens by layers; not single_launch\n" in text
    assert "decode of 2, 4 sequences by layers; not single_launch\n" in text
    assert text.count("  persistent              gate_up product; not vector\n") == 2
    assert text.count("  vector                  1024 rows; odd sizes\n") == 1


def test_a_launch_line_states_its_steps_and_its_provenance():
    launch = PLAN.phases[1].launches[0]
    launches = [
        msgspec.structs.replace(launch, min_num_seqs=33, provenance="many", measured=True),
        msgspec.structs.replace(launch, max_seqlen_k=1024, provenance="short", measured=True),
        launch,
    ]
    phase = msgspec.structs.replace(PLAN.phases[2], launches=launches)

    text = render(msgspec.structs.replace(PLAN, phases=[phase]), "a model")

    assert "decode, window 4096: portable_decode (FlashAttention-2 style)\n" in text
    assert "launch  16x64, 4 warps, 3 stages, from 33 sequences on: many\n" in text
    assert "launch  16x64, 4 warps, 3 stages, up to 1024 tokens: short\n" in text
    assert "launch  16x64, 4 warps, 3 stages: not measured; a test\n" in text


def test_a_gpu_with_unknown_peaks_has_a_plan():
    text = render(msgspec.structs.replace(PLAN, memory_bandwidth_gbs=0), "a model")

    assert "peaks in bfloat16 not known" in text


@pytest.mark.parametrize(("capability", "first"), [("sm_89", "l4"), ("sm_90", "h100")])
def test_a_compute_capability_names_the_first_known_gpu_that_has_it(tessera, capability, first):
    assert tessera("plan", "--arch", capability) == tessera("plan", "--arch", first)
    assert tessera("size", "--gpu", capability) == tessera("size", "--gpu", first)


def test_without_arch_the_plan_is_for_this_machine(tessera):
    status, out, _ = tessera("plan", "--device=cpu", "--quantization=none")

    assert status == 0
    assert "peaks not known" in out
    assert "decode: torch_decode" in out or "decode: cpu_decode" in out


def test_weights_on_a_cpu_are_int8_by_default_where_the_cpu_library_supports_the_model(
    tessera, checkpoint, cpu_library
):
    plan = json.loads(tessera("plan", "--device=cpu", "--json")[1])
    odd = tessera("plan", "--device=cpu", "--json", f"--model={checkpoint(head_dim=48)}")

    assert plan["weight_dtype"] == "int8"
    assert [phase["kernel"] for phase in plan["phases"]] == ["cpu_step", "cpu_step"]
    by_layers = json.loads(odd[1])
    assert by_layers["weight_dtype"] == "int8"
    assert [phase["kernel"] for phase in by_layers["phases"]] == ["cpu_prefill", "cpu_decode"]
    products = [it for it in by_layers["steps"][0]["operations"] if "product" in it["operation"]]
    assert {it["kernel"] for it in products} == {"cpu_integers"}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integer_weights_are_in_the_plan_of_a_cpu_and_refused_on_a_gpu(
    tessera, quantization, cpu_library
):
    asked = ("plan", "--quantization", quantization, "--arch")

    planned = json.loads(tessera(*asked, "cpu", "--json")[1])["weight_dtype"]
    status, _, error = tessera(*asked, "h100")

    assert planned == quantization
    assert status == 1
    assert f"quantization {quantization}: weights in int8 and int4 are for a CPU" in error


def test_ranks_on_a_cpu_are_planned_without_the_library_as_the_service_runs_them(tessera):
    asked = ("plan", "--arch=cpu", "--tensor-parallel=2")

    plan = json.loads(tessera(*asked, "--json")[1])
    text = " ".join(tessera(*asked)[1].split())

    assert (plan["dtype"], plan["weight_dtype"], plan["kv_dtype"]) == ("float32",) * 3
    row = "torch" if isinstance(load(), str) else "cpu"
    assert [phase["kernel"] for phase in plan["phases"]] == [f"{row}_prefill", f"{row}_decode"]
    assert (plan["num_ranks"], plan["num_heads"], plan["num_kv_heads"]) == (2, 3, 1)
    assert "3 query heads, 1 key-value heads" in text
    assert "this is one of 2 ranks" in text


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("--kv-cache-dtype=fp8",), "the KV cache is in FP8: set --kv-cache-dtype auto"),
        (("head_dim=48",), "heads of 48, no multiple of 32"),
    ],
    ids=["fp8 cache", "heads"],
)
def test_steps_that_the_cpu_library_does_not_compute_are_planned_layer_by_layer_with_the_reasons(
    tessera, checkpoint, cpu_library, asked, reason
):
    if asked == ("head_dim=48",):
        asked = (f"--model={checkpoint(head_dim=48)}",)

    planned = tessera("plan", "--arch=cpu", "--quantization=int8", "--json", *asked)[1]

    step = json.loads(planned)["steps"][0]
    refused = {it["kernel"]: it["reasons"] for it in step["refused"]}
    assert step["executor"] == "layers"
    assert reason in "; ".join(refused["cpu_library"])


def test_integer_weights_of_several_ranks_on_a_cpu_are_refused_with_the_flag_to_change(
    tessera, cpu_library
):
    asked = ("plan", "--arch=cpu", "--quantization=int8", "--tensor-parallel=2")

    status, _, error = tessera(*asked)

    assert status == 1
    assert "quantization int8 is not supported here: 2 ranks share the model: set --tens" in error
    assert "set quantization to none or auto" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_an_error_and_not_a_plan_for_the_cpu(tessera):
    status, out, err = tessera("plan", "--device=cuda")

    assert (status, out) == (1, "")
    for word in ("tessera plan: error: --device cuda", "no CUDA device", "--arch"):
        assert word in err


def test_arch_overrides_the_device(tessera):
    assert tessera("plan", "--device=cuda", "--arch=l4")[0] == 0


def test_a_model_on_the_hub_is_planned_without_its_weights(tessera, checkpoint, monkeypatch):
    folder, asked = checkpoint(), []

    def fetch(repository, **options):
        asked.append((repository, *options["allow_patterns"]))
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)

    assert tessera("plan", "--arch=l4", "--model=org/name")[0] == 0
    (asked_for,) = asked
    assert asked_for[0] == "org/name"
    assert set(asked_for[1:]) == {
        "config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json",
        "adapter_config.json", "model_index.json", "modules.json", "params.json", "README.md",
    }  # fmt: skip


def test_a_closed_output_pipe_is_no_error():
    command = [sys.executable, "-m", "server.cli.main", "plan", "--arch=h100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()

    assert (process.returncode, errors) == (0, b"")


def test_the_json_equals_the_reply_of_the_service(tessera):
    _, out, _ = tessera("plan", "--arch=a100", "--json", "--block-size=64", "--dtype=float16")

    report = msgspec.json.decode(out, type=PlanReport)
    assert (report.arch, report.block_size, report.dtype) == ("a100", 64, "float16")
    assert json.loads(out) == msgspec.to_builtins(report)


@pytest.mark.parametrize(
    ("arch", "dtype"), [("t4", "float16"), ("a100", "bfloat16"), ("cpu", "float32")]
)
def test_the_plan_has_the_dtype_that_the_service_would_choose(tessera, arch, dtype):
    _, out, _ = tessera("plan", "--quantization=none", "--arch", arch)

    assert f"bundled in {dtype}:" in out


def test_a_float8_cache_is_planned_for_kernels_that_support_it(tessera):
    asked = ("plan", "--arch", "h100", "--kv-cache-dtype", "fp8")

    plan = json.loads(tessera(*asked, "--json")[1])
    text = tessera(*asked)[1]

    assert (plan["dtype"], plan["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    names = {phase["kernel"] for phase in plan["phases"]}
    assert names == {"hopper_unpacked_prefill", "portable_decode"}
    assert "bundled in bfloat16, cache in float8_e4m3fn: " in text
    refused = {row["kernel"]: row["reasons"] for p in plan["phases"] for row in p["refused"]}
    assert "no float8_e4m3fn cache" in refused["hopper_prefill"]


def test_the_reason_against_deterministic_requests_is_one_line_of_rows_of_the_phase(tessera):
    plan = json.loads(tessera("plan", "--arch=a100", "--kv-cache-dtype=fp8", "--json")[1])

    why = plan["deterministic"]["why"]
    assert plan["deterministic"]["requests"] == "none"
    assert "\n" not in why
    assert "; invariant_prefill: a float8_e4m3fn cache needs sm_89" in why
    assert "decode" not in why


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["--arch=cpu", "--kv-cache-dtype=fp8"], "on a CPU no KV cache in FP8"),
        (["--arch=t4"], "this is sm_75"),
    ],
    ids=["cpu", "gpu"],
)
def test_a_service_that_cannot_be_deterministic_is_refused_as_serve_refuses_it(
    tessera, settings, reason
):
    status, out, error = tessera("plan", "--deterministic", *settings)

    assert (status, out, error.count("\n")) == (1, "", 1)
    assert error.startswith("tessera plan: error: --deterministic is not supported here: ")
    assert reason in error


def test_float8_weights_are_in_the_plan_or_refused_if_the_gpu_does_not_support_them(
    tessera,
):
    asked = ("plan", "--quantization", "fp8", "--arch")

    plan = json.loads(tessera(*asked, "h100", "--json")[1])
    status, _, error = tessera(*asked, "cpu")

    assert (plan["dtype"], plan["weight_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert "bundled in bfloat16, weights in float8_e4m3fn: " in tessera(*asked, "h100")[1]
    assert status == 1
    assert "quantization fp8" in error
    assert "needs a GPU" in error


def test_a_checkpoint_in_fp8_blocks_is_planned_in_its_format(tessera, checkpoint):
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = checkpoint(quantization_config=blocks, torch_dtype="bfloat16")
    asked = ("plan", "--arch=h100", "--model", folder)

    plan = json.loads(tessera(*asked, "--json")[1])
    full = json.loads(tessera("plan", "--arch=h100", "--json", "--model=bundled")[1])
    size = json.loads(tessera("size", "--gpu=h100", "--json", "--model", folder)[1])

    assert plan["weight_dtype"] == size["weight_dtype"] == "fp8-blocks"
    assert "no weights in fp8-blocks" in plan["one_sequence"]
    assert plan["memory"]["weight_bytes"] < 0.65 * full["memory"]["weight_bytes"]
    status, _, error = tessera(*asked, "--quantization=fp8")
    assert status == 1
    assert "the checkpoint's weights are quantized already, as fp8-blocks" in error


def test_a_float16_checkpoint_stays_float16(tessera, checkpoint):
    _, out, _ = tessera("plan", "--arch=h100", "--model", checkpoint(torch_dtype="float16"))

    assert " in float16: " in out


def test_a_configuration_alone_is_enough_for_a_plan(tessera, checkpoint):
    folder = checkpoint(head_dim=128, num_attention_heads=28, num_key_value_heads=4)

    status, out, _ = tessera("plan", "--arch=h100", "--model", folder)

    assert status == 0
    assert "28 query heads, 4 key-value heads, head dim 128" in " ".join(out.split())


def test_an_unsupported_head_dim_is_refused_and_the_supported_ones_are_listed(tessera, checkpoint):
    status, out, _ = tessera("plan", "--arch=h100", "--model", checkpoint(head_dim=100))

    assert status == 0
    assert "torch_decode" in out
    refusal = (
        "not     portable_decode: head_dim 100 is not one of [32, 64, 80, 96, 128, 192, 256, 512]"
    )
    assert refusal in out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--arch=h101"], 2, ["'h101'", *CATALOGUE]),
        (["--dtype=float8"], 2, ["--dtype", "TESSERA_DTYPE", "float8", "bfloat16", "float16"]),
        (["--block-size=300"], 2, ["--block-size", "300", "256"]),
        (["--block-size=x"], 2, ["--block-size", "'x'"]),
        (["--what"], 2, ["tessera plan: error", "--what"]),
        (["--model=/no/such"], 1, ["/no/such", "organisation/name", "bundled"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_an_error_names_the_wrong_value_and_the_known_ones(tessera, arguments, status, words):
    found, out, err = tessera("plan", *arguments)

    assert (found, out) == (status, "")
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1]
    assert line.startswith("tessera plan: error: ")
    for word in words:
        assert word in line


def test_an_unsupported_model_is_named_in_the_error(tessera, checkpoint):
    status, _, err = tessera("plan", "--model", checkpoint(architectures=["Mamba"]))

    assert status == 1
    assert "Mamba" in err


def test_the_plan_reads_the_environment_of_the_service(tessera, monkeypatch):
    monkeypatch.setenv("TESSERA_BLOCK_SIZE", "128")

    _, out, _ = tessera("plan", "--arch=l4")

    assert "blocks of 128 tokens" in out


def test_help_lists_the_processors_and_the_relevant_settings(tessera):
    status, out, _ = tessera("plan", "--help")

    assert status == 0
    for word in (*CATALOGUE, "--json", "--model", "--block-size"):
        assert word in out


def test_the_front_end_imports_no_torch():
    code = "import sys, server.cli.main, server.http.app; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_engine_does_not_import_the_compiler_of_pytorch():
    code = (
        "import sys, server.engine.runner.start.startup; sys.exit('torch._dynamo' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_service_does_not_import_the_plan_command():
    code = (
        "import sys, server.cli.main\n"
        "try: server.cli.main.main(['serve', '--model=/no/such'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0


def test_the_command_is_installed():
    command = shutil.which("tessera", path=str(sys.prefix) + "/bin")

    assert command is not None
    done = subprocess.run([command, "plan", "--arch=b200"], check=True, capture_output=True)
    assert b"NVIDIA B200 (sm_100)" in done.stdout
