"""A model runner that injects faults. Works around a real `ModelRunner` and around those of fake engines."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from model.sampling.parameters import NOT_FINITE, SampledToken
from server.engine.core.sequence import SequenceStatus
from server.engine.core.step import SampledRows

if TYPE_CHECKING:
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.sequence import Sequence
    from server.engine.core.step import PendingStep, ScheduledSequence, SchedulerOutput
    from tests.faults.spec import Fault

_KEPT_STEPS = 8


class InjectedError(RuntimeError):
    """The error of the faults `raise` and `fatal`."""


class FaultyRunner:
    """Delegates to a runner, and injects faults when a step is launched.

    A real runner gets its NaN by a key and a value of the sequence's previous token, which are overwritten in the KV
    cache: the model computes the NaN itself on each path, also on a GPU and in a recorded step. That needs a token
    before, in a block that no other sequence shares; until then the fault waits. The results of a fake runner are
    replaced.

    Args:
        runner: computes the steps.
        faults: to inject.
    """

    def __init__(self, runner: Any, faults: TypingSequence[Fault]) -> None:
        self._runner = runner
        self._faults = [_State(fault) for fault in faults]
        self._numbers: dict[int, int] = {}
        self._num_steps = 0
        self._is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Launch a step, with its faults."""
        scheduled = (*output.decode, *output.prefill)
        step = self._number_of(output)
        replaced: list[int] = []
        for state in self._faults:
            state.choose_row(step, scheduled)  # before one of them raises
        for state in self._faults:
            rows = state.rows(step, scheduled)
            if rows is None:
                continue
            if state.fault.kind == "nan":
                replaced += [row for row in rows if self._make_nan(scheduled[row])]
            else:
                self._act(state.fault)
        pending: PendingStep = self._runner.launch(output)
        if not replaced:
            return pending
        return _with_errors(pending, replaced, [row.num_logits for row in output.decode])

    def recover(self, error: Exception) -> bool:
        """Return what the runner does; False after the fault `fatal`."""
        return bool(self._runner.recover(error)) and not self._is_broken

    def _number_of(self, output: SchedulerOutput) -> int:
        if output.step not in self._numbers:
            self._num_steps += 1
            self._numbers[output.step] = self._num_steps
            if len(self._numbers) > _KEPT_STEPS:
                del self._numbers[min(self._numbers)]
        return self._numbers[output.step]

    def _act(self, fault: Fault) -> None:
        if fault.kind == "oom":
            self._run_out_of_memory()
        elif fault.kind == "hang":
            self._hang()
        elif fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "exit":
            os._exit(1)
        elif fault.kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        else:
            self._is_broken = self._is_broken or fault.kind == "fatal"
            raise InjectedError(f"the injected fault {fault}")

    def _run_out_of_memory(self) -> None:
        if self._on_gpu:
            import torch

            torch.empty(1 << 60, dtype=torch.uint8, device=self._runner.device)
        if "torch" in sys.modules:
            raise sys.modules["torch"].OutOfMemoryError("out of memory: an injected fault")
        raise MemoryError("an injected fault")

    def _hang(self) -> None:
        """Let the device compute without an end; without a device, stop the engine's thread."""
        if self._on_gpu:
            import torch

            torch.cuda._sleep(1 << 62)
        else:
            threading.Event().wait()

    @property
    def _on_gpu(self) -> bool:
        return getattr(getattr(self._runner, "device", None), "type", "cpu") == "cuda"

    def _make_nan(self, row: ScheduledSequence) -> bool:
        """Make a row's logits NaN; return whether its result must be replaced instead."""
        cache = getattr(self._runner, "kv_cache", None)
        if cache is None:
            return True
        if row.start % cache.block_size:
            position = row.start - 1
            block = row.sequence.block_table[position // cache.block_size]
            poison(cache, block, slice(position % cache.block_size, row.start % cache.block_size))
        return False


class _State:
    """A fault and what it has done."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._has_row = fault.row is not None or fault.kind == "nan"
        self._row = fault.row or 0
        self._began = 0  # number of the step
        self._num_left = 0
        self._target: Sequence | None = None

    def choose_row(self, step: int, scheduled: TypingSequence[ScheduledSequence]) -> None:
        """Choose the sequence of a fault with a row, if it begins at this step."""
        fault, target = self.fault, self._target
        if not self._has_row or step < fault.step or self._row >= len(scheduled):
            return
        if target is None or (
            fault.every and target.status is SequenceStatus.FINISHED and fault.is_due(step)
        ):
            self._target = scheduled[self._row].sequence

    def rows(self, step: int, scheduled: TypingSequence[ScheduledSequence]) -> list[int] | None:
        """Return the rows of a step that the fault applies to; None if it does not happen."""
        fault = self.fault
        if self._has_row:
            rows = [i for i, row in enumerate(scheduled) if row.sequence is self._target]
            return rows or None
        if fault.times == 0:
            return [] if step >= fault.step else None
        if step > self._began and fault.is_due(step):
            self._began, self._num_left = step, fault.times
        # A fault of several launches also happens when the step is computed again.
        if self._num_left == 0:
            return None
        self._num_left -= 1
        return []


def poison(kv_cache: Any, block: int, slots: slice = slice(None)) -> None:
    """Overwrite keys and values of one block, in every layer, with NaN.

    Args:
        kv_cache: the `KVCache`.
        block: its id.
        slots: the slots of the block.
    """
    for layer, scales in zip(kv_cache.layers, kv_cache.scales, strict=True):
        if scales is None:
            layer[:, block, slots] = float("nan")
        else:
            layer.view(dtype=sys.modules["torch"].uint8)[:, block, slots] = (
                0x7F  # NaN in float8_e4m3fn
            )
            scales[:, block, :, slots] = float("nan")


def _with_errors(pending: PendingStep, rows: list[int], counts: list[int]) -> PendingStep:
    """Return a pending step whose sampled tokens in some rows are errors, as those of NaN are."""

    def result() -> Any:
        found = pending.result()
        sampled = [list(tokens) for tokens in found.sampled.by_row(counts)]
        for row in rows:
            sampled[row] = [SampledToken(error=NOT_FINITE)] * len(sampled[row])
        decoded = [token for tokens in sampled[: len(counts)] for token in tokens]
        columns = SampledRows.of(decoded, sampled[len(counts) :])
        return SimpleNamespace(sampled=columns, prompt_logprobs=found.prompt_logprobs)

    return cast(
        "PendingStep",
        SimpleNamespace(feeds_next=pending.feeds_next, sample=pending.sample, result=result),
    )
