"""The lessons' loop: what a draft learns, step by step, kept every minute and gone on with.

A draft is taught what the target said. Learning from the words that a target chose is sequence-level knowledge
distillation (Kim and Rush, arXiv:1606.07947); what exactly is asked of a draft is the learner's own (pupil.py,
heads.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch

from ragspec.errors import ConfigError
from ragspec.outputs.private import open_private
from ragspec.training.lessons import Lesson

BATCH = 8  # lessons of a step
WARM = 0.05  # of all steps, in which the rate rises
STATE = "state.pt"
KEEP_EVERY_S = 60.0
KEEPING = 20  # times as long as keeping takes, at least, lie between two

Progress = Callable[[int, int, float], None]  # steps done, of all, loss


class Learner(Protocol):
    """What is taught. model: a torch module. rate: the highest learning rate."""

    model: Any
    rate: float

    def learn(self, batch: Sequence[Lesson], turn: int) -> float:
        """Add a batch's gradients to the parameters' and return its mean loss. turn: the epoch."""

    def agreement(self, lessons: Sequence[Lesson]) -> float:
        """Return the share of the answers' tokens that it guesses, given all before them."""

    def save(self, folder: Path) -> None:
        """Write what `speculation.draft_model` loads."""


def teach(learner: Learner, lessons: Sequence[Lesson], epochs: int, folder: Path, progress: Progress) -> int:
    """Train for some epochs, going on where an earlier call stopped; return the steps of this call.

    progress: called after every step. Raises ConfigError for a state that belongs to another draft or other lessons.
    """
    steps = epochs * -(-len(lessons) // BATCH)
    learnt = [each for each in learner.model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=learner.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    course = _Course(learner.model, optimizer, schedule, _about(learnt, lessons, epochs), folder / STATE)
    done = course.resume()
    learner.model.train()
    kept, took, began = time.monotonic(), 0.0, done
    for number, (turn, batch) in enumerate(_batches(lessons, epochs)):
        if number < done:
            continue
        optimizer.zero_grad()
        loss = learner.learn(batch, turn)
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
        done = number + 1
        progress(done, steps, loss)
        now = time.monotonic()
        if now - kept > max(KEEP_EVERY_S, KEEPING * took):
            course.keep(done)
            kept = time.monotonic()
            took = kept - now
    course.keep(done)
    learner.model.eval()
    return done - began


class _Course:
    """How far a draft has learnt, in a file. about: what tells one course from another."""

    def __init__(self, model: Any, optimizer: Any, schedule: Any, about: list[int], path: Path) -> None:
        self._model = model
        self._parts = {"optimizer": optimizer, "schedule": schedule}
        self._about = about
        self._path = path
        self._device = next(model.parameters()).device

    def keep(self, done: int) -> None:
        """Write the state, whole or not at all."""
        written = self._path.with_name(f".{self._path.name}.written")
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        # of a head, what is the target's does not change
        state["draft"] = {name: each.data for name, each in self._model.named_parameters() if each.requires_grad}
        with open_private(written) as file:
            torch.save(state | {"done": done, "about": self._about}, file)
            file.flush()
            os.fsync(file.fileno())
        written.replace(self._path)

    def resume(self) -> int:
        """Take up the state that was kept; return the steps that were done."""
        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=True, map_location=self._device)
        if state["about"] != self._about:
            raise ConfigError(
                f"{self._path}: belongs to another draft, or to other lessons or epochs; remove it, or choose another "
                "--output"
            )
        self._model.load_state_dict(state["draft"], strict=False)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        return int(state["done"])


def _about(learnt: Sequence[torch.Tensor], lessons: Sequence[Lesson], epochs: int) -> list[int]:
    sizes = [len(learnt), sum(each.numel() for each in learnt)]
    return [epochs, len(lessons), sum(len(lesson.token_ids) for lesson in lessons), *sizes]


def _batches(lessons: Sequence[Lesson], epochs: int) -> Iterator[tuple[int, list[Lesson]]]:
    """Yield each batch with its epoch, always in the same order; lessons of a batch are about as long as each other."""
    for epoch in range(epochs):
        rng = Random(epoch)
        order = sorted(lessons, key=lambda lesson: (len(lesson.token_ids) // 64, rng.random()))
        batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        rng.shuffle(batches)
        yield from ((epoch, batch) for batch in batches)


def _rate(step: int, steps: int) -> float:
    """Return the share of the full learning rate: it rises, then falls as a cosine."""
    rising = max(1, int(WARM * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising))))
