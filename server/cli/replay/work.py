"""What is to be computed again: the outputs of receipts, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET

from server.receipts.comparison import Computed, compare
from server.receipts.record import sampling_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from model.sampling.parameters import SamplingParams
    from server.engine.core.request import AdapterRef
    from server.receipts.record import Receipt, ReceiptOutput


@dataclass(slots=True)
class Task:
    """One output of a receipt, while it is computed again.

    Attributes:
        name: of the output, for messages.
        receipt: that it is of.
        output: what the receipt says.
        computed: what was computed so far.
        adapter: that computes it; None for the model alone.
    """

    name: str
    receipt: Receipt
    output: ReceiptOutput
    computed: Computed = field(default_factory=Computed)
    adapter: AdapterRef | None = None

    @property
    def prompt(self) -> list[int]:
        """The tokens of its prompt."""
        return self.receipt.prompts[self.output.prompt]

    @property
    def sampling(self) -> SamplingParams:
        """Its sampling parameters."""
        return sampling_of(self.receipt, self.output)

    @property
    def difference(self) -> str | None:
        """The first difference; None if there is none."""
        return compare(self.output, self.computed)


def tasks_of(name: str, receipt: Receipt) -> list[Task]:
    """Return a task for each output of a receipt."""
    several = len(receipt.outputs) > 1
    return [
        Task(f"{name}, output {i}" if several else name, receipt, output)
        for i, output in enumerate(receipt.outputs)
    ]


def with_adapters(tasks: Iterable[Task], adapters: Mapping[str, AdapterRef]) -> list[Task]:
    """Return the tasks whose adapter is here, or that have none; the others get an error.

    Args:
        tasks: any.
        adapters: by digest, in hexadecimal.
    """
    kept = []
    for task in tasks:
        digest = task.receipt.conditions.adapter
        if digest is UNSET:
            kept.append(task)
        elif (found := adapters.get(digest.removeprefix("sha256:"))) is not None:
            task.adapter = found
            kept.append(task)
        else:
            task.computed.error = f"adapter {digest:.71} is not here; give it with --lora-modules"
    return kept
