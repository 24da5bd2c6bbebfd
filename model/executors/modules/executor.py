"""The executor of networks that modules of `transformers` compute: all layers but their attention, which is ours."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

from kernels.rope import registry as rope
from kernels.sampling.tokens import known_ids
from kernels.selection import VectorProblem, reasons, select_vector
from model.executors import support
from model.executors.columns import Want
from model.executors.executor import ExecutorOfState, ExecutorSpec
from model.executors.layers.attention import PagedAttention
from model.executors.layers.attention_plans import attention_planner
from model.executors.modules.interface import AttentionCall, receiving
from model.executors.scores import prompt_scores
from model.executors.step import StepOutput
from model.network import spec
from model.network.attention_problems import attention_problems, same_problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from model.device.kv_cache import KVCache
    from model.executors.columns import Bucket
    from model.executors.executor import Bindings, ModelProblem
    from model.executors.layers.attention_plans import AttentionMetadata
    from model.executors.step import StepInput
    from model.network.parameters import DecoderParameters

_ROWS: Final = "logits_to_keep"
"""The argument of most models of the library that selects the tokens whose logits are computed."""
_READS: Final[support.Reads] = {
    spec.Network: {"modules": support.ALL},
    spec.Modules: support.ALL,
    spec.Layer: {},
    spec.Norm: {},
    spec.Attention: dict.fromkeys(("window", "rotary", "softcap"), support.ALL),
    spec.Dense: {},
}


class ModulesExecutor:
    """Runs the library's model over the packed tokens of a step, as one sequence with the positions of several.

    Args:
        model: whose network the probe has stated.
        modules: the model of the library, with our implementation of attention.
    """

    def __init__(self, model: DecoderParameters, modules: nn.Module) -> None:
        self._model, self._modules = model, modules
        network = model.network
        problems = attention_problems(network)
        self._places = [
            (problems.index(same_problem(it)), network.rotaries.index((it.rotary, it.head_dim)))
            for it in network.attentions
        ]
        self._selects = _ROWS in inspect.signature(modules.forward).parameters

    def reserve_positions(self, num_positions: int) -> None:
        """Allocate the tables of the rotation by 0, with which the cache is written."""
        model = self._model
        for it in model.ropes:
            it.reserve(num_positions, model.dtype, model.device)

    def step(
        self, state: KVCache, step: StepInput, sampled: Tensor | None, out: StepOutput | None
    ) -> StepOutput:
        """Compute a step; see `DecoderLM.step`."""
        assert out is None, "steps of modules are not recorded"
        bucket, arrays = step.bucket, step.device
        metadata = attention_planner(self._model).plan_step(step, state)
        ids = known_ids(arrays.token_ids, sampled)
        rows = None if bucket.has_all_logits else arrays.logits_rows
        if bucket.want is not Want.PROMPT_SCORES:
            return StepOutput(self.logits(ids, arrays.positions, state, metadata, rows))
        logits = self.logits(ids, arrays.positions, state, metadata)
        every = torch.arange(len(logits), device=logits.device)
        scores = prompt_scores(step, every, logits.__getitem__)
        return StepOutput(logits if rows is None else logits[rows], scores=scores)

    def logits(
        self,
        ids: Tensor,
        positions: Tensor,
        state: KVCache,
        metadata: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute logits of packed tokens whose attention is planned.

        Args:
            ids: [T] int64.
            positions: [T] int64.
            state: the cache; written.
            metadata: from `AttentionPlanner`.
            rows: [M] int64, the tokens whose logits are computed; None for all.

        Returns:
            [M, V].
        """
        dtype = self._model.dtype
        rotation, _, _ = select_vector(
            rope.REGISTRY, VectorProblem(self._model.dtype_name), self._model.arch
        )
        attention = PagedAttention(
            state, metadata, self._model.ropes, positions, rotation=rotation, pdl=False
        )

        def attend(call: AttentionCall) -> Tensor:
            index: Any = call.module.layer_idx
            if call.mask is not None:
                raise RuntimeError(
                    f"{type(call.module).__name__} has a mask that the probe has not seen"
                )
            heads = [
                it.transpose(1, 2).flatten(2).to(dtype) for it in (call.query, call.key, call.value)
            ]
            problem, rotary = self._places[index]
            mixed = attention.of_rotated(index, problem, rotary, torch.cat(heads, -1)[0])
            return mixed.view(1, len(mixed), -1, call.value.shape[-1]).to(call.value.dtype)

        selected = {_ROWS: rows} if self._selects and rows is not None else {}
        with receiving(attend):
            found = self._modules(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, **selected
            )
        logits: Tensor = found.logits[0]
        return logits if selected or rows is None else logits[rows]


def _unsupported(problem: ModelProblem, bucket: Bucket) -> tuple[str, ...]:
    return (
        *reasons(
            (problem.network.modules is None, "the network is one of our families"),
            (bucket.deterministic, "no deterministic steps by modules of transformers"),
            (problem.num_ranks > 1, "no tensor parallelism of modules of transformers"),
        ),
        *support.unread(problem.network, _READS),
        *(f"no {name} of sequences" for name in bucket.extra_columns),
    )


def _bind(bindings: Bindings, state: KVCache, _bucket: Bucket) -> ExecutorOfState:
    assert bindings.modules is not None
    return ExecutorOfState(bindings.modules, state)


def _describe(problem: ModelProblem) -> str:
    modules = problem.network.modules
    assert modules is not None
    return (
        f"the slow path: modules of transformers compute {modules.model_type}, one operation after the other, since it"
        " is none of our families or --model-backend asks for them; attention and the KV cache are ours"
    )


MODULES: Final = ExecutorSpec("modules", _unsupported, _bind, _describe)
"""Computes every step of a network that modules of `transformers` compute, on every processor."""
