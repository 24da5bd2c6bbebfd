"""The choice of a row, by the rule that all registries share, and the registries of operations on vectors."""

from __future__ import annotations

import importlib.util
import itertools
from typing import NamedTuple

import pytest

from kernels.arch import CATALOGUE
from kernels.attention.registry import INVARIANT_REGISTRY, PREFIX_REGISTRY, REGISTRY
from kernels.cpu.library import load as load_library
from kernels.errors import NoKernelError
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import REGISTRY as LINEAR
from kernels.linear.select import select_linear
from kernels.norms import registry as norms
from kernels.rope import registry as rope
from kernels.sampling import registry as sampling
from kernels.selection import VectorProblem, choose, load, select_vector

VECTORS = {"norms": norms, "rope": rope, "sampling": sampling}
ALL_ROWS = [*REGISTRY, *INVARIANT_REGISTRY, *PREFIX_REGISTRY, *LINEAR]
ALL_ROWS += [row for module in VECTORS.values() for row in module.REGISTRY]
H100 = CATALOGUE["h100"]


class Fake(NamedTuple):
    name: str
    reasons: tuple[str, ...]


def chosen(*rows):
    return choose(rows, lambda row: row.reasons, "a problem", H100)


def test_the_first_row_without_reasons_is_taken_and_those_before_it_keep_theirs():
    spec, why, refusals = chosen(
        Fake("a", ("one", "two")), Fake("b", ("three",)), Fake("c", ()), Fake("d", ("four",))
    )

    assert spec.name == "c"
    assert why == f"c is the first row that supports a problem on {H100}"
    assert [str(refusal) for refusal in refusals] == ["a: one; two", "b: three"]


def test_without_a_row_the_error_lists_all_reasons_of_every_row():
    with pytest.raises(NoKernelError) as error:
        chosen(Fake("a", ("one", "two")), Fake("b", ("three",)))
    assert str(error.value) == f"no kernel for a problem on {H100}: a: one; two; b: three"

    with pytest.raises(NoKernelError, match="the registry has no row for a problem"):
        chosen()


@pytest.mark.parametrize("registry", VECTORS)
def test_a_registry_of_vectors_has_triton_first_and_pytorch_for_every_problem(registry):
    module = VECTORS[registry]

    for arch, dtype, trainable in itertools.product(
        CATALOGUE.values(), ("bfloat16", "float16", "float32", "float64"), (False, True)
    ):
        problem = VectorProblem(dtype, trainable)
        spec, _, refusals = select_vector(module.REGISTRY, problem, arch)

        runs = arch.has_triton_tensor_cores and dtype != "float64" and not trainable
        in_library = arch.is_cpu and dtype == "float32" and not trainable
        expected = module.TRITON if runs else module.PYTORCH
        if in_library and registry == "norms" and not isinstance(load_library(), str):
            expected = norms.CPU_LIBRARY
        assert spec is expected
        before = module.REGISTRY[: module.REGISTRY.index(spec)]
        assert [row.kernel for row in refusals] == [row.name for row in before]
        assert all(row.reasons for row in refusals)


def test_norms_are_in_triton_where_the_products_of_a_layer_leave_them_to_triton():
    for arch, dtype, trainable, invariant in itertools.product(
        CATALOGUE.values(), ("bfloat16", "float16", "float32"), (False, True), (False, True)
    ):
        norm = select_vector(norms.REGISTRY, VectorProblem(dtype, trainable), arch).spec
        for rows in (1, 4, 64, 4096):
            problem = LinearProblem(
                rows, 512, 512, dtype, layer_weights=1 << 20, trainable=trainable,
                batch_invariant=invariant,
            )  # fmt: skip
            try:
                fixed = select_linear(problem, arch).spec.any_rows
            except NoKernelError:
                continue  # no row is batch invariant here
            assert fixed == (norm is not norms.TRITON)


def test_every_target_exists():
    for row in ALL_ROWS:
        module, _, attribute = row.target.partition(":")
        source = importlib.util.find_spec(module).loader.get_source(module)
        assert any(f"{kind} {attribute}" in source for kind in ("def", "class")), row.name


def test_targets_that_need_no_triton_can_be_loaded():
    for row in (norms.PYTORCH, norms.CPU_LIBRARY, rope.PYTORCH, sampling.PYTORCH):
        assert callable(load(row.target))
