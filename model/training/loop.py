"""Trains one model for a number of steps or of seconds, over several processes if need be, and keeps its best weights.

A process that must end before its stage does leaves `state.pt`, from which the next one continues with the same batches
and the same dropout.
"""

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

STATE_FILE = "state.pt"
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
        seconds: most time, over all processes, without the first step of each; 0 for as much as `steps` need.
        batch_tokens: tokens per update.
        lengths: as in `TokenStreams.batch`.
        learning_rate: peak, after `warmup_share` of the progress; then it falls linearly to zero.
        distill_weight: share of the teachers' term in the loss.
        start_share, split, infilling_share: as in `TokenStreams.batch`.
        stream_weights: share of tokens from each of `prepare.STREAMS`.
        measurements: of the held-out files, evenly over the progress, the last one at the end.
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
    measurements: int = 10
    seed: int = 0


def model_config(shape: Shape, vocab_size: int) -> ModelConfig:
    """Return the Llama configuration of a shape."""
    return ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "vocab_size": vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "head_dim": 64,
            "max_position_embeddings": CONTEXT_LENGTH,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "hidden_act": "silu",
            "rope_theta": 10_000.0,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": [END_OF_TEXT_ID, TURN_END_ID],
            "torch_dtype": "bfloat16",
        }
    )


def learning_rate(stage: Stage, progress: float) -> float:
    """Return the rate at a progress in [0, 1]: a linear rise, then a linear fall to zero at the end."""
    if progress < stage.warmup_share:
        return stage.learning_rate * max(progress, 1e-3) / stage.warmup_share
    return stage.learning_rate * max(0.0, 1 - progress) / (1 - stage.warmup_share)


class Clock:
    """The progress of a stage, by steps or by time, whichever is further.

    Time does not count before the end of a process's first step, in which kernels are compiled.

    Args:
        stage: the stage.
        first_step: of this process.
        trained: seconds that counted in earlier processes.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        stage: Stage,
        first_step: int = 0,
        trained: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not stage.steps and not stage.seconds:
            raise ValueError(f"the stage {stage.name} has neither steps nor seconds")
        self._stage, self._first_step, self._now = stage, first_step, now
        self._trained = trained
        self._compiled: float | None = None

    @property
    def trained(self) -> float:
        """Seconds that counted, of all processes."""
        return self._trained + (0.0 if self._compiled is None else self._now() - self._compiled)

    def progress(self, step: int) -> float:
        """Return the progress before a step, in [0, 1]; 1 when the stage is over."""
        if step > self._first_step and self._compiled is None:
            self._compiled = self._now()
        share = step / self._stage.steps if self._stage.steps else 0.0
        if self._stage.seconds:
            share = max(share, self.trained / self._stage.seconds)
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
    keep: Callable[[TrainedLM], None] | None = None,
    deadline: float = math.inf,
) -> tuple[TrainedLM | None, float]:
    """Train one model for the stage's steps or seconds, from where an earlier process ended.

    Args:
        stage: how to train.
        data: folder written by `prepare`.
        output: folder of the log, to which every measurement adds a line, and of the state.
        teachers: trained models to learn from.
        device: where to train.
        compiled: whether to use `torch.compile`.
        keep: called with the model whenever a measurement after half of the progress is the best so far, so that a
            run that is ended early has a result.
        deadline: `time.monotonic()` at which the process stops training, after a step at least.

    Returns:
        The model in evaluation mode with the weights of the best measurement, or None if the deadline came first; and
        the seconds that all processes have spent on the stage.

    Raises:
        ValueError: the state is that of another stage.
    """
    began = time.monotonic()
    run = _Run(stage, data, output, device)
    first = step = run.step
    clock = Clock(stage, first, run.trained)
    if compiled:
        torch.compiler.reset()
    loss_of = torch.compile(training_loss, dynamic=False) if compiled else training_loss
    run.model.train()
    done = run.measured
    with (
        ThreadPoolExecutor(1) as sampler,
        tqdm(total=stage.measurements, desc=stage.name, initial=done) as bar,
    ):
        coming = sampler.submit(run.sample, step)
        while (progress := clock.progress(step)) < 1:
            if step > first and time.monotonic() > deadline:
                spent = run.save(step, done, clock.trained, time.monotonic() - began)
                return None, spent
            torch.manual_seed(stage.seed * 1_000_003 + step)
            batch = to_device(coming.result(), device)
            coming = sampler.submit(run.sample, step + 1)
            with autocast(device):
                loss = loss_of(run.model, batch, teachers, stage.distill_weight)
            torch.autograd.backward(loss)
            run.optimizer.step(learning_rate(stage, progress))
            run.add_loss(loss)
            step += 1
            progress = clock.progress(step)
            if progress * stage.measurements >= done + 1:
                line = run.measure(step, clock)
                done = int(progress * stage.measurements)
                bar.set_postfix(line)
                bar.update(done - bar.n)
                if keep is not None and progress >= 0.5 and run.is_best:
                    keep(run.model)
                if progress < 1:
                    run.save(step, done, clock.trained, time.monotonic() - began)
    return run.finish(), run.spent + time.monotonic() - began


class _Run:
    """Owns the model, the optimizer, the data, the log and the state of a stage.

    Attributes:
        step, measured: of the state: steps done, and measurements.
        trained, spent: seconds of earlier processes: those that the clock counts, and all.
        is_best: whether the last measurement was the best so far.
    """

    def __init__(self, stage: Stage, data: Path, output: Path, device: torch.device) -> None:
        output.mkdir(parents=True, exist_ok=True)
        vocab_size = len(json.loads((data / "tokenizer.json").read_text())["model"]["vocab"])
        self._stage = stage
        self._log, self._state = output / "log.jsonl", output / STATE_FILE
        self._streams = TokenStreams(data, stage.stream_weights)
        self._held_out = HeldOut(data, device)
        self._best = math.inf
        self._best_weights: dict[str, Tensor] = {}
        self._losses = torch.zeros(
            2, device=device
        )  # their sum and number since the last measurement
        self.step = self.measured = 0
        self.trained = self.spent = 0.0
        self.is_best = False
        self.model = TrainedLM(model_config(stage.shape, vocab_size), stage.dropout, device)
        self.model.init_weights(seed=stage.seed)
        self.optimizer = MuonAdamW(
            self.model.named_parameters(), stage.weight_decay, embedding_rate=stage.embedding_rate
        )
        if self._state.exists():
            self._load(device)
        else:
            self._log.unlink(missing_ok=True)

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

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a step to those that the next measurement reports."""
        self._losses += torch.stack((loss.detach().float(), torch.ones_like(self._losses[0])))

    def measure(self, step: int, clock: Clock) -> dict[str, float]:
        """Measure, keep the weights if they are the best, append a line to the log and return it."""
        bits = self._held_out.bits_per_byte(self.model)
        self.is_best = bits < self._best
        if self.is_best:
            self._best = bits
            self._best_weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        total, count = self._losses.tolist()
        self._losses.zero_()
        line = {
            "step": step,
            "tokens": step * self._stage.batch_tokens,
            "loss": round(total / count, 4),
            "held_out_bits_per_byte": round(bits, 4),
            "seconds": round(clock.trained, 1),
        }
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        return line

    def save(self, step: int, measured: int, trained: float, seconds: float) -> float:
        """Write the state; returns the seconds that all processes have spent.

        Args:
            step: steps done.
            measured: measurements done.
            trained: seconds that the clock counts, of all processes.
            seconds: that this process has spent.
        """
        state = {
            "stage": dataclasses.asdict(self._stage),
            "step": step,
            "measured": measured,
            "trained": trained,
            "spent": self.spent + seconds,
            "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self._best,
            "best_weights": self._best_weights,
            "losses": self._losses,
        }
        unfinished = self._state.with_suffix(".new")
        torch.save(state, unfinished)
        unfinished.replace(self._state)
        return self.spent + seconds

    def _load(self, device: torch.device) -> None:
        state = torch.load(self._state, map_location=device, weights_only=True)
        if (theirs := state["stage"]) != (ours := dataclasses.asdict(self._stage)):
            changed = ", ".join(
                f"{key} {theirs.get(key)}" for key in ours if theirs.get(key) != ours[key]
            )
            raise ValueError(
                f"{self._state} is of a run with {changed}; continue that one, or remove the file"
            )
        self.step, self.measured = state["step"], state["measured"]
        self.trained, self.spent = state["trained"], state["spent"]
        self._best, self._best_weights = state["best"], state["best_weights"]
        self._losses.copy_(state["losses"])
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])

    def finish(self) -> TrainedLM:
        """Return the model with the weights of the best measurement, if there was one; remove the state."""
        if self._best_weights:
            self.model.load_state_dict(self._best_weights)
        self._state.unlink(missing_ok=True)
        return self.model.eval()
