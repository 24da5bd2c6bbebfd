"""Steps from recordings: the decode rows from one, the prompts from another, one after the other.

Computing the two apart reads the weights twice, which costs less than to launch hundreds of kernels one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.engine.decode_graphs import DecodeGraphs
from server.engine.prefill_graphs import PrefillGraphs
from server.engine.step_graph import Computed

if TYPE_CHECKING:
    from server.engine.decode_graphs import DecodeGraph
    from server.engine.prefill_graphs import PrefillGraph
    from server.engine.scheduler import SchedulerConfig
    from server.engine.shared_prefix import SharingPays
    from server.engine.step import ScheduledSequence, SchedulerOutput
    from server.engine.step_graph import StepModel


class StepGraphs:
    """The recordings of a model's steps. Used by the engine's thread alone.

    Args:
        model: computes the steps.
        limits: of a step.
        sharing_pays: asked whether a step should read once what its sequences share, which no recording does.
    """

    def __init__(
        self, model: StepModel, limits: SchedulerConfig, sharing_pays: SharingPays | None = None
    ) -> None:
        self.decode = DecodeGraphs(model, limits, sharing_pays)
        self.prefill = PrefillGraphs(model, limits)

    def compute(self, output: SchedulerOutput) -> list[Computed] | None:
        """Compute a step by recordings.

        Args:
            output: what to compute.

        Returns:
            What they leave for the rows that sample, decode rows first, valid until the next step; None where the
            step has to be launched kernel by kernel.
        """
        if any(map(wants_hidden, (*output.decode, *output.prefill))):
            return None
        graphs: list[tuple[DecodeGraph | PrefillGraph, int]] = []
        # Of the decode rows one may be a token within a prompt, which draws nothing; it is the last then.
        first_place = sum(s.samples for s in output.decode)
        for prepare, rows in (
            (self.decode.prepare, output.decode),
            (lambda rows: self.prefill.prepare(rows, first_place), output.prefill),
        ):
            if rows:
                graph = prepare(rows)
                if graph is None:
                    return None
                graphs.append((graph, sum(s.samples for s in rows)))
        return [_replay(graph, num_samples) for graph, num_samples in graphs]

    def record_next(self) -> bool:
        """Make the next recording that is waited for; return whether there was one."""
        return self.decode.recordings.record_next() or self.prefill.recordings.record_next()


def _replay(graph: DecodeGraph | PrefillGraph, num_samples: int) -> Computed:
    assert graph.replay is not None
    graph.arrays.send()
    graph.replay.run()
    return Computed(*graph.replay.result).first(num_samples)


def wants_hidden(scheduled: ScheduledSequence) -> bool:
    """Whether a step has to score a prompt's tokens, which needs more than the last row's logits."""
    sequence = scheduled.sequence
    return sequence.sampling.prompt_logprobs and not sequence.num_known_output_tokens
