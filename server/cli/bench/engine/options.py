"""The flags of `tessera bench engine`, and the settings that its workloads need. Imports no PyTorch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.cli.bench.engine.workloads import LONG_CONTEXT, USUAL, Plan, parse
from server.cli.bench.flags import add_result_flags
from server.cli.bench.workload import Lengths
from server.cli.parsing.values import checked, count, positive

if TYPE_CHECKING:
    import argparse

    from server.cli.parsing.parser import Parser
    from server.engine.core.messages import EngineConfig

SHAPES = Path(__file__).parents[1] / "shapes"
_FEWEST_TOKENS = 2048
"""Least tokens of the longest sequence, so that a short plan runs the same kernels as a service."""


def add_flags(parser: Parser) -> None:
    """Add this command's own flags."""
    parser.epilog = (
        f"MODEL may also be one of the shapes {', '.join(shapes())}, which get random weights. "
        "Unless given, --max-num-seqs and --max-model-len are what the workloads need, and "
        "--enable-prefix-caching is true only for hitN and contextN."
    )
    add = parser.add_argument
    add("--workloads", nargs="+", type=checked(parse), metavar="NAME",
        help="batchN: milliseconds per token of N sequences; decodeN: their tokens per second; ttftN: a prompt of N "
        "tokens; mixedN: N requests of --lengths; streamsN: the load of `tessera bench serve --concurrency N`; "
        "hitN: a prompt of N tokens that is in the prefix cache; contextN: milliseconds per token after a prompt of N "
        "tokens; without N the usual ones; "
        f"default: {', '.join(USUAL)}")  # fmt: skip
    add("--long-context", action="store_true",
        help=f"measure {', '.join(LONG_CONTEXT)}, beside --workloads if it is given")  # fmt: skip
    add("--prompt-tokens", type=count, default=128, metavar="N",
        help="prompt tokens of batchN and decodeN (%(default)s)")  # fmt: skip
    add("--steps", type=count, default=256, metavar="N",
        help="decode steps of batchN, decodeN and contextN (%(default)s)")  # fmt: skip
    add("--lengths", type=checked(Lengths.parse), default=Lengths(100, 1024), metavar="N-M",
        help="tokens of mixed prompts and of their outputs (%(default)s)")  # fmt: skip
    add("--profile", action="store_true",
        help="also show where the time of batchN, decodeN and ttftN is spent")  # fmt: skip
    add("--idle-seconds", type=positive, default=math.inf, metavar="S",
        help="seconds between two runs in which steps are recorded, those that a run needed first; default: until all "
        "are recorded")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of prompts and lengths (%(default)s)")
    add_result_flags(parser, "the last part of --model")


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the measurements that the flags describe."""
    named = options.workloads or []
    if options.long_context:
        named = [*named, *map(parse, LONG_CONTEXT)]
    workloads = [w for several in named or map(parse, USUAL) for w in several]
    return Plan(
        tuple(dict.fromkeys(workloads)), options.prompt_tokens, options.steps, options.lengths
    )


def shapes() -> list[str]:
    """Return the names of the shapes that `--model` accepts."""
    return sorted(folder.name for folder in SHAPES.iterdir())


def shape_folder(model: str) -> Path | None:
    """Return the folder with the configuration of a shape; None if `model` names none, or a folder."""
    name = model.casefold()
    return SHAPES / name if name in shapes() and not Path(model).exists() else None


def adapt(config: EngineConfig, plan: Plan, given: set[str], max_context: int) -> EngineConfig:
    """Return the configuration with the plan's values for settings that the operator did not set."""
    budget = config.max_num_batched_tokens
    wanted: dict[str, Any] = {
        "max_num_seqs": plan.most_sequences,
        "max_model_len": min(max_context, max(_FEWEST_TOKENS, plan.most_tokens(budget))),
        "enable_prefix_caching": plan.repeats_prompts,
    }
    changes = {name: value for name, value in wanted.items() if name not in given}
    return dataclasses.replace(config, **changes)
