"""Trains one model for a number of steps or of seconds and keeps its best weights."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from model.checkpoint.config import ModelConfig
from model.training.network import TrainedLM, cross_entropy, training_loss
from model.training.optimizer import MuonAdamW
from model.training.prepare import CONTEXT_LENGTH, read_held_out
from model.training.streams import PackedTokens, TokenStreams, pack, to_device
from model.training.tokenization import END_OF_TEXT_ID, TURN_END_ID, encode_documents

_ROWS = 16
"""Rows of the held-out files that are measured at once."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a model; heads are 64 wide."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """How one model is trained.

    Attributes:
        name: of the progress bar and of the log.
        steps: most optimizer updates; 0 for as many as `seconds` allow.
        seconds: most time, from the call of `run_stage` on; 0 for as much as `steps` need.
        batch_tokens: tokens per update.
        lengths: as in `TokenStreams.batch`.
        learning_rate: peak, after `warmup_share` of the progress; then it falls linearly to zero.
        distill_weight: share of the teachers' term in the loss.
        start_share, split, infilling_share: as in `TokenStreams.batch`.
        stream_weights: share of tokens from each of `prepare.STREAMS`.
    """

    name: str
    shape: Shape
    steps: int = 0
    seconds: float = 0.0
    batch_tokens: int = 65_536
    lengths: tuple[int, ...] = (512, CONTEXT_LENGTH)
    learning_rate: float = 4e-3
    embedding_rate: float = 1.0
    warmup_share: float = 0.04
    weight_decay: float = 1.0
    dropout: float = 0.1
    distill_weight: float = 0.0
    start_share: float = 0.5
    split: float = 0.1
    infilling_share: float = 0.5
    stream_weights: tuple[float, ...] = (0.33, 0.28, 0.1, 0.24, 0.05)
    seed: int = 0


def model_config(shape: Shape, vocab_size: int) -> ModelConfig:
    """Return the Llama configuration of a shape."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        norm_eps=1e-6,
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=END_OF_TEXT_ID,
        eos_token_ids=(END_OF_TEXT_ID, TURN_END_ID),
    )


def learning_rate(stage: Stage, progress: float) -> float:
    """Return the rate at a progress in [0, 1]: a linear rise, then a linear fall to zero at the end."""
    if progress < stage.warmup_share:
        return stage.learning_rate * max(progress, 1e-3) / stage.warmup_share
    return stage.learning_rate * max(0.0, 1 - progress) / (1 - stage.warmup_share)


class Clock:
    """The progress of a stage, by steps or by time, whichever is further.

    Time counts from the end of the first step, in which kernels are compiled, up to the end of the stage's seconds.
    """

    def __init__(self, stage: Stage, now: Callable[[], float] = time.monotonic) -> None:
        if not stage.steps and not stage.seconds:
            raise ValueError(f"the stage {stage.name} has neither steps nor seconds")
        self._stage, self._now = stage, now
        self._began = now()
        self._compiled: float | None = None

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return self._now() - self._began

    def progress(self, step: int) -> float:
        """Return the progress before a step, in [0, 1]; 1 when the stage is over."""
        share = step / self._stage.steps if self._stage.steps else 0.0
        if self._stage.seconds and step:
            if self._compiled is None:
                self._compiled = self.seconds
            left = max(1e-9, self._stage.seconds - self._compiled)
            share = max(share, (self.seconds - self._compiled) / left)
        return min(1.0, share)


class HeldOut:
    """The held-out files as batches on the device, for a quick measurement while training."""

    def __init__(self, data: Path, device: torch.device) -> None:
        texts = [file.text for file in read_held_out(data)]
        tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        ids, _ = encode_documents(tokenizer, texts)
        count = (len(ids) - 1) // CONTEXT_LENGTH
        if count == 0:
            raise ValueError(
                f"{len(ids)} held-out tokens in {data}, more than {CONTEXT_LENGTH} needed"
            )
        rows = np.arange(count)[:, None] * CONTEXT_LENGTH + np.arange(CONTEXT_LENGTH + 1)
        self._batches = []
        for part in np.array_split(rows, -(-count // _ROWS)):
            owner = np.repeat(np.arange(len(part)), CONTEXT_LENGTH + 1)
            tokens = ids[part].astype(np.int64).reshape(-1)
            packed = pack(tokens, owner, len(part) * CONTEXT_LENGTH)
            self._batches.append(to_device(packed, device))
        self._bytes_per_token = sum(len(text.encode()) for text in texts) / len(ids)

    @torch.no_grad()
    def bits_per_byte(self, model: TrainedLM) -> float:
        """Measure without overlap between rows, which gives slightly more than `evaluate` reports."""
        training = model.training
        model.eval()
        nats = 0.0
        for batch in self._batches:
            with autocast(batch.inputs.device):
                loss = cross_entropy(model.packed_logits(batch), batch.targets)
            nats += loss.item() * len(batch.targets)
        model.train(training)
        tokens = sum(len(batch.targets) for batch in self._batches)
        return nats / tokens / math.log(2) / self._bytes_per_token


def autocast(device: torch.device) -> torch.autocast:
    """Return the bfloat16 context of a CUDA device, a disabled one elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def run_stage(
    stage: Stage,
    data: Path,
    output: Path,
    teachers: Sequence[TrainedLM] = (),
    *,
    device: torch.device,
    compiled: bool,
    measurements: int = 10,
    keep: Callable[[TrainedLM], None] | None = None,
) -> TrainedLM:
    """Train one model for the stage's steps or seconds and return the best one measured.

    Args:
        stage: how to train.
        data: folder written by `prepare`.
        output: folder of `log.jsonl`, which is replaced; every measurement appends a line.
        teachers: trained models to learn from.
        device: where to train.
        compiled: whether to use `torch.compile`.
        measurements: of the held-out files, evenly over the progress, the last one at the end.
        keep: called with the model whenever a measurement after half of the progress is the best so far, so that a
            run that is ended early has a result.

    Returns:
        The model in evaluation mode with the weights of the best measurement.
    """
    clock = Clock(stage)
    run = _Run(stage, data, output, device)
    if compiled:
        torch.compiler.reset()
    loss_of = torch.compile(training_loss, dynamic=False) if compiled else training_loss
    run.model.train()
    total = torch.zeros((), device=device)
    since = step = 0
    with ThreadPoolExecutor(1) as sampler, tqdm(total=measurements, desc=stage.name) as bar:
        coming = sampler.submit(run.sample, 0)
        while (progress := clock.progress(step)) < 1:
            torch.manual_seed(stage.seed * 1_000_003 + step)
            batch = to_device(coming.result(), device)
            coming = sampler.submit(run.sample, step + 1)
            with autocast(device):
                loss = loss_of(run.model, batch, teachers, stage.distill_weight)
            torch.autograd.backward(loss)
            run.optimizer.step(learning_rate(stage, progress))
            total += loss.detach()
            since, step = since + 1, step + 1
            if clock.progress(step) * measurements >= bar.n + 1:
                line = run.measure(step, total.item() / since, clock)
                bar.set_postfix(line)
                bar.update(int(clock.progress(step) * measurements) - bar.n)
                if keep is not None and clock.progress(step) >= 0.5 and run.is_best:
                    keep(run.model)
                total.zero_()
                since = 0
    run.load_best()
    return run.model.eval()


class _Run:
    """Owns the model, the optimizer, the data and the log of a stage."""

    def __init__(self, stage: Stage, data: Path, output: Path, device: torch.device) -> None:
        output.mkdir(parents=True, exist_ok=True)
        vocab_size = len(json.loads((data / "tokenizer.json").read_text())["model"]["vocab"])
        self._stage = stage
        self._log = output / "log.jsonl"
        self._log.unlink(missing_ok=True)
        self._streams = TokenStreams(data, stage.stream_weights)
        self._held_out = HeldOut(data, device)
        self._best = math.inf
        self._best_weights: dict[str, Tensor] = {}
        self.is_best = False
        self.model = TrainedLM(model_config(stage.shape, vocab_size), stage.dropout, device)
        self.model.init_weights(seed=stage.seed)
        self.optimizer = MuonAdamW(
            self.model.named_parameters(), stage.weight_decay, embedding_rate=stage.embedding_rate
        )

    def sample(self, step: int) -> PackedTokens:
        """Sample a step's batch."""
        stage = self._stage
        return self._streams.batch(
            stage.seed,
            step,
            stage.batch_tokens,
            lengths=stage.lengths,
            start_share=stage.start_share,
            split=stage.split,
            infilling_share=stage.infilling_share,
        )

    def measure(self, step: int, loss: float, clock: Clock) -> dict[str, float]:
        """Measure, keep the weights if they are the best, append a line to the log and return it."""
        bits = self._held_out.bits_per_byte(self.model)
        self.is_best = bits < self._best
        if self.is_best:
            self._best = bits
            self._best_weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        line = {
            "step": step,
            "tokens": step * self._stage.batch_tokens,
            "loss": round(loss, 4),
            "held_out_bits_per_byte": round(bits, 4),
            "seconds": round(clock.seconds, 1),
        }
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        return line

    def load_best(self) -> None:
        """Load the weights of the best measurement, if there was one."""
        if self._best_weights:
            self.model.load_state_dict(self._best_weights)
