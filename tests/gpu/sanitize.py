"""Runs the kernels once on small shapes, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m tests.gpu.sanitize [PART ...]
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.gpu.sanitize [PART ...]

Without PyTorch's caching allocator, an access past the end of a tensor leaves its allocation, so that
memcheck detects it. The parts, by default all:

- attention: several splits and their merge, a single split, window, softcap, a head dim of two parts,
  several row tiles, packed keys, a batch without keys, work items without keys, a shared prefix;
- write_kv: writes with skipped slots;
- products: vector and tensor-core products with norm, gate, bias, residual and FP8 weights, of sizes
  that fill no tile;
- sampling: rows of all filters, of lists of candidates that hold all, some and hardly any of them;
- step: single-launch steps of one and of several sequences, with and without early arrival, also over an FP8 cache.

Of `step`, racecheck reports every read of the ring of stages together with the copy that fills the stage, about
a million hazards: it seems not to follow copies by cp.async that arrive on an mbarrier. So run it on the other
parts. Of kernels with warp roles it reports the byte by which Triton's `warp_specialize` tells warps what to run,
between its store and its load, with lines of the kernel's `def` and that call: a barrier of all warps is between them
(`BAR.SYNC 1`, which every warp executes in the SASS), so these are no faults.

The results are compared with a reference or with a second run too. About 80 compilations; run it once
without the sanitizer to fill the compiler's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time

import torch

import kernels
from kernels.attention.problem import Phase
from kernels.attention.registry import INVARIANT_REGISTRY
from kernels.fp8 import quantize_rows
from kernels.linear.gpu.persistent import PersistentLinear
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import LIBRARY_FP8, MATRIX, VECTOR
from kernels.linear.select import select_linear
from kernels.linear.tuned import tuned_linear
from kernels.linear.weights import Norm
from kernels.sampling.gpu.argmax import argmax_tokens
from kernels.sampling.rows import SAMPLE_SIZES, SampleSizes
from model.executors import single_launch
from tests.gpu.attention_cases import DEVICE, judge, make, make_problem, rows, run
from tests.gpu.test_fp8_weights_gpu import Layer
from tests.gpu.test_layer_kernels_gpu import EPS, random
from tests.gpu.test_matrix_gpu import Product
from tests.gpu.test_sampling_gpu import filtered_rows, logits_on_gpu, supports_pdl
from tests.gpu.test_single_launch_gpu import (
    FP8_WEIGHTS,
    SEVERAL,
    RowsStep,
    Step,
    bind,
    build,
    fill,
    new_cache,
    problem_of,
)
from tests.kernels.linear.layer import linear
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than
from tests.kernels.references.reference_fp8 import dequantize_rows
from tests.kernels.sampling.sampled import by_kernel, by_rule

PREFILL_CASES = [
    (("bfloat16", 8, 2, 128, 16, {"lse": True}), [70, 1, 0, 33, 5], [70, 200, 9, 300, 2]),
    (("float16", 7, 1, 80, 48, {"sliding_window": 20, "softcap": 15.0}), [40, 65], [90, 65]),
    (("float32", 6, 2, 64, 16, {}), [17, 40], [100, 40]),
    (("bfloat16", 6, 6, 64, None, {"causal": False}), [50, 30], [80, 0]),
    (("bfloat16", 8, 2, 64, 32, {"sliding_window": 150, "lse": True}), [230, 1, 3], [400, 0, 3]),
    (("float16", 8, 1, 256, 16, {"softcap": 15.0}), [65, 1, 20], [300, 0, 20]),
    (("bfloat16", 4, 1, 256, 16, {"batch_invariant": True}), [70, 3], [2500, 1200]),
]
DECODE_CASES = [
    (("bfloat16", 8, 2, 128, 16, {"lse": True}), [1, 1, 1, 1], [1500, 1, 0, 300]),
    (("float16", 7, 1, 80, 48, {"sliding_window": 200}), [1, 1], [900, 33]),
    (("bfloat16", 8, 1, 64, 16, {"max_query_tokens": 4}), [4, 2, 1], [700, 2, 40]),
    (("float32", 6, 2, 192, 64, {"softcap": 15.0}), [1], [400]),
    (("bfloat16", 8, 2, 128, 16, {"batch_invariant": True}), [1, 1], [5000, 30]),
]
SHARED_PREFIX_CASES = [
    # The last number: tokens of the shared prefix. One sequence of the first case has no tokens.
    (("bfloat16", 8, 2, 128, 16, {"lse": True}), [1] * 5, [401, 500, 0, 416, 1000], 400),
    (("float16", 7, 1, 80, 48, {"softcap": 15.0, "max_query_tokens": 3}), [3, 1], [99, 200], 96),
]


def attend_all() -> int:
    """Run every GPU row twice on every case that it supports; return the number of runs."""
    runs = 0
    decode = [(*case, 0) for case in DECODE_CASES] + SHARED_PREFIX_CASES
    prefill = [(*case, 0) for case in PREFILL_CASES]
    for phase, cases in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
        invariant = [row for row in INVARIANT_REGISTRY if row.phase is phase]
        for row in (*(parameter.values[0] for parameter in rows(phase)), *invariant):
            for combination, queries, keys, prefix in cases:
                problem = make_problem(phase, combination)
                if row.unsupported(problem, kernels.detect(DEVICE)):
                    continue
                options = {"shared_prefix": prefix} if prefix else {}
                case = make(problem, queries, keys, **options)
                out, lse = run(row, case)
                # The reference runs on the CPU, so that the sanitizer checks only our kernels.
                host = dataclasses.replace(case, q=case.q.cpu(), kv=case.kv.cpu())
                judge(host, out.cpu(), None if lse is None else lse.cpu())
                again, _ = run(row, case)
                assert torch.equal(out, again), f"{row.name} differs between two runs"
                runs += 2
    return runs


def write() -> int:
    """Write keys and values with some slots skipped; return the number of runs."""
    cases = ((torch.bfloat16, 8, 128), (torch.float32, 3, 80))
    for dtype, heads, head_dim in cases:
        kv = torch.zeros((2, 4, 16, heads, head_dim), dtype=dtype, device=DEVICE)
        k, v = torch.randn((2, 5, heads, head_dim), device=DEVICE).to(dtype)
        slots = [63, -1, 0, 17, -1]
        expected = reference.write_kv(k, v, kv, slots)
        kernels.write_kv(k, v, kv, torch.tensor(slots, dtype=torch.int32, device=DEVICE))
        assert torch.equal(kv, expected)
    return len(cases)


VECTOR_CASES = [
    # Outputs, inputs, whether gated, and what the kernel adds.
    (1001, 576, False, "bias"),
    (1536, 576, True, "norm"),
    (264, 896, False, "residual"),
    (8, 8, True, "bias"),
]
MATRIX_CASES = [(192, 320, "plain"), (128, 64, "gated"), (64, 64, "parts"), (1152, 576, "bias")]
MATRIX_ROWS = (5, 17, 64, 129, 256)


def multiply_all() -> int:
    """Run the vector products, in bfloat16 and with FP8 weights, and those on tensor cores; return the number."""
    arch = kernels.detect(DEVICE)
    runs = 0
    for outputs, inputs, gated, around in VECTOR_CASES:
        for count in (1, 2, 4):
            multiply_vector(count, outputs, inputs, gated=gated, around=around)
            layer = Layer(outputs, inputs, torch.bfloat16, gated=gated, around=around)
            # The library computes more rows in FP8, and is not ours.
            assert layer.choose(count).spec is not LIBRARY_FP8
            x, residual = random(count, inputs), random(count, outputs)
            out = layer(x, residual if around == "residual" else None, pdl=supports_pdl())
            assert out.isfinite().all()
            runs += 2
    problem = LinearProblem(MATRIX_ROWS[-1], 64, 64, layer_weights=1)
    if MATRIX.unsupported(problem, arch):
        return runs
    for outputs, inputs, kind in MATRIX_CASES:
        weight = random(outputs, inputs, scale=inputs**-0.5, seed=1)
        bias = random(outputs, seed=2) if kind == "bias" else None
        named = {"gated": kind == "gated", "in_parts": kind == "parts"}
        numbers, scale = quantize_rows(weight)
        rounded = dequantize_rows(numbers, scale, torch.float32)
        products = [
            (Product(weight, bias, **named), weight),
            (Product(weight, bias, **named, kernel=PersistentLinear), weight),
            (Product(numbers, bias, scale, **named, dtype=weight.dtype), rounded),
        ]
        for (product, exact), count in itertools.product(products, MATRIX_ROWS):
            x = random(count, inputs)
            out = product(x, pdl=True)
            out = (out.sum(0).to(weight.dtype) if kind == "parts" else out).cpu()
            judge_product(out, x, exact, bias, gated=kind == "gated")
            runs += 1
    return runs


def multiply_vector(count: int, outputs: int, inputs: int, *, gated: bool, around: str) -> None:
    """Run a product of `count` rows and compare it with its formula."""
    problem = LinearProblem(count, outputs, inputs, gated=gated)
    choice = select_linear(problem, kernels.detect(DEVICE), tuned_linear)
    assert choice.spec is VECTOR
    x = random(count, inputs)
    weight = random(problem.matrices * outputs, inputs, scale=inputs**-0.5, seed=1)
    bias = random(len(weight), seed=2) if around == "bias" else None
    norm = Norm(random(inputs, seed=3), EPS) if around == "norm" else None
    residual = random(count, outputs, seed=4) if around == "residual" else None
    before = None if residual is None else residual.cpu()
    out = torch.full((count, outputs), float("nan"), dtype=x.dtype, device=DEVICE)
    linear(x, weight, choice, out, bias=bias, norm=norm, residual=residual, pdl=supports_pdl())
    judge_product(out.cpu(), x, weight, bias, norm, before, gated=gated)


def judge_product(out, x, weight, bias=None, norm=None, residual=None, *, gated=False) -> None:
    """Compare a product with its formula, computed on the CPU so that the sanitizer checks only our kernels."""
    x, weight = x.cpu(), weight.cpu()

    def formula(at: torch.dtype) -> torch.Tensor:
        values = x.to(at) if norm is None else reference.rms_norm(x, norm.weight.cpu(), EPS, at)
        result = values @ weight.to(at).T + (0 if bias is None else bias.cpu().to(at))
        result = reference.silu_and_mul(result, at) if gated else result
        return result if residual is None else result + residual.to(at)

    assert_no_worse_than(out, formula(torch.float64).float(), formula(x.dtype), factor=3.0)


SAMPLE_CASES = [
    # Size of the vocabulary and tiles: for lists of all candidates of a row, of some and of hardly any.
    (512, SAMPLE_SIZES),
    (3001, SampleSizes(tile=512, group=16, capacity=64, chunk=256, loads=2)),
    (1003, SampleSizes(tile=64, group=8, capacity=3, chunk=32, loads=1, ways=2, row_ways=2)),
]


def sample_all() -> int:
    """Sample rows of all filters and compare them with the rules; return the number of runs."""
    for vocabulary, sizes in SAMPLE_CASES:
        sampling_rows = filtered_rows(32)
        logits = logits_on_gpu(32, vocabulary)
        found = by_kernel(logits, sampling_rows, sizes, pdl=supports_pdl())
        expected = by_rule(logits, sampling_rows)
        # Of two tokens whose sums of noise and logit are equal up to rounding, either may be sampled.
        assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
        tokens = torch.empty(32, dtype=torch.int64, device=DEVICE)
        checked, logprobs = torch.empty_like(tokens), torch.empty(32, device=DEVICE)
        argmax_tokens(logits, tokens, checked, logprobs, pdl=supports_pdl())
        assert torch.equal(tokens.cpu(), logits.cpu().argmax(-1))
    return 2 * len(SAMPLE_CASES)


STEP_MODELS = (
    ("qwen", None),
    ("llama", None),
    ("groups of 3", None),
    ("windows", None),
    ("gemma-3-1b", None),
    ("gemma-3-270m", None),
    ("qwen", FP8_WEIGHTS),
    ("llama", FP8_WEIGHTS),
)
"""Models and the dtypes of their quantized matrices."""
STEP_CONTEXTS = (1, 33, 300)
STEP_ROWS = 4


def step_all() -> int:
    """Compute single-launch steps twice each; return the number of runs."""
    runs = 0
    for name, weight_format in STEP_MODELS:
        model = build(name, torch.bfloat16, weight_format)
        problem = problem_of(model)
        if single_launch.unsupported(problem):
            continue
        for kv_dtype in (None, kernels.FP8):
            cache = new_cache(model, kv_dtype)
            one = bind(model, cache)
            for context in STEP_CONTEXTS:
                step = Step(model, context)
                first = step.single_launch(one)
                fill(cache)
                assert first.isfinite().all()
                assert torch.equal(first, step.single_launch(one)), f"{name} differs in a repeat"
                assert step.tokens.item() == step.sampled[0].item() == first.float().argmax().item()
                fill(cache)
                runs += 2
            if single_launch.unsupported(problem, STEP_ROWS):
                continue
            bound = bind(model, cache, STEP_ROWS)
            several = RowsStep(model, SEVERAL[:STEP_ROWS])
            first = several.single_launch(bound)
            fill(cache)
            assert first.isfinite().all()
            assert torch.equal(first, several.single_launch(bound)), f"{name} differs in a repeat"
            fill(cache)
            runs += 2
    return runs


PARTS = {
    "attention": attend_all,
    "write_kv": write,
    "products": multiply_all,
    "sampling": sample_all,
    "step": step_all,
}
"""Functions that run kernels and return how often."""


def main() -> None:
    """Run the parts; the sanitizer reports its findings itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    names = parser.parse_args().parts or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    for name in names:
        begin = time.monotonic()
        runs = PARTS[name]()
        torch.cuda.synchronize()
        sys.stdout.write(f"{name}: {runs} runs, {time.monotonic() - begin:.0f} s\n")
        sys.stdout.flush()
        if not runs:
            raise SystemExit(f"{name}: no kernel runs on this device")


if __name__ == "__main__":
    main()
