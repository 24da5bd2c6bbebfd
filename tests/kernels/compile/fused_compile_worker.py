"""Compiles all kernels except attention for absent GPUs, as `cross_compile_worker` does for attention.

python -m tests.kernels.compile.fused_compile_worker --serve        a job per line of standard input
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any
from unittest import mock

import torch

from kernels.attention.training.hopper import backward
from kernels.attention.training.portable import launch as training
from kernels.attention.training.registry import TrainingBatch, TrainingProblem
from kernels.collective import one_shot
from kernels.linear.gpu.groups import GroupsLinear
from kernels.linear.gpu.invariant import InvariantLinear
from kernels.linear.gpu.lora import begin_lora, sorted_rows
from kernels.linear.gpu.matrix import MatrixLinear
from kernels.linear.gpu.persistent import PersistentLinear
from kernels.linear.lora import LoraWeights
from kernels.linear.matrix_tiles import ROW_COUNTS
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import GROUPS, VECTOR
from kernels.linear.select import LinearChoice, LinearLaunch, select_linear
from kernels.linear.weights import LinearArguments, LinearWeights, Norm
from kernels.norms.gpu.norm_and_gate import activate, add_layer_norm, add_rms_norm
from kernels.norms.gpu.output_gate import multiply_by_sigmoid
from kernels.norms.gpu.quantize_rows import quantize_rows
from kernels.rope.gpu.rope_cache import rope_and_write_kv
from kernels.sampling.gpu.argmax import argmax_tokens, chosen_logprobs
from kernels.sampling.gpu.best_token import best_tokens
from kernels.sampling.gpu.embed import embed
from kernels.sampling.gpu.sample_tokens import sample_tokens
from kernels.sampling.rows import FILTERED, UNFILTERED, SampleRow
from kernels.sampling.tile_best import TileBest
from kernels.step.gpu.kernel import StepKernel
from kernels.step.gpu.kernel_rows import RowsKernel
from kernels.step.single_launch import LayerWeights, StepShape, StepWeights, computed_as_rows
from kernels.weight_format import FP8_ROWS, WeightFormat
from kernels.weights import Weight
from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.compile.cross_compile_worker import Compiler, serve
from tests.kernels.compile.products_in_flight import faults, loop_with_products
from tests.kernels.compile.recurrent_launches import (
    launch_gated_delta,
    launch_mamba2,
    launch_short_conv,
)
from tests.kernels.linear.layer import linear
from tests.kernels.linear.weights import linear_weights

_GLOBAL_ACCESS = re.compile(r"(LDGSTS|LDG|STG)\.([\w.]*)")
VOCABULARY = 151936
RANKS = 4
"""Of an all-reduce."""
STEPS = {
    ("norm",): StepShape(1024, 3072, 16, 8, 128, VOCABULARY, 1e-6, 0.1),
    (): StepShape(2048, 8192, 32, 8, 64, 128256, 1e-6, 0.1),
    ("norm", "bias"): StepShape(2048, 8192, 32, 8, 128, 32000, 1e-6, 0.1),
    ("bias",): StepShape(896, 4864, 14, 2, 64, VOCABULARY, 1e-6, 0.1),
    ("groups of 3",): StepShape(576, 1536, 9, 3, 64, 49152, 1e-6, 0.1),
    ("bias", "groups of 6"): StepShape(1536, 8960, 12, 2, 128, VOCABULARY, 1e-6, 0.1),
    ("groups of 8",): StepShape(2048, 5632, 32, 4, 64, 32000, 1e-6, 0.1),
    ("wide",): StepShape(3072, 14336, 32, 8, 128, 32000, 1e-6, 0.1),
    ("heads of 80",): StepShape(2560, 6912, 32, 8, 80, 50257, 1e-6, 0.1),
    ("heads of 256", "window"): StepShape(1152, 6912, 4, 1, 256, 262144, 1e-6, 0.1),
    ("bundled",): StepShape(384, 1024, 6, 2, 64, 4096, 1e-6, 0.1),
    ("heads of 32",): StepShape(384, 1024, 12, 12, 32, 32003, 1e-6, 0.1),
    ("norm", "window", "gemma"): StepShape(
        1152, 6912, 4, 1, 256, 262144, 1e-6, 0.1, "gelu_tanh", 1152**0.5, post_norms=True
    ),
    ("norm", "window", "gemma", "270M"): StepShape(
        640, 2048, 4, 1, 256, 262144, 1e-6, 0.1, "gelu_tanh", 640**0.5, post_norms=True
    ),
    ("norm", "window", "gemma", "4B"): StepShape(
        2560, 10240, 8, 4, 256, 262144, 1e-6, 0.1, "gelu_tanh", 2560**0.5, post_norms=True
    ),
    ("norm", "78 SMs"): StepShape(1024, 3072, 16, 8, 128, VOCABULARY, 1e-6, 0.1),
    ("78 SMs",): StepShape(2048, 8192, 32, 8, 64, 128256, 1e-6, 0.1),
}
LLAMA_8B = StepShape(4096, 14336, 32, 8, 128, 128256, 1e-5, 0.1)
STEPS |= {(*around, "fp8"): shape for around, shape in STEPS.items()}
STEPS |= {("8B",): LLAMA_8B, ("8B", "fp8"): LLAMA_8B}
INT4 = WeightFormat("int4", 4, 32, "group", True, False, 0)
GROUPS_STEPS = [("norm",), ("8B",), ("bias", "groups of 6")]
FP8_BLOCKS = WeightFormat("fp8-blocks", 8, 128, "block")
WEIGHT_FORMATS = {
    "fp8 weights": FP8_ROWS,
    "4-bit weights": WeightFormat("int4", 4, 128, "group", False, False, 8, "float16"),
    "4-bit weights and shifts": INT4,
    "fp8 weights in blocks": FP8_BLOCKS,
}
"""Of the layers' matrices."""
_PLAIN_STEPS = dict(STEPS)
STEPS |= {(*around, "fp8 weights"): shape for around, shape in _PLAIN_STEPS.items()}
STEPS |= {
    (*around, name): _PLAIN_STEPS[around]
    for around in GROUPS_STEPS
    for name in list(WEIGHT_FORMATS)[1:]
}
"""Models whose steps are one launch, by the operations around the QKV projection and what is in FP8: "fp8" the cache,
"fp8 weights" and "fp8 weights in blocks" the layers' matrices. "gemma" has
norms after attention and MLP, weights of norms in float32, and a rotation of its own for layers with a window."""
MATRICES = {
    ("wide",): (4096, 1024),
    ("gated",): (6144, 1024),
    ("parts", "short"): (1024, 2048),
    ("parts",): (1024, 3072),
    ("bias",): (3072, 2048),
    ("gated", "wide"): (16384, 2048),
    ("parts", "long"): (2048, 8192),
}
"""Shapes of weights for up to 256 rows, and for many, by the features of the projection."""
_LOOP_INSTRUCTIONS = (
    "HGMMA",
    "REDG.E.ADD.F32x4",
    "MUFU.EX2",
    "WARPGROUP.DEPBAR",
    "BAR.ARV",
    "LDL",
    "STL",
)
_WIDTHS = ("128", "64", "U16", "S16", "U8")
ROW_KERNELS = {
    "gated_delta": (("gated_delta_step",), ("apply_rule_to_drafts", "normalize_drafts")),
    "mamba2": (("step_mamba2",), ("step_drafts",)),
    "short_conv": (("convolve_rows",), ("convolve_drafts",)),
}
"""Kernels of recurrent mixers for decode rows of one token, and those for rows with drafts, with the same sums."""
_SUMS = re.compile(r"\}\) : \((tensor.*?)\) -> |tt\.reshape .* : (tensor.*?) -> ")
_LAYOUT = re.compile(r"^(#\w+) = (#ttg\..*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class FusedJob:
    """One compilation.

    Attributes:
        sm: compute capability; from 90 on kernels use programmatic dependent launch.
        operation: "linear", "groups", "matrix", "persistent", "invariant", "add_norm", "quantize", "gate",
            "output_gate", "embed", "lora", "rope", "best", "argmax", "chosen", "sample", "step", "sum_ranks",
            "gated_delta", "mamba2", "short_conv" or "training".
        choice: of a linear layer.
        around: features of the operation: of "linear" some of "norm", "residual", "bias", "best"; of
            "quantize", "norm"; of "add_norm", "parts", "bias" and "float32"; of "gate", "plain" and an activation; of
            "rope", "norm", "values", "queries", "fp8", "ahead", "invariant" and "float32"; of "step" see `STEPS`; of
            "matrix" and "persistent" see `MATRICES`, of the former also "fp8", "fp8 blocks" or "int4", of the latter
            "invariant"; of "groups" see `MATRICES`, also "fp8 blocks"; of "invariant" some of "parts", "fp8",
            "float32"; of "lora" "rank 64", "rank 256", "long" or "float32"; of
            "sum_ranks" "norm" and with it "parts"; of "gated_delta" see `GATED_DELTA`; of "mamba2" see `MAMBA2`; of
            "training" some of "all", "window", "softcap", "alibi", "dropout", "mask", "float32", "float16", "one head a
            group".
        tokens: of a step, for operations that depend on it.
        head_dim: likewise.
        function: the kernel to compile, of those that "argmax", "chosen", "lora", "sample", "training" and
            recurrent mixers launch.
        vocabulary: tokens of a row, for "argmax", "chosen" and "sample".
    """

    sm: int
    operation: str
    choice: LinearChoice | None = None
    around: tuple[str, ...] = ()
    tokens: int = 1
    head_dim: int = 128
    function: str = ""
    vocabulary: int = VOCABULARY

    def to_json(self) -> dict[str, Any]:
        """Return the fields that `from_json` takes."""
        plain = self.choice and dataclasses.replace(self.choice, spec=None, refusals=())  # type: ignore[arg-type]
        return dataclasses.asdict(dataclasses.replace(self, choice=plain))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> FusedJob:
        """Make a job from the fields of `to_json`."""
        choice = fields["choice"]
        if choice is not None:
            problem = choice["problem"]
            form = WeightFormat(**problem["format"])
            choice = LinearChoice(
                LinearProblem(**{**problem, "format": form}),
                VECTOR,
                LinearLaunch(**choice["launch"]),
                choice["why"],
                unpacks=choice["unpacks"],
            )
        return cls(**{**fields, "choice": choice, "around": tuple(fields["around"])})

    def __str__(self) -> str:
        """Name the job in a test's name and its failure."""
        text = f"sm_{self.sm} {self.operation} {' '.join(self.around)}"
        if self.function:
            return f"{text} {self.function} V={self.vocabulary}"
        if self.choice is None:
            return f"{text} {self.tokens} tokens D={self.head_dim}"
        it = self.choice.launch
        assert it is not None
        return (
            f"{text} {VECTOR.name} {self.choice.problem}: {it.block_n}x{it.block_k} "
            f"w{it.num_warps} a{it.ahead}"
        )


class FusedCompiler(Compiler):
    """Compiles fused kernels, and counts their loads by width, or the instructions of a loop with products."""

    def launch(self, job: FusedJob) -> None:  # type: ignore[override]
        """Run the code that launches the kernels, on small tensors or on large ones whose memory is never touched."""
        self.compiled = []
        getattr(self, f"_{job.operation}")(job, job.sm >= 90)

    def _watch(self, backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        """Do what `Compiler._watch` does, and read the layouts of the sums of `ROW_KERNELS`."""
        super()._watch(backend, stages, *rest)
        if not any(self._function in names for it in ROW_KERNELS.values() for names in it):
            return
        lower, assemble, sums = stages["llir"], stages["cubin"], []

        def lowered(module: Any, metadata: dict[str, Any]) -> Any:
            sums.extend(layouts_of_sums(str(module)))
            return lower(module, metadata)

        def assembled(ptx: str, metadata: dict[str, Any]) -> bytes:
            cubin: bytes = assemble(ptx, metadata)
            assert self._fresh is not None
            self._fresh["sums"] = sums
            return cubin

        stages["llir"], stages["cubin"] = lowered, assembled

    def count(self, sass: str) -> dict[str, int]:
        """Count global loads and stores by width, before and after the wait where there is one."""
        found: collections.Counter[str] = collections.Counter()
        when = "early " if "ACQBULK" in sass else ""
        for line in sass.splitlines():
            if "ACQBULK" in line:
                when = ""
            for kind, modifiers in _GLOBAL_ACCESS.findall(line):
                width = next((w for w in _WIDTHS if w in modifiers.split(".")), "32")
                found[f"{when}{kind}.{width}"] += 1
        if "REDG.E.ADD.F32x4" in sass:  # the one-pass backward of attention
            loop = loop_with_products(sass)
            for kind in _LOOP_INSTRUCTIONS:
                found[f"loop {kind}"] = sum(it.startswith(kind) for it in loop)
            found["faults of products in flight"] = len(faults(sass))
        if self._function == "expand":
            *_, after = re.split(r"\b(?:HMMA|FFMA2?)\b", sass)
            found["additions after the products"] = len(re.findall(r"\bFADD2?\b", after))
        return dict(found)

    def _linear(self, job: FusedJob, pdl: bool) -> None:
        choice = job.choice
        assert choice is not None
        problem = choice.problem
        dtype = getattr(torch, problem.dtype)
        weights = problem.matrices * problem.outputs

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        x, out = empty(problem.rows, problem.inputs), empty(problem.rows, problem.outputs)
        best = None
        if "best" in job.around:
            best = TileBest.empty(problem.rows, choice.tiles, "cpu")
        norm = None
        if "norm" in job.around:
            norm = Norm(empty(problem.inputs), 1e-6)
        numbers_dtype = getattr(torch, problem.format.dtype)
        scale = torch.empty(weights) if problem.format.is_quantized else None
        linear(
            x,
            torch.empty((weights, problem.inputs), dtype=numbers_dtype),
            choice,
            out,
            scale=scale,
            bias=empty(weights) if "bias" in job.around else None,
            norm=norm,
            residual=out if "residual" in job.around else None,
            best=best,
            pdl=pdl,
        )

    def _matrix(self, job: FusedJob, pdl: bool) -> None:
        self._many_rows(job, MatrixLinear, pdl, batch_invariant=job.tokens > ROW_COUNTS[-1])

    def _persistent(self, job: FusedJob, pdl: bool) -> None:
        self._many_rows(job, PersistentLinear, pdl, batch_invariant="invariant" in job.around)

    def _many_rows(self, job: FusedJob, layer: Any, pdl: bool, *, batch_invariant: bool) -> None:
        features = {"invariant", "fp8", "fp8 blocks", "int4"}
        outputs, inputs = MATRICES[tuple(it for it in job.around if it not in features)]
        weight, scale = torch.empty((outputs, inputs), dtype=torch.bfloat16), None
        bias = weight[:, 0] if "bias" in job.around else None
        if "fp8" in job.around:
            weight, scale = weight.to(torch.float8_e4m3fn), torch.empty(outputs)
        gated = "gated" in job.around
        weights = linear_weights(weight, bias, scale)
        for feature, form in (("int4", INT4), ("fp8 blocks", FP8_BLOCKS)):
            if feature in job.around:
                weights = LinearWeights(Weight.empty(form, (outputs, inputs), "cpu"), bias)
        problem = LinearProblem(
            job.tokens,
            outputs // (1 + gated),
            inputs,
            gated=gated,
            format=weights.weight.format,
            residual="parts" in job.around,
            batch_invariant=batch_invariant,
        )
        x = torch.empty((job.tokens, inputs), dtype=torch.bfloat16)
        layer(weights, problem)(x, None, None, LinearArguments(pdl=pdl))

    def _groups(self, job: FusedJob, pdl: bool) -> None:
        outputs, inputs = MATRICES[tuple(it for it in job.around if it != "fp8 blocks")]
        gated = "gated" in job.around
        form = FP8_BLOCKS if "fp8 blocks" in job.around else INT4
        weight = Weight.empty(form, (outputs, inputs), "cpu")
        problem = LinearProblem(
            job.tokens, outputs // (1 + gated), inputs, gated=gated, format=form, residual="parts" in job.around
        )  # fmt: skip
        x = torch.empty((job.tokens, inputs), dtype=torch.bfloat16)
        hidden = torch.empty((job.tokens, problem.outputs), dtype=x.dtype)
        choice = LinearChoice(problem, GROUPS, None, "job")
        arguments = LinearArguments(residual=hidden if problem.residual else None, pdl=pdl)
        GroupsLinear(LinearWeights(weight), problem)(x, choice, hidden, arguments)

    def _invariant(self, job: FusedJob, pdl: bool) -> None:
        dtype = torch.float32 if "float32" in job.around else torch.bfloat16
        weight, scale = torch.empty((1001, 1024), dtype=dtype), None
        if "fp8" in job.around:
            weight, scale = weight.to(torch.float8_e4m3fn), torch.empty(len(weight))
        weights = linear_weights(weight, weight[:, 0].to(dtype), scale)
        problem = LinearProblem(
            job.tokens,
            *weight.shape,
            str(dtype).removeprefix("torch."),
            format=weights.weight.format,
            residual="parts" in job.around,
            batch_invariant=True,
        )
        choice = select_linear(problem, ARCHES[job.sm])
        x = torch.empty((job.tokens, 1024), dtype=dtype)
        InvariantLinear(weights, problem)(x, choice, None, LinearArguments(pdl=pdl))

    def _add_norm(self, job: FusedJob, pdl: bool) -> None:
        x = torch.empty((job.tokens, 4096), dtype=torch.bfloat16)
        parts = torch.empty((4, job.tokens, 4096)) if "parts" in job.around else None
        if "bias" in job.around:
            add_layer_norm(x, x[0], x[0], 1e-6, parts=parts, pdl=pdl)
        elif "float32" in job.around:
            add_rms_norm(x, x[0].float(), 1e-6, parts=parts, dtype=torch.float32, pdl=pdl)
        else:
            add_rms_norm(x, x[0], 1e-6, parts=parts, pdl=pdl)

    def _quantize(self, job: FusedJob, pdl: bool) -> None:
        x, gain = torch.empty((job.tokens, 4096), dtype=torch.bfloat16), None
        if "norm" in job.around:
            gain = torch.empty(4096, dtype=torch.bfloat16)
        quantize_rows(x, gain, 1e-6, pdl=pdl)

    def _gate(self, job: FusedJob, pdl: bool) -> None:
        x = torch.empty((job.tokens, 28672), dtype=torch.bfloat16)
        function = next(
            (name for name in ("gelu", "gelu_tanh", "relu", "relu2") if name in job.around), "silu"
        )
        activate(x, function, gated="plain" not in job.around, pdl=pdl)

    def _output_gate(self, job: FusedJob, pdl: bool) -> None:
        heads, others = 2048, 3072
        x = torch.empty((job.tokens, heads), dtype=torch.bfloat16)
        projected = torch.empty((job.tokens, heads + others), dtype=torch.bfloat16)
        multiply_by_sigmoid(x, projected[:, :heads], pdl=pdl)

    def _embed(self, job: FusedJob, pdl: bool) -> None:
        ids = torch.empty(job.tokens, dtype=torch.int64)
        embed(ids, ids, torch.empty((8, 4096), dtype=torch.bfloat16), pdl=pdl)

    def _lora(self, job: FusedJob, pdl: bool) -> None:
        rank = next((it for it in (64, 256) if f"rank {it}" in job.around), 16)
        dtype = torch.float32 if "float32" in job.around else torch.bfloat16
        parts, inputs = ((4096,), 14336) if "long" in job.around else ((4096, 1024, 1024), 4096)
        x = torch.empty((job.tokens, inputs), dtype=dtype)
        y = torch.empty((job.tokens, sum(parts)), dtype=dtype)
        weights = LoraWeights.zeros(2, rank, parts, inputs, dtype, x.device)
        rows = sorted_rows(torch.zeros(job.tokens, dtype=torch.int32))
        begin_lora(x, weights, rows, pdl=pdl)(y)

    _gated_delta = staticmethod(launch_gated_delta)
    _mamba2 = staticmethod(launch_mamba2)
    _short_conv = staticmethod(launch_short_conv)

    def _best(self, job: FusedJob, pdl: bool) -> None:
        best = TileBest.empty(job.tokens, 19000, "cpu")
        ids, tokens = torch.empty((2, job.tokens), dtype=torch.int64)
        best_tokens(best, ids, tokens, torch.empty(job.tokens), pdl=pdl)

    def _rope(self, job: FusedJob, pdl: bool) -> None:
        dtype = torch.float32 if "float32" in job.around else torch.bfloat16

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        tokens, head_dim = job.tokens, job.head_dim
        kv, scale = empty(2, 3, 16, 8, head_dim), None
        if "fp8" in job.around:
            kv, scale = kv.to(torch.float8_e4m3fn), torch.empty(2, 3, 8, 16)
        if "queries" in job.around:
            kv = kv[:, :, :, :0]
        rope_and_write_kv(
            empty(tokens, 32 * head_dim),
            kv,
            (empty(99, 1, head_dim), empty(99, 1, head_dim)),
            torch.empty(tokens, dtype=torch.int64),
            torch.empty(tokens, dtype=torch.int32),
            norms=(empty(head_dim), empty(head_dim)) if "norm" in job.around else None,
            eps=1e-6,
            value_eps=1e-6 if "values" in job.around else None,
            kv_scale=scale,
            ahead=(empty(64, 64), empty(99, 77)) if "ahead" in job.around else None,
            batch_invariant="invariant" in job.around,
            pdl=pdl,
        )

    def _step(self, job: FusedJob, pdl: bool) -> None:
        del pdl

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16)

        shape = STEPS[job.around]
        c, inner, heads, kv_heads, dim, vocabulary = shape[:6]
        stacked = (heads + 2 * kv_heads) * dim
        gemma = "gemma" in job.around

        def gain(size: int) -> torch.Tensor:
            return empty(size).to(torch.float32 if gemma else torch.bfloat16)

        norm = gain(dim) if "norm" in job.around else None
        bias = empty(stacked) if "bias" in job.around else None
        matrices = (empty(stacked, c), empty(c, heads * dim), empty(2 * inner, c), empty(c, inner))
        forms = (form for name, form in WEIGHT_FORMATS.items() if name in job.around)
        form = next(forms, None)
        layer = LayerWeights(
            *(
                Weight.empty(form, tuple(it.shape), "cpu") if form else Weight.full(it)
                for it in matrices
            ),
            *(gain(c), gain(c), norm, norm, bias),
            window=512 if "window" in job.around else None,
            output_norm=gain(c) if gemma else None,
            down_norm=gain(c) if gemma else None,
        )
        # The compiler removes a loop over one layer, and with it the registers that layers hand on.
        as_rows = computed_as_rows(shape, job.tokens, form)
        layers = 1 if as_rows or "fp8" in job.around else 3
        ends = empty(vocabulary, c), empty(vocabulary, c), gain(c)
        weights = StepWeights(shape, [layer] * layers, *ends)
        cache, scales = empty(2, 3, 16, kv_heads, dim), None
        if "fp8" in job.around:
            cache, scales = cache.to(torch.float8_e4m3fn), torch.empty(2, 3, kv_heads, 16)
        arch = ARCHES[job.sm]
        if "78 SMs" in job.around:
            arch = dataclasses.replace(arch, num_sms=78)
        rows = job.tokens
        ids, slots = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int32)
        table, rope = (
            torch.empty((rows, 9), dtype=torch.int32),
            (empty(99, 1, dim),) * (4 if gemma else 2),
        )
        logits = empty(rows, vocabulary)
        caches = (cache,) * layers, (scales,) * layers
        outputs = slots, table, rope, logits, ids, torch.empty(rows), ids
        self.compiled = []
        if as_rows:
            RowsKernel(weights, *caches, arch, rows)(ids, ids, slots, *outputs, ids)
        else:
            StepKernel(weights, *caches, arch)(ids, ids, *outputs)

    def _argmax(self, job: FusedJob, pdl: bool) -> None:
        tokens = torch.empty(2, dtype=torch.int64)
        logits = torch.empty((2, job.vocabulary), dtype=torch.bfloat16)
        argmax_tokens(logits, tokens, tokens, torch.empty(2), pdl=pdl)

    def _chosen(self, job: FusedJob, pdl: bool) -> None:
        tokens = torch.empty(2, dtype=torch.int64)
        logits = torch.empty((2, job.vocabulary), dtype=torch.bfloat16)
        chosen_logprobs(logits, tokens, torch.empty(2), pdl=pdl)

    def _sample(self, job: FusedJob, pdl: bool) -> None:
        tokens = torch.empty(2, dtype=torch.int64)
        table = torch.empty((2, len(SampleRow._fields)), dtype=torch.float64)
        logits = torch.empty((2, job.vocabulary), dtype=torch.bfloat16)
        masks = torch.empty((1, -(-job.vocabulary // 32)), dtype=torch.int32)
        sample_tokens(logits, table, masks, {UNFILTERED, FILTERED}, tokens, tokens, pdl=pdl)

    def _sum_ranks(self, job: FusedJob, pdl: bool) -> None:
        with (
            mock.patch.object(one_shot, "share_memory", return_value=(None, [0] * RANKS)),
            mock.patch.object(one_shot, "detect", return_value=ARCHES[job.sm]),
        ):
            add = one_shot.OneShotSum(1, RANKS, torch.device("cpu"))
        self.compiled = []
        x = torch.empty((job.tokens, 4096), dtype=torch.bfloat16)
        if "norm" not in job.around:
            add(x)
            return
        dtype = torch.float32 if "parts" in job.around else x.dtype
        parts = torch.empty((2 if "parts" in job.around else 1, *x.shape), dtype=dtype)
        add.add_and_normalize(parts, x, x[0], 1e-5, pdl=pdl)

    def _training(self, job: FusedJob, _pdl: bool) -> None:
        dtype = next((it for it in ("float32", "float16") if it in job.around), "bfloat16")
        q = torch.empty((8, 32, job.head_dim), dtype=getattr(torch, dtype))
        k = torch.empty(
            (8, 32 if "one head a group" in job.around else 8, job.head_dim), dtype=q.dtype
        )
        offsets = torch.empty(3, dtype=torch.int32)
        mask = (offsets, offsets, offsets, offsets) if "mask" in job.around else None
        slopes = torch.empty(32) if "alibi" in job.around else None
        batch = TrainingBatch(offsets, offsets, slopes, mask)
        problem = TrainingProblem(
            softmax_scale=0.1,
            causal="all" not in job.around,
            sliding_window=100 if "window" in job.around else None,
            softcap=30.0 if "softcap" in job.around else None,
            dropout_p=0.1 if "dropout" in job.around else 0.0,
            max_seqlen_q=4096,
            max_seqlen_k=4096,
            mask_tile=(128, 128) if mask else (0, 0),
        )
        lse = torch.empty(q.shape[:2])
        saved = (q, k, k, q, lse)
        with mock.patch.object(training, "detect", return_value=ARCHES[job.sm]):
            if job.function in ("prepare", "backward", "finish"):
                backward.ONE_PASS.backward((q, lse), saved, batch, problem)
            else:
                training.PORTABLE.forward(q, k, k, batch, problem)
                training.PORTABLE.backward((q, lse), saved, batch, problem)


def layouts_of_sums(ttgir: str) -> list[str]:
    """Return the types of what a kernel adds up, sorted, with the layouts that decide the order of each sum."""
    layouts = dict(_LAYOUT.findall(ttgir))
    types = {"".join(found) for found in _SUMS.findall(ttgir)}
    return sorted(re.sub(r"#\w+\b(?!\.)", lambda it: layouts.get(it[0], it[0]), it) for it in types)


if __name__ == "__main__":
    serve(FusedCompiler(disassemble=True), FusedJob.from_json)
