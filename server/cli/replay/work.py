"""What is to be computed again: the outputs of receipts, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.receipts.comparison import Computed, compare
from server.receipts.record import sampling_of

if TYPE_CHECKING:
    from model.sampling.parameters import SamplingParams
    from server.receipts.record import Receipt, ReceiptOutput


@dataclass(slots=True)
class Task:
    """One output of a receipt, while it is computed again.

    Attributes:
        name: of the output, for messages.
        receipt: that it is of.
        output: what the receipt says.
        computed: what was computed so far.
    """

    name: str
    receipt: Receipt
    output: ReceiptOutput
    computed: Computed = field(default_factory=Computed)

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
