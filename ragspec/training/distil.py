"""The lessons' loop: the draft learns to say what the target said, at every place of its answers, and to read.

Of the prompts one place in four is learnt in each epoch, another one each time: they are ten times as long as answers,
and a model of few layers has lost its language when it is cut.

Learning from the words that a target chose is sequence-level knowledge distillation (Kim and Rush, arXiv:1606.07947);
for drafts of a greedy target nothing else is asked of them. What was learnt is kept every minute, and gone on with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from ragspec.errors import ConfigError
from ragspec.training.lessons import Lesson

BATCH = 8  # lessons of a step
RATE = 1e-3
EVERY = 4  # of the places of prompts, one in so many is learnt at a time
WARM = 0.05  # of all steps, in which the rate rises
LONGEST = 1024  # tokens of a lesson; the beginnings of longer ones are cut off
STATE = "state.pt"
KEEP_EVERY_S = 60.0
UNSAID = -100  # torch's label for what is not learnt

Progress = Callable[[int, int, float], None]  # steps done, of all, loss


def teach(pupil: Any, lessons: Sequence[Lesson], epochs: int, folder: Path, progress: Progress) -> int:
    """Train `pupil` for some epochs, going on where an earlier call stopped; return the steps of this call.

    progress: called after every step. Raises ConfigError for a state that belongs to other lessons.
    """
    steps = epochs * -(-len(lessons) // BATCH)
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    done = _load(folder / STATE, pupil, optimizer, schedule, lessons, epochs)
    pupil.train()
    kept, began = time.monotonic(), done
    for number, (turn, batch) in enumerate(_batches(lessons, epochs)):
        if number < done:
            continue
        loss = _loss(pupil, batch, turn)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        done = number + 1
        progress(done, steps, float(loss.detach()))
        if time.monotonic() - kept > KEEP_EVERY_S:
            _save(folder / STATE, pupil, optimizer, schedule, lessons, epochs, done)
            kept = time.monotonic()
    _save(folder / STATE, pupil, optimizer, schedule, lessons, epochs, done)
    pupil.eval()
    return done - began


@torch.inference_mode()
def agreement(pupil: Any, lessons: Sequence[Lesson]) -> float:
    """Return the share of the answers' tokens that are the draft's best guess, given all before them."""
    pupil.eval()
    right = total = 0
    for lesson in lessons:
        ids = torch.tensor([lesson.token_ids[-LONGEST:]], device=pupil.device)
        said = len(lesson.token_ids) - lesson.prompt_tokens
        said = min(said, ids.shape[1] - 1)
        guesses = pupil(input_ids=ids[:, :-1], logits_to_keep=said).logits[0].argmax(-1)
        right += int((guesses == ids[0, -said:]).sum())
        total += said
    return right / total if total else 0.0


def _loss(pupil: Any, batch: Sequence[Lesson], turn: int) -> torch.Tensor:
    """Return the mean cross-entropy of what is learnt in this turn. Lessons are padded at their ends."""
    cut = [(lesson.token_ids[-LONGEST:], len(lesson.token_ids) - lesson.prompt_tokens) for lesson in batch]
    length = max(len(ids) for ids, _ in cut)
    ids = torch.zeros(len(cut), length, dtype=torch.long)
    mask, answered = torch.zeros_like(ids), torch.zeros(len(cut), length, dtype=torch.bool)
    for row, (own, said) in enumerate(cut):
        ids[row, : len(own)] = torch.tensor(own)
        mask[row, : len(own)] = 1
        answered[row, len(own) - min(said, len(own)) : len(own)] = True
    wanted = (answered[:, 1:].any(0) | (torch.arange(1, length) % EVERY == turn % EVERY)).nonzero()[:, 0]
    labels = ids.masked_fill(mask == 0, UNSAID)  # the head is most of a small model: what it is asked for is learnt
    device = pupil.device
    logits = pupil(input_ids=ids.to(device), attention_mask=mask.to(device), logits_to_keep=wanted.to(device)).logits
    aims = labels[:, 1:][:, wanted].to(device)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), aims.flatten(), ignore_index=UNSAID)


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


def _about(lessons: Sequence[Lesson], epochs: int) -> list[int]:
    return [epochs, len(lessons), sum(len(lesson.token_ids) for lesson in lessons)]


def _save(
    path: Path, pupil: Any, optimizer: Any, schedule: Any, lessons: Sequence[Lesson], epochs: int, done: int
) -> None:
    draft = path.with_name(f".{path.name}.draft")
    state = {"pupil": pupil.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save(state | {"done": done, "about": _about(lessons, epochs)}, draft)
    draft.replace(path)


def _load(path: Path, pupil: Any, optimizer: Any, schedule: Any, lessons: Sequence[Lesson], epochs: int) -> int:
    """Go on where the state was kept; return the steps that were done."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location=pupil.device)
    if state["about"] != _about(lessons, epochs):
        raise ConfigError(f"{path}: belongs to other lessons or epochs; remove it, or choose another --output")
    pupil.load_state_dict(state["pupil"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(state["done"])
