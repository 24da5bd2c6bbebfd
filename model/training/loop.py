"""Trains one model for a fixed number of steps; an interrupted run can be resumed."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from model.checkpoint.config import ModelConfig
from model.network.decoder import DecoderLM
from model.training.network import TrainedLM, cross_entropy, model_logits, training_loss
from model.training.optimizer import MuonAdamW
from model.training.prepare import CONTEXT_LENGTH, read_held_out
from model.training.streams import TokenStreams
from model.training.tokenization import END_OF_TEXT_ID, TURN_END_ID, encode_documents

STATE_FILE = "state.pt"


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
        name: of the progress bar and the checkpoint.
        steps: optimizer updates.
        batch_tokens: tokens per update; a multiple of every length.
        lengths: row lengths in tokens; steps alternate between them.
        learning_rate: peak, after `warmup_share` of the steps; then it falls linearly to zero.
        distill_weight: share of the teachers' term in the loss.
        start_share, split, infilling_share: as in `TokenStreams.batch`.
        stream_weights: share of rows from each of `prepare.STREAMS`.
    """

    name: str
    shape: Shape
    steps: int
    batch_tokens: int = 65_536
    lengths: tuple[int, ...] = (512, 2048)
    learning_rate: float = 4e-3
    embedding_rate: float = 1.0
    warmup_share: float = 0.04
    weight_decay: float = 0.3
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


def learning_rate(stage: Stage, step: int) -> float:
    """Return the rate of a step: a linear rise, then a linear fall to zero at the end."""
    warmup = max(1, round(stage.warmup_share * stage.steps))
    if step < warmup:
        return stage.learning_rate * (step + 1) / warmup
    return stage.learning_rate * (stage.steps - step) / (stage.steps - warmup)


class HeldOut:
    """The held-out files as rows on the device, for a quick measurement while training."""

    def __init__(self, data: Path, device: torch.device) -> None:
        texts = [file.text for file in read_held_out(data)]
        tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        ids, _ = encode_documents(tokenizer, texts)
        count = (len(ids) - 1) // CONTEXT_LENGTH
        if count == 0:
            raise ValueError(
                f"{len(ids)} held-out tokens in {data}, more than {CONTEXT_LENGTH} needed"
            )
        index = torch.arange(count)[:, None] * CONTEXT_LENGTH + torch.arange(CONTEXT_LENGTH + 1)
        self._rows = torch.from_numpy(ids.astype("int64"))[index].to(device)
        self._bytes_per_token = sum(len(text.encode()) for text in texts) / len(ids)

    @torch.no_grad()
    def bits_per_byte(self, model: DecoderLM) -> float:
        """Measure without overlap between rows, which gives slightly more than `evaluate` reports."""
        training = model.training
        model.eval()
        losses: list[Tensor] = []
        for rows in torch.split(self._rows, 16):
            with autocast(rows.device):
                losses.append(cross_entropy(model_logits(model, rows[:, :-1]), rows[:, 1:]))
        model.train(training)
        nats = torch.stack(losses).mean().item()
        return nats / math.log(2) / self._bytes_per_token


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
    save_every: int = 500,
    stop_after: int | None = None,
) -> TrainedLM:
    """Train one model, or continue from the state in `output`.

    Args:
        stage: how to train.
        data: folder written by `prepare`.
        output: folder of the state and of `log.jsonl`.
        teachers: trained models to learn from.
        device: where to train.
        compiled: whether to use `torch.compile`.
        save_every: steps between states; a line of `log.jsonl` is written as often.
        stop_after: return after this step, as after an interruption.

    Returns:
        The trained model in evaluation mode.

    Raises:
        ValueError: `output` holds a state of another stage.
    """
    run = _Run(stage, data, output, device)
    first = run.restore()
    if compiled:
        torch.compiler.reset()
    loss_of = torch.compile(training_loss, dynamic=False) if compiled else training_loss
    run.model.train()
    total = torch.zeros((), device=device)
    since = 0
    bar = tqdm(range(first, stage.steps), desc=stage.name, initial=first, total=stage.steps)
    for step in bar:
        torch.manual_seed(stage.seed * 1_000_003 + step)
        rows = run.rows(step)
        with autocast(device):
            loss = loss_of(run.model, rows, teachers, stage.distill_weight)
        torch.autograd.backward(loss)
        run.optimizer.step(learning_rate(stage, step))
        total += loss.detach()
        since += 1
        done = step + 1
        if done % save_every == 0 or done in (stage.steps, stop_after):
            bar.set_postfix(run.record(done, total.item() / since))
            run.save(done)
            total.zero_()
            since = 0
        if done == stop_after:
            break
    return run.model.eval()


class _Run:
    """Owns the model, the optimizer, the data and the files of a stage."""

    def __init__(self, stage: Stage, data: Path, output: Path, device: torch.device) -> None:
        output.mkdir(parents=True, exist_ok=True)
        vocab_size = len(json.loads((data / "tokenizer.json").read_text())["model"]["vocab"])
        self._stage = stage
        self._state = output / STATE_FILE
        self._log = output / "log.jsonl"
        self._began = time.monotonic()
        self._streams = TokenStreams(data, device, stage.stream_weights)
        self._held_out = HeldOut(data, device)
        self.model = TrainedLM(model_config(stage.shape, vocab_size), stage.dropout, device)
        self.model.init_weights(seed=stage.seed)
        self.optimizer = MuonAdamW(
            self.model.named_parameters(), stage.weight_decay, embedding_rate=stage.embedding_rate
        )

    def rows(self, step: int) -> Tensor:
        """Sample a step's rows, int64 [R, L + 1]."""
        stage = self._stage
        length = stage.lengths[step % len(stage.lengths)]
        return self._streams.batch(
            stage.seed,
            step,
            stage.batch_tokens // length,
            length,
            start_share=stage.start_share,
            split=stage.split,
            infilling_share=stage.infilling_share,
        )

    def record(self, step: int, loss: float) -> dict[str, float]:
        """Measure, append a line to the log and return it."""
        line = {
            "step": step,
            "loss": round(loss, 4),
            "held_out_bits_per_byte": round(self._held_out.bits_per_byte(self.model), 4),
            "seconds": round(time.monotonic() - self._began, 1),
        }
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        return line

    def save(self, step: int) -> None:
        """Write the state after `step` steps, atomically."""
        state = {
            "stage": dataclasses.asdict(self._stage),
            "step": step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        temporary = self._state.with_suffix(".partial")
        torch.save(state, temporary)
        temporary.replace(self._state)

    def restore(self) -> int:
        """Load the state if there is one; returns the number of completed steps."""
        if not self._state.exists():
            return 0
        state = torch.load(
            self._state, map_location=self.model.embed_tokens.device, weights_only=True
        )
        if state["stage"] != dataclasses.asdict(self._stage):
            raise ValueError(
                f"{self._state} belongs to a stage with other settings: {state['stage']}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
