"""A draft cut from its target: a few of its layers, evenly spread, with its own embeddings, norms and head.

It learns to say what the target said, at every place of its answers, and to read: of the prompts one place in four is
learnt in each epoch, another one each time, as they are ten times as long as answers and a model of few layers has lost
its language when it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import ConfigError
from ragspec.models.draft import width_of
from ragspec.training.lessons import Lesson

RATE = 1e-3
EVERY = 4  # of the places of prompts, one in so many is learnt at a time
UNSAID = -100  # torch's label for what is not learnt


class Pupil:
    """A small causal model that is taught. model: as cut_from() returns it. tokenizer, dtype: that it is written with.

    It learns in float32, and is written in its target's dtype, in which it would load with it.
    """

    rate = RATE

    def __init__(self, model: Any, tokenizer: Any = None, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._dtype = dtype

    def learn(self, batch: Sequence[Lesson], turn: int) -> float:
        """Learn the answers, and of the prompts the places that are this epoch's. Lessons are padded at their ends."""
        length = max(len(lesson.token_ids) for lesson in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask, answered = torch.zeros_like(ids), torch.zeros(len(batch), length, dtype=torch.bool)
        for row, lesson in enumerate(batch):
            end = len(lesson.token_ids)
            ids[row, :end] = torch.tensor(lesson.token_ids)
            mask[row, :end] = 1
            answered[row, lesson.prompt_tokens : end] = True
        wanted = (answered[:, 1:].any(0) | (torch.arange(1, length) % EVERY == turn % EVERY)).nonzero()[:, 0]
        labels = ids.masked_fill(mask == 0, UNSAID)  # the head is most of a small model: what it is asked for is learnt
        device = self.model.device
        logits = self.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), logits_to_keep=wanted.to(device)
        ).logits
        aims = labels[:, 1:][:, wanted].to(device)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), aims.flatten(), ignore_index=UNSAID)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @torch.inference_mode()
    def agreement(self, lessons: Sequence[Lesson]) -> float:
        """Return the share of the answers' tokens that are its best guess, given all before them."""
        self.model.eval()
        right = total = 0
        for lesson in lessons:
            ids = torch.tensor([lesson.token_ids], device=self.model.device)
            said = min(len(lesson.token_ids) - lesson.prompt_tokens, ids.shape[1] - 1)
            guesses = self.model(input_ids=ids[:, :-1], logits_to_keep=said).logits[0].argmax(-1)
            right += int((guesses == ids[0, -said:]).sum())
            total += said
        return right / total if total else 0.0

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer. It is of no more use for learning."""
        self.model.to(self._dtype)
        self.model.save_pretrained(folder, safe_serialization=True)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


def spread(layers: int, count: int) -> list[int]:
    """Return `count` of the numbers below `layers`, the first and the last among them.

    >>> spread(30, 3)
    [0, 14, 29]
    """
    return [0] if count == 1 else [i * (layers - 1) // (count - 1) for i in range(count)]


def check_layers(count: int, layers: int) -> None:
    """Raise ConfigError where a target of `layers` layers has no draft of `count`."""
    if not 0 < count < layers:
        raise ConfigError(f"--layers: must be between 1 and {layers - 1}, fewer than the target has")


def cut_from(target: Any, count: int) -> Any:
    """Return a model of `count` layers of `target`, a loaded causal model, with copies of its weights.

    Raises ConfigError where the model's layers cannot be told apart.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    own = target.config.get_text_config()
    layers = own.num_hidden_layers
    check_layers(count, layers)
    kept = spread(layers, count)
    config = type(target.config).from_dict(target.config.to_dict())
    text = config.get_text_config()
    text.num_hidden_layers = count
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(text, key, [value[i] for i in kept])
    try:
        pupil = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = _renumbered(target.state_dict(), kept, layers)
        missing = pupil.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"train-draft: {type(target).__name__} cannot be cut to fewer layers ({error})") from error
    tied = set(getattr(pupil, "_tied_weights_keys", None) or ())
    if missing.unexpected_keys or set(missing.missing_keys) - tied:
        raise ConfigError(f"train-draft: {type(target).__name__} cannot be cut to fewer layers: its weights do not fit")
    ends = target.generation_config  # nothing else of it: transformers would not write some of what it loads
    pupil.generation_config = GenerationConfig(
        bos_token_id=ends.bos_token_id, eos_token_id=ends.eos_token_id, pad_token_id=ends.pad_token_id
    )
    assert width_of(pupil.config) == width_of(target.config)
    return pupil.to(target.device)


def _renumbered(weights: Mapping[str, torch.Tensor], kept: list[int], layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of the layers that are kept, under their new numbers, and of everything else."""
    found = re.compile(r"^(?P<before>.*\.(?:layers|h|blocks)\.)(?P<number>\d+)(?P<after>\..*)$")
    new: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        match = found.match(name)
        if match is None:
            new[name] = value
        elif int(match["number"]) in kept and int(match["number"]) < layers:
            new[f"{match['before']}{kept.index(int(match['number']))}{match['after']}"] = value
    return new
