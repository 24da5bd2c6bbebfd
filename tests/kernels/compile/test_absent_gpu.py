"""Kernels are compiled for a GPU that is not there, and a service finds them in another folder."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.kernels.triton_interpreter import HAS_TRITON

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("gcc", "clang"))), reason="there is no C compiler"
    ),
]

BEGIN = """
import json
from pathlib import Path
import torch
import triton
import triton.language as tl
from triton import knobs
from kernels import detect
from kernels.arch import CATALOGUE
from kernels.gpu import kernel_cache
from kernels.gpu.absent_gpu import absent_gpu
from kernels.gpu.compile_ahead import NotCompiledError, compile_ahead, compile_nothing
from kernels.weight_format import FP8_ROWS

@triton.jit
def add(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + n)

"""


@pytest.fixture
def run(tmp_path):
    """Run a script in a process of its own, and return the JSON that it prints."""

    def run_script(body, cache="cache"):
        (tmp_path / "script.py").write_text(BEGIN + textwrap.dedent(body))
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, tmp_path / "script.py"],
            env=environment | {"TRITON_CACHE_DIR": str(tmp_path / cache)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_script


@pytest.mark.slow
def test_tensors_of_an_absent_gpu_have_shapes_and_read_as_zeros(run):
    found = run(
        """
        with absent_gpu(CATALOGUE["a100"]) as device:
            x = torch.full((4, 6), 7, dtype=torch.int32, device=device)
            part = x[1:, 2:4] + 1
            moved = torch.arange(3).to(device)
            host = torch.ones(3, dtype=torch.int64)
            host.copy_(moved)
            kept = x.add_(1)
            print(json.dumps({
                "arch": detect(x.device).key,
                "shapes": [list(t.shape) for t in (x, part, moved, x @ x.T)],
                "strides": list(x[1:, 2:4].stride()),
                "on_gpu": [t.is_cuda and t.device.type == "cuda" for t in (x, part, moved)],
                "address": x[1:, 2:4].data_ptr(),
                "read": [moved.tolist(), x[0, 0].item(), part.cpu().sum().item(), host.tolist()],
                "in_place": kept is x,
            }))
        """,
    )

    assert found == {
        "arch": "a100",
        "shapes": [[4, 6], [3, 2], [3], [4, 4]],
        "strides": [6, 1],
        "on_gpu": [True] * 3,
        "address": 4 * (6 + 2),
        "read": [[0, 0, 0], 0, 0, [0, 0, 0]],
        "in_place": True,
    }


def test_the_host_is_described_by_itself_again_afterwards(run):
    found = run(
        """
        with absent_gpu(CATALOGUE["h100"]) as device:
            inside = detect(device).key
        x = torch.zeros(2)
        print(json.dumps([inside, detect("cpu").key, x.tolist()]))
        """,
    )

    assert found == ["h100", "cpu", [0.0, 0.0]]


@pytest.mark.slow
def test_compiled_kernels_are_found_in_a_folder_that_was_moved(run, tmp_path):
    compiled = run(
        """
        kernel_cache.write_to(Path(knobs.cache.dir) / "out")
        with absent_gpu(CATALOGUE["h100"]) as device, compile_ahead():
            x = torch.zeros(64, device=device)
            for n in (1, 16, 3):
                add[(1,)](x, n, SIZE=64)
            add[(1,)](x[1:], 3, SIZE=32)
        print(json.dumps(sorted(p.suffix for p in Path(knobs.cache.dir).glob("*/[!_]*"))))
        """,
    )
    # A kernel for n = 1, one for multiples of 16, one for others, one for an address that is no multiple of 16.
    assert [compiled.count(it) for it in (".cubin", ".json")] == [4, 4]

    (tmp_path / "cache" / "out").rename(tmp_path / "moved")
    found = run(
        f"""
        kernel_cache.read_also(Path({str(tmp_path / "moved")!r}))
        refused = []
        with absent_gpu(CATALOGUE["h100"]) as device, compile_nothing():
            x = torch.zeros(64, device=device)
            for n, size in ((1, 64), (48, 64), (5, 64), (5, 16)):
                try:
                    add[(1,)](x, n, SIZE=size)
                except NotCompiledError:
                    refused.append([n, size])
        print(json.dumps([refused, sorted(p.suffix for p in Path(knobs.cache.dir).glob("*/*"))]))
        """,
        cache="other",
    )

    assert found[0] == [[5, 16]]
    assert not {".cubin", ".so"} & set(found[1]), "nothing is compiled again"


@pytest.mark.slow
def test_a_damaged_file_of_a_folder_counts_as_absent_with_a_warning_that_names_it(run):
    damages = {
        "__grp__add.json": [b"{", b"[]", b"{}", b""],
        "add.json": [b'{"target": {', b"[]", b"\xff", None],
        "add.cubin": [b"", b"no binary", "half", None],
        "__triton_launcher*": [b"", "half"],
    }
    found = run(
        f"""
        import logging, shutil
        warnings = []
        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())
        logging.getLogger("kernels.gpu.kernel_cache").addHandler(handler)

        def launch():
            add.device_caches.clear()
            with compile_ahead():
                add[(1,)](x, 3, SIZE=64)

        def damage_and_launch(name, damage):
            folder, own = (Path(knobs.cache.dir).with_name(f"{{it}}{{len(found)}}") for it in ("a", "b"))
            (file,) = shutil.copytree(whole, folder).glob(f"*/{{name}}")
            if damage == "half":
                damage = file.read_bytes()[: file.stat().st_size // 2]
            file.unlink() if damage is None else file.write_bytes(damage)
            kernel_cache.read_also(folder)
            knobs.cache.dir = str(own)
            warnings.clear()
            launch()
            made = {{path.suffix for path in own.glob("*/*")}}
            found.append([[str(file) in it for it in warnings], ".cubin" in made, ".so" in made])

        whole, found = Path(knobs.cache.dir) / "whole", []
        kernel_cache.write_to(whole)
        with absent_gpu(CATALOGUE["h100"]) as device:
            x = torch.zeros(64, device=device)
            launch()
            for name, damages in {damages!r}.items():
                for damage in damages:
                    damage_and_launch(name, damage)
        print(json.dumps(found))
        """,
    )

    assert found == [[[True], True, False]] * 12 + [[[True], False, True]] * 2


def test_only_the_files_of_kernels_are_counted_and_lose_their_sources(tmp_path):
    from kernels.gpu import kernel_cache

    names = {"KEY": ("__grp__add.json", "add.cubin", "add.source"), "mine": ("a.cubin", "a.source")}
    for folder, files in names.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).touch()

    kernel_cache.drop_sources(tmp_path)

    assert kernel_cache.num_kernels(tmp_path) == 1
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert left == ["KEY/__grp__add.json", "KEY/add.cubin", "mine/a.cubin", "mine/a.source"]


ONE_STEP = """
from model.checkpoint.config import ModelConfig
from model.device.kv_cache import KVCache
from model.decoder import DecoderLM
from model.executors.columns import Bucket
from model.executors.step import StepInput

config = ModelConfig.from_folder(Path("server/cli/bench/shapes/qwen3-0.6b"))
keys = {"num_hidden_layers": 1, "vocab_size": 512, "hidden_size": HIDDEN_SIZE, "bos_token_id": 0, "eos_token_id": 0}
config = ModelConfig.from_dict(config.content | keys)
with absent_gpu(CATALOGUE["h100"]) as device, compile_ahead():
    model = DecoderLM(config, torch.bfloat16, device, FP8_ROWS)
    model.optimize()
    cache = KVCache(model.network.state(torch.bfloat16), 8, 16, device)
    model.step(StepInput(Bucket(rows=1, columns=8, num_logits=1), 16, device), cache)
print(json.dumps(sorted({p.stem for p in Path(knobs.cache.dir).glob("*/[!_]*.cubin")})))
"""


@pytest.mark.slow
def test_a_step_with_fp8_weights_is_a_single_launch_up_to_a_hidden_size_of_4096(run):
    plain, single = (run(f"HIDDEN_SIZE = {size}\n{ONE_STEP}", str(size)) for size in (4160, 4096))

    assert single == ["whole_step"]
    assert "vector_linear" in plain
    assert "whole_step" not in plain


STEPS = """
import sys
from server.cli.command_settings import engine_config
from server.cli.settings import Settings
from server.engine.runner.start.runner_start import make_runner
from server.engine.runner.start.step_limits import step_limits
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM

class Recorder:
    def record(self, compute):
        compute()
        return lambda: None

folder = Path(FOLDER)
config, model_config = engine_config(Settings(model="x"), folder), ModelConfig.from_folder(folder)
kernel_cache.read_also(Path(SHIPPED))
with absent_gpu(CATALOGUE[ARCH]) as device, compile_nothing():
    limits = step_limits(config, model_config, CATALOGUE[ARCH], chunk=1)
    model = DecoderLM(model_config, torch.bfloat16, device)
    model.optimize()
    model.reserve_positions(limits.max_model_len)
    runner = make_runner(model, config, num_blocks=1000)
    runner.record_steps(limits, Recorder())
    while runner.use_idle_time():
        pass
    print(json.dumps(len(runner.recorded.recorded)))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # compiles all kernels of a model: a minute, two beside other work
@pytest.mark.parametrize(
    ("model", "arch"),
    [("model/bundled", "h100"), ("server/cli/bench/shapes/qwen2.5-0.5b", "a100")],
)
def test_every_recorded_step_finds_its_kernels_where_the_command_put_them(
    model, arch, run, tmp_path
):
    shipped = tmp_path / "shipped"
    command = ["warmup", f"--model={model}", f"--arch={arch}", f"--output={shipped}"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-m", "server.cli.main", *command],
        env=environment,
        check=True,
        timeout=1200,
    )

    names = f"FOLDER, SHIPPED, ARCH = {model!r}, {str(shipped)!r}, {arch!r}\n"
    assert run(names + STEPS) > 50
