"""An engine process with the real loop, scheduler and channel, and an arithmetic model.

It starts in a fraction of a second. `EngineConfig.model_path`, or an argument, selects its behaviour: "ok", "fail"
(reports that it cannot start), "crash" (ends while starting), "sleep" (never ready), "hang" (stops at the first step),
"slow" (50 ms per step), "garbage" (sends a message that cannot be decoded), "silent" (never ready, sends nothing and
holds Python's global lock), "deaf" (receives no messages once it is ready).
"""

import ctypes
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

from server.engine.core.engine import Engine
from server.engine.core.limits import SchedulerConfig
from server.engine.core.memory.block_manager import BlockManager
from server.engine.core.messages import EngineInfo, EngineReady, StartupFailed, StartupPhase
from server.engine.core.progress import Progress
from server.engine.core.schedule.scheduler import Scheduler
from server.engine.link.engine_process.process import Channel, connect
from server.engine.link.engine_process.process_setup import (
    dump_stacks_on_signal,
    exit_with_parent,
    read_config,
)
from server.engine.link.protocol import EngineLaunch
from tests.engine.core.bookkeeping import sampled_rows
from tests.plans import PLAN

VOCAB_SIZE = 1000
"""Tokens that the arithmetic model samples."""
MAX_TOKEN_ID = 999_999
"""Largest id of a prompt: the prompts of tests have distinct tokens."""


@dataclass
class Sampled:
    token_id: int | None
    logprob: float | None = None
    top: tuple = ()
    error: str | None = None


def next_token(token_ids):
    """The arithmetic model: deterministic, and different for different histories."""
    return (sum(token_ids) * 31 + len(token_ids)) % VOCAB_SIZE


class ArithmeticRunner:
    """Samples `next_token`. Some tokens in a prompt make the step fail.

    666: it raises. 667: it raises an unrecoverable error. 668: it never ends. 669: it never ends and holds Python's
    global lock. 670: it takes half a second.
    """

    def __init__(self, behaviour="ok"):
        self.behaviour = behaviour

    def use_idle_time(self):
        return False

    def launch(self, output):
        if self.behaviour == "hang":
            time.sleep(3600)
        if self.behaviour == "slow":
            time.sleep(0.05)
        scheduled = (*output.decode, *output.prefill)
        if any(666 in s.sequence.token_ids[: s.sequence.num_prompt_tokens] for s in scheduled):
            raise RuntimeError("token 666")
        if any(667 in s.sequence.token_ids[: s.sequence.num_prompt_tokens] for s in scheduled):
            raise RuntimeError("fatal")
        prompts = [s.sequence.token_ids[: s.sequence.num_prompt_tokens] for s in scheduled]
        if any(668 in prompt for prompt in prompts):
            time.sleep(3600)
        if any(669 in prompt for prompt in prompts):
            sleep_with_lock()
        if any(670 in prompt for prompt in prompts):
            time.sleep(0.5)
        sampled = [[Sampled(next_token(s.sequence.token_ids))] * s.num_logits for s in scheduled]
        result = SimpleNamespace(sampled=sampled_rows(output, sampled), prompt_logprobs={})
        return SimpleNamespace(feeds_next=False, sample=lambda: None, result=lambda: result)

    def compile_grammar(self, sampling):
        raise NotImplementedError

    def forget(self, request_id):
        pass

    def recover(self, error):
        return "fatal" not in str(error)


def sleep_with_lock():
    ctypes.PyDLL(None).sleep(3600)


def make_info(config, num_blocks):
    return EngineInfo(
        model_id=config.model_id,
        device="cpu",
        dtype="float32",
        vocab_size=MAX_TOKEN_ID + 1,
        max_model_len=512,
        max_total_tokens=512,
        max_num_seqs=config.max_num_seqs or 64,
        max_num_batched_tokens=512,
        max_prefill_tokens=512,
        block_size=config.block_size,
        num_blocks=num_blocks,
        quantization="none",
        kv_cache_dtype="float32",
        num_parameters=0,
        plan=PLAN,
        startup_seconds={},
        versions={},
        engine=config.engine,
    )


def make_engine(config, channel, num_blocks=256):
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs or 64,
            max_num_batched_tokens=512,
            max_model_len=512,
        ),
        BlockManager(num_blocks, config.block_size),
    )
    return Engine(
        scheduler, ArithmeticRunner(config.model_path), channel, make_info(config, num_blocks)
    )


def main():
    launch = read_config(EngineLaunch)
    config = launch.config
    if behaviour := sys.argv[1:]:
        config = replace(config, model_path=behaviour[0])
    dump_stacks_on_signal()
    progress = Progress()
    channel = Channel(connect(launch, progress), progress)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    channel.send(StartupPhase("pretending to load"))
    if config.model_path == "fail":
        channel.send(StartupFailed("shard 2 is truncated"))
        raise SystemExit(1)
    if config.model_path == "sleep":
        time.sleep(3600)
    if config.model_path == "silent":
        sleep_with_lock()
    if config.model_path == "deaf":
        channel.receive = lambda *, wait: time.sleep(min(wait, 3600)) or ()
    if config.model_path == "garbage":
        channel.connection.send(b"\xc1")
    if config.model_path == "crash":
        os._exit(7)
    engine = make_engine(config, channel)
    engine.progress = progress
    channel.send(EngineReady(engine.info))
    gc.collect()
    engine.run()


if __name__ == "__main__":
    main()
