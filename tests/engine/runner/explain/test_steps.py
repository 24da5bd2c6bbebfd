"""The steps of the plan: their executor and kernels by the rule of the registries, and equal to what a model binds."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import kernels.linear.projection
import model.network.parameters
from kernels.arch import CATALOGUE
from kernels.cpu.library import load as load_library
from kernels.errors import NoKernelError
from kernels.fp8 import FP8
from kernels.linear.registry import REGISTRY as LINEAR
from kernels.norms import registry as norms
from kernels.rope import registry as rope
from kernels.weight_format import FP8_ROWS, INT4_GROUPS, INT8_GROUPS
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from model.executors import single_launch
from model.executors.bound import deterministic_unsupported
from model.executors.columns import Bucket
from model.executors.layers.binder import projections
from model.executors.layers.layer_kernels import layer_kernels
from model.hub.resolve import resolve
from model.sampling.sampler import SAMPLERS, HostTokens, Sampler
from server.cli.bench.engine.options import SHAPES, shapes
from server.engine.core.start_checks import StartupError
from server.engine.runner.explain.model_plan import explain_model
from tests.model.sampling.sampling_rows import sampling_row

DTYPES = ("bfloat16", "float16", "float32")
PRODUCTS = ("qkv", "output", "gate_up", "down", "head")


def config(shape):
    """Return a shape with its first layers, among which are those of every kind."""
    found = ModelConfig.from_folder(resolve(shape) if shape == "bundled" else SHAPES / shape)
    first = found.network.layers[:6]
    assert set(first) == set(found.network.layers)
    return dataclasses.replace(found, network=dataclasses.replace(found.network, layers=first))


def build(shape, dtype, *, fp8=False, device="meta"):
    return DecoderLM(config(shape), getattr(torch, dtype), device, FP8_ROWS if fp8 else None)


def names(rows):
    return [row.name for row in rows]


ORDERS = [names(LINEAR), names(norms.REGISTRY), names(rope.REGISTRY), names(SAMPLERS)]
ORDERS += [["single_launch", "cpu_library", "layers"]]


@pytest.mark.parametrize("shape", ["bundled", *shapes()])
def test_every_step_names_an_executor_and_kernels_and_the_reasons_of_all_rows_before_them(shape):
    explained = 0
    for dtype, fp8 in itertools.product(DTYPES, (False, True)):
        model = build(shape, dtype, fp8=fp8)
        for arch, kv_dtype, deterministic in itertools.product(
            CATALOGUE.values(), (None, FP8), (False, True)
        ):
            try:
                plan = explain_model(model, 16, arch, kv_dtype, deterministic=deterministic)
            except (NoKernelError, StartupError):
                assert deterministic  # all others have a kernel, of PyTorch in the end
                continue
            explained += 1
            assert [step.decode_rows for step in plan.steps] == [1, 2, 4, 8, 64, 0]
            for step in plan.steps:
                check(step.executor, step)
                for operation in step.operations:
                    check(operation.kernel, operation)
                done = {operation.operation for operation in step.operations}
                assert "sampling" in done
                if step.executor == "layers":
                    products = {it.partition(" product")[0] for it in done if " product" in it}
                    assert {*PRODUCTS} - {"qkv", "output"} <= products
                    bound = {name for layer in model.decoder_layers for name in projections(layer)}
                    assert products == bound | {"head"}
                    assert any("attention" in name for name in done)
    assert explained > 100


def check(taken, row):
    """Check that a row is the first one of its registry without reasons, and that those before it have some."""
    assert row.why
    assert all(refusal.reasons for refusal in row.refused)
    order = next((it for it in ORDERS if taken in it), None)
    if order is not None:
        assert [refusal.kernel for refusal in row.refused] == order[: order.index(taken)]


@pytest.mark.parametrize("shape", ["bundled", *shapes()])
def test_the_kernels_of_a_step_are_those_that_a_model_binds(shape, monkeypatch):
    monkeypatch.setattr(kernels.linear.projection, "load", lambda _target: lambda *_: None)
    gpus = [arch for arch in CATALOGUE.values() if arch.has_triton_tensor_cores]
    for arch, dtype, fp8 in itertools.product(gpus, DTYPES, (False, True)):
        made = build(shape, dtype, fp8=fp8)
        monkeypatch.setattr(model.network.parameters, "detect", lambda _device, arch=arch: arch)
        made.optimize()
        for deterministic in (False, True):
            if deterministic and deterministic_unsupported(made, arch, 16):
                assert (shape, dtype) == ("falcon-h1-1.5b", "float32")  # too wide a state
                continue
            plan = explain_model(made, 16, arch, deterministic=deterministic)
            bound = made.executors.layers.kernels(deterministic=deterministic)
            for step in plan.steps:
                if step.executor != "layers":
                    assert not single_launch.unsupported(
                        made.executors.problem(arch), step.decode_rows
                    )
                    continue
                tokens = step.decode_rows + step.prompt_tokens
                chosen = {
                    (name, product._choose(tokens)[0].spec.name)
                    for layer in bound.layers
                    for name, product in layer.projections.items()
                }
                chosen.add(("head", bound.head._choose(max(1, step.decode_rows))[0].spec.name))
                planned = {it.operation: it for it in step.operations}
                assert chosen == {
                    (name.partition(" product")[0], it.kernel)
                    for name, it in planned.items()
                    if " product" in name
                }
                assert planned["rotation and cache write"].kernel == bound.rotation.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_the_kernels_of_a_step_are_those_that_a_model_binds(dtype):
    arch = kernels.detect("cpu")
    made = build("bundled", dtype, device="cpu")
    made.init_weights()
    made.optimize()

    plan = explain_model(made, 16, arch)

    classes = {row.name: row.target.rpartition(":")[2] for row in LINEAR}
    for step in plan.steps:
        planned = {it.operation: it.kernel for it in step.operations}
        for name in PRODUCTS[:-1]:
            product = made.executors.layers.bound.layers[0].projections[name]._multiply
            assert type(product).__name__ == classes[planned[f"{name} product"]]
        assert (
            type(made.executors.layers.bound.head._multiply).__name__
            == classes[planned["head product"]]
        )
        in_library = dtype == "float32" and not isinstance(load_library(), str)
        assert planned["norms and activations"] == ("cpu_norm" if in_library else "torch_norm")
        assert planned["sampling"] == "host_sampling"
    assert isinstance(Sampler().begin(torch.zeros(1, 8), [sampling_row()]), HostTokens)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (INT8_GROUPS, "computes a step, with"),
        (
            dataclasses.replace(INT4_GROUPS, name="Q4_0"),
            "computes a step from the numbers of the checkpoint in Q4_0, with",
        ),
    ],
    ids=["int8", "Q4_0"],
)
def test_the_c_library_computes_every_step_with_integer_weights(form, said):
    if isinstance(reason := load_library(), str):
        pytest.skip(reason)

    made = build("bundled", "float32")
    made.weight_format, made.is_in_library = form, True
    plan = explain_model(made, 16, CATALOGUE["cpu"])

    assert {step.executor for step in plan.steps} == {"cpu_library"}
    assert all(f"one call of the C library {said}" in step.why for step in plan.steps)


def test_a_product_whose_launch_was_timed_is_measured():
    plan = explain_model(build("llama-3.1-8b", "float16"), 16, CATALOGUE["h100"])

    measured = {it.operation for it in plan.steps[1].operations if it.measured}
    assert {f"{name} product" for name in PRODUCTS} <= measured
    assert not measured & {"norms and activations", "rotation and cache write", "sampling"}


def test_a_row_with_several_tokens_has_a_decode_kernel_that_supports_them():
    bucket = Bucket(rows=2, queries=4, columns=64, num_logits=8)

    found = dict(layer_kernels(build("bundled", "bfloat16"), bucket, CATALOGUE["h100"], 16))

    attention = found["decode attention"]
    assert attention.spec.name == "hopper_decode"
    assert "decodes 1 query token per sequence, not 4" in attention.refusals[0].reasons
    assert found["qkv product"].problem.rows == 8


def test_layers_of_different_sizes_have_products_of_their_own():
    config = build("bundled", "bfloat16").config
    first, *others = config.network.layers
    wide = dataclasses.replace(first, mlp=dataclasses.replace(first.mlp, inner=2 * first.mlp.inner))
    network = dataclasses.replace(config.network, layers=(wide, *others))
    made = DecoderLM(dataclasses.replace(config, network=network), torch.bfloat16, "meta")

    bucket = Bucket(rows=64, columns=64, num_logits=64)
    found = dict(layer_kernels(made, bucket, CATALOGUE["h100"], 16))

    ends = [f" of {count} layers" for count in (1, len(others))]
    outputs = [found[f"gate_up product{end}"].problem.outputs for end in ends]
    assert outputs == [wide.mlp.inner, first.mlp.inner]
    assert "gate_up product" not in found
