"""Steps from recordings: one replay where there is a recording of the whole step.

Until there is, decode rows come from one and prompts from another. That reads the weights twice, which costs less than
to launch hundreds of kernels one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.engine.runner.decode_graphs import DecodeGraphs
from server.engine.runner.prefill_graphs import PrefillGraphs
from server.engine.runner.step_graph import Computed

if TYPE_CHECKING:
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.step import ScheduledSequence, SchedulerOutput
    from server.engine.runner.decode_graphs import DecodeGraph
    from server.engine.runner.prefill_graphs import PrefillGraph
    from server.engine.runner.shared_prefix import SharingPays
    from server.engine.runner.step_graph import StepModel


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
        self.prefill = PrefillGraphs(model, limits, sharing_pays)

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
        graphs = self._prepare(output)
        return None if graphs is None else [_replay(graph, count) for graph, count in graphs]

    def record_next(self) -> bool:
        """Make the next recording that is waited for; return whether there was one."""
        return self.decode.recordings.record_next() or self.prefill.recordings.record_next()

    def _prepare(
        self, output: SchedulerOutput
    ) -> list[tuple[DecodeGraph | PrefillGraph, int]] | None:
        """Find the recordings that compute a step, each with the number of rows that sample."""
        decode, prefill = output.decode, output.prefill
        graphs: list[tuple[DecodeGraph | PrefillGraph, int]] = []
        # Of the decode rows one may be a token within a prompt, which draws nothing; it is the last then.
        num_drawn = sum(s.samples for s in decode)
        num_prompts = sum(s.samples for s in prefill)
        if decode and prefill:
            mixed = self.prefill.prepare_mixed(decode, prefill)
            if mixed is not None:
                return [(mixed, num_drawn + num_prompts)]
        if decode:
            decoding = self.decode.prepare(decode)
            if decoding is None:
                return None
            graphs.append((decoding, num_drawn))
        if prefill:
            prompts = self.prefill.prepare(prefill, num_drawn)
            if prompts is None:
                return None
            graphs.append((prompts, num_prompts))
        return graphs


def _replay(graph: DecodeGraph | PrefillGraph, num_samples: int) -> Computed:
    assert graph.replay is not None
    graph.arrays.send()
    graph.replay.run()
    return Computed(*graph.replay.result).first(num_samples)


def wants_hidden(scheduled: ScheduledSequence) -> bool:
    """Whether a step has to score a prompt's tokens, which needs more than the last row's logits."""
    sequence = scheduled.sequence
    return sequence.sampling.prompt_logprobs and not sequence.num_known_output_tokens
