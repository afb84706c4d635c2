"""Train a draft: a student cut from its target, and the training loop, which resumes.

The student keeps a few evenly spread layers of the target, with its embeddings, norms and head. It learns the target's
answers at every position, and of prompts one position in four per epoch, another one each time: prompts are ten times
as long as answers, and a model cut to few layers has to learn language again. Training on the target's own text is
sequence-level knowledge distillation (Kim and Rush, arXiv:1606.07947).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch

from ragspec.errors import ConfigError
from ragspec.host.files import replacing
from ragspec.models.draft import width_of
from ragspec.training.examples import Example

LEARNING_RATE = 1e-3
PROMPT_STRIDE = 4  # one prompt position in this many is learned per epoch
IGNORE_INDEX = -100  # torch's label for positions without loss


class Student:
    """A small causal model to train. model: from cut_student(). tokenizer, dtype: to save it with.

    It trains in float32 and is saved in its target's dtype, with which it would load.
    """

    rate = LEARNING_RATE

    def __init__(self, model: Any, tokenizer: Any = None, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._dtype = dtype

    def learn(self, batch: Sequence[Example], turn: int) -> float:
        """Add the gradients for the answers and this epoch's prompt positions. Examples are padded at the end."""
        length = max(len(example.token_ids) for example in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask, answered = torch.zeros_like(ids), torch.zeros(len(batch), length, dtype=torch.bool)
        for row, example in enumerate(batch):
            end = len(example.token_ids)
            ids[row, :end] = torch.tensor(example.token_ids)
            mask[row, :end] = 1
            answered[row, example.prompt_tokens : end] = True
        due = torch.arange(1, length) % PROMPT_STRIDE == turn % PROMPT_STRIDE
        wanted = (answered[:, 1:].any(0) | due).nonzero()[:, 0]
        # only the wanted positions get logits: the output layer is most of a small model
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        device = self.model.device
        logits = self.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), logits_to_keep=wanted.to(device)
        ).logits
        targets = labels[:, 1:][:, wanted].to(device)
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @torch.inference_mode()
    def agreement(self, examples: Sequence[Example]) -> float:
        """Return the share of answer tokens that are the model's best guess, given all tokens before them."""
        self.model.eval()
        right = total = 0
        for example in examples:
            ids = torch.tensor([example.token_ids], device=self.model.device)
            answer_tokens = min(len(example.token_ids) - example.prompt_tokens, ids.shape[1] - 1)
            guesses = self.model(input_ids=ids[:, :-1], logits_to_keep=answer_tokens).logits[0].argmax(-1)
            right += int((guesses == ids[0, -answer_tokens:]).sum())
            total += answer_tokens
        return right / total if total else 0.0

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer. The model cannot be trained further afterwards."""
        self.model.to(self._dtype)
        self.model.save_pretrained(folder, safe_serialization=True)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


def spread_layers(layers: int, count: int) -> list[int]:
    """Return `count` of the layers below `layers`, including the first and the last.

    >>> spread_layers(30, 3)
    [0, 14, 29]
    """
    return [0] if count == 1 else [i * (layers - 1) // (count - 1) for i in range(count)]


def check_layers(count: int, layers: int) -> None:
    """Raise ConfigError if a target of `layers` layers cannot have a draft of `count`."""
    if not 0 < count < layers:
        raise ConfigError(f"--layers: must be between 1 and {layers - 1}, fewer than the target has")


def cut_student(target: Any, count: int) -> Any:
    """Return a model of `count` layers of `target`, a loaded causal model, with copies of its weights.

    Raises ConfigError if the model's layers cannot be identified.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    own = target.config.get_text_config()
    layers = own.num_hidden_layers
    check_layers(count, layers)
    kept = spread_layers(layers, count)
    config = type(target.config).from_dict(target.config.to_dict())
    text = config.get_text_config()
    text.num_hidden_layers = count
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(text, key, [value[i] for i in kept])
    try:
        student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = _renumber(target.state_dict(), kept, layers)
        missing = student.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"train-draft: {type(target).__name__} cannot be reduced to fewer layers ({error})"
        ) from error
    tied = set(getattr(student, "_tied_weights_keys", None) or ())
    if missing.unexpected_keys or set(missing.missing_keys) - tied:
        raise ConfigError(
            f"train-draft: {type(target).__name__} cannot be reduced to fewer layers: its weights do not match"
        )
    # only the token ids: transformers refuses to save some other settings that it loads
    ends = target.generation_config
    student.generation_config = GenerationConfig(
        bos_token_id=ends.bos_token_id, eos_token_id=ends.eos_token_id, pad_token_id=ends.pad_token_id
    )
    assert width_of(student.config) == width_of(target.config)
    return student.to(target.device)


def _renumber(weights: Mapping[str, torch.Tensor], kept: list[int], layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of the kept layers under their new numbers, and all other weights."""
    found = re.compile(r"^(?P<before>.*\.(?:layers|h|blocks)\.)(?P<number>\d+)(?P<after>\..*)$")
    new: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        match = found.match(name)
        if match is None:
            new[name] = value
        elif int(match["number"]) in kept and int(match["number"]) < layers:
            new[f"{match['before']}{kept.index(int(match['number']))}{match['after']}"] = value
    return new


# -- training loop ---------------------------------------------------------------------------------
BATCH = 8  # examples per step
WARMUP = 0.05  # share of the steps in which the learning rate rises
STATE = "state.pt"
KEEP_EVERY_S = 60.0
KEEPING = 20  # the time between two saves is at least this many times the time of a save

Progress = Callable[[int, int, float], None]  # steps done, total steps, loss


class Trainable(Protocol):
    """A draft to train. model: a torch module. rate: the peak learning rate."""

    model: Any
    rate: float

    def learn(self, batch: Sequence[Example], turn: int) -> float:
        """Add a batch's gradients to the parameters and return its mean loss. turn: the epoch."""

    def agreement(self, examples: Sequence[Example]) -> float:
        """Return the share of answer tokens that the draft guesses, given all tokens before them."""

    def save(self, folder: Path) -> None:
        """Write what `speculation.draft_model` loads."""


def distill(learner: Trainable, examples: Sequence[Example], epochs: int, folder: Path, progress: Progress) -> int:
    """Train for some epochs, resuming an earlier call; return the steps of this call.

    progress: called after every step. Raises ConfigError for a saved state of another draft or other examples.
    """
    steps = epochs * -(-len(examples) // BATCH)
    parameters = [each for each in learner.model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learner.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    state = _TrainingState(learner.model, optimizer, schedule, _about(parameters, examples, epochs), folder / STATE)
    done = state.resume()
    learner.model.train()
    kept, took, began = time.monotonic(), 0.0, done
    for number, (turn, batch) in enumerate(_batches(examples, epochs)):
        if number < done:
            continue
        optimizer.zero_grad()
        loss = learner.learn(batch, turn)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        done = number + 1
        progress(done, steps, loss)
        now = time.monotonic()
        if now - kept > max(KEEP_EVERY_S, KEEPING * took):
            state.keep(done)
            kept = time.monotonic()
            took = kept - now
    state.keep(done)
    learner.model.eval()
    return done - began


class _TrainingState:
    """The training state in a file. about: identifies the training; another one is not resumed."""

    def __init__(self, model: Any, optimizer: Any, schedule: Any, about: list[int], path: Path) -> None:
        self._model = model
        self._parts = {"optimizer": optimizer, "schedule": schedule}
        self._about = about
        self._path = path
        self._device = next(model.parameters()).device

    def keep(self, done: int) -> None:
        """Write the state atomically."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        # the target's frozen weights in a head do not change
        state["draft"] = {name: each.data for name, each in self._model.named_parameters() if each.requires_grad}
        with replacing(self._path) as file:
            torch.save(state | {"done": done, "about": self._about}, file)

    def resume(self) -> int:
        """Load the saved state; return the steps done."""
        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=True, map_location=self._device)
        if state["about"] != self._about:
            raise ConfigError(
                f"{self._path}: was saved by a run with another draft, other records or other epochs; delete it, or "
                "choose another --output"
            )
        self._model.load_state_dict(state["draft"], strict=False)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        return int(state["done"])


def _about(parameters: Sequence[torch.Tensor], examples: Sequence[Example], epochs: int) -> list[int]:
    sizes = [len(parameters), sum(each.numel() for each in parameters)]
    return [epochs, len(examples), sum(len(example.token_ids) for example in examples), *sizes]


def _batches(examples: Sequence[Example], epochs: int) -> Iterator[tuple[int, list[Example]]]:
    """Yield each batch with its epoch, in a reproducible order; examples of a batch have similar lengths."""
    for epoch in range(epochs):
        rng = Random(epoch)
        order = sorted(examples, key=lambda example: (len(example.token_ids) // 64, rng.random()))
        batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        rng.shuffle(batches)
        yield from ((epoch, batch) for batch in batches)


def _rate(step: int, steps: int) -> float:
    """Return the share of the full learning rate: it rises, then falls as a cosine."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))
