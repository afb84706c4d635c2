"""EAGLE-3 and DFlash heads on a target that stays as it is, made of the models and losses of vLLM's `speculators`.

A head reads what three of the target's layers say of a text and drafts the words that follow; vLLM runs it. Sources:
EAGLE-3, arXiv:2503.01840; DFlash, arXiv:2602.06036. The package's own trainer wants a GPU, a server beside it and every
hidden state on disk; here the target's forward runs beside the head's, so that nothing is stored and a CPU will do.
Limit: targets whose decoder ends in a norm called `norm`, as speculators asks too.
"""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import ConfigError, flat
from ragspec.runners.huggingface.checkpoint import Checkpoint
from ragspec.training.lessons import Lesson

KINDS = ("eagle3", "dflash")
RATE = 4e-4
ANCHORS = 128  # places of an answer from which a block of DFlash is drafted at a time, at most
ALIKE = 1e-2  # how far a teacher's logits may be from the target's, of their size
TRIED = 32  # tokens of a text on which that is checked
SEED = 0  # of a head's first weights
VOCABULARY = 32_000  # words that a head may draft, at most: its own head is what costs most
READ = 3  # layers of the target that it reads


def check_head(kind: str, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where heads cannot be trained, or not for this target."""
    if importlib.util.find_spec("speculators") is None:
        raise ConfigError(
            f"--method {kind}: needs the speculators package (pip install 'ragspec[heads]'), which is not installed; "
            "--method draft_model needs nothing more"
        )
    if checkpoint.source.revision not in (None, "main"):
        raise ConfigError(f"--method {kind}: a head's target has no revision; give its folder as `model`")
    layers = checkpoint.config.get_text_config().num_hidden_layers
    if layers < READ:
        raise ConfigError(f"--method {kind}: the target has {layers} layers, and a head reads {READ}")


class Head:
    """A head that is taught. target: `checkpoint` loaded. layers: of the head, None: as many as its kind has."""

    rate = RATE

    def __init__(
        self, kind: str, checkpoint: Checkpoint, target: Any, layers: int | None, lessons: Sequence[Lesson]
    ) -> None:
        self._kind = kind
        self._unfit = f"--method {kind}: {type(target).__name__} cannot have such a head: "
        self._target = target.eval()
        self._norm = getattr(target.get_decoder(), "norm", None)
        if self._norm is None:
            raise ConfigError(f"{self._unfit}its final norm has another name than `norm`")
        self._layers = read_layers(target.config.get_text_config().num_hidden_layers)
        try:
            self.model, self._given = self._build(checkpoint, layers, lessons)
        except (OSError, ValueError, KeyError) as error:  # what speculators raises for targets that it does not know
            raise ConfigError(f"{self._unfit}{flat(error, 300)}") from error
        self.model.to(target.device)
        self._check_teacher(lessons)

    def learn(self, batch: Sequence[Lesson], turn: int) -> float:
        """Learn the answers, a lesson at a time, with the loss of its kind."""
        total = 0.0
        for lesson in batch:
            loss, _ = self.forward(lesson, turn)
            (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total / len(batch)

    @torch.no_grad()
    def agreement(self, lessons: Sequence[Lesson]) -> float:
        """Return the share of what the target would say, of the words that are drafted, that it guesses.

        Of EAGLE-3 that is the first token of each draft, of DFlash all of a block.
        """
        self.model.eval()
        name = "full_acc_0" if self._kind == "eagle3" else "full_acc"
        right = total = 0.0
        for lesson in lessons:
            _, found = self.forward(lesson, 0)
            right, total = right + float(found[f"{name}_sum"]), total + float(found[f"{name}_total"])
        return right / total if total else 0.0

    def save(self, folder: Path) -> None:
        """Write it in the layout of speculators, which vLLM loads, without the code that is put beside it."""
        self.model.save_pretrained(folder, safe_serialization=True)
        path = folder / "config.json"
        config = {key: value for key, value in json.loads(path.read_text()).items() if key != "auto_map"}
        path.write_text(json.dumps(config, indent=2))
        for code in folder.glob("*.py"):
            code.unlink()

    def forward(self, lesson: Lesson, turn: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a lesson, and what its kind measures. turn: decides where blocks of DFlash begin."""
        ids = lesson.token_ids
        said = min(len(ids) - lesson.prompt_tokens, len(ids) - 1)
        states, last = self.read(ids)
        example = {
            "input_ids": torch.tensor(ids),
            "hidden_states": states,
            "verifier_last_hidden_states": last,
            "loss_mask": torch.arange(len(ids)) >= len(ids) - said,
            "position_ids": torch.arange(len(ids)),
            "lengths": torch.tensor([len(ids)]),
        }
        given, beyond = dict(self._given), 0
        if self._kind == "eagle3":
            from speculators.models.eagle3.data import shift_batch

            example = shift_batch(example)
        else:
            given["max_anchors"] = min(said, ANCHORS)
            beyond = self.model.config.block_size
        del example["lengths"]
        inputs = {name: _longer(value, beyond)[None].to(self._target.device) for name, value in example.items()}
        texts = torch.zeros_like(inputs["input_ids"])
        texts[:, texts.shape[1] - beyond :] = -1  # belongs to none
        with torch.random.fork_rng():
            torch.manual_seed(turn)  # a course that is gone on with is the same
            _, loss, found = self.model(**inputs, document_ids=texts, **given)
        return loss, found

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the target's layers say of a text: (tokens, 3 * size), and the last one's, (tokens, size)."""
        with _before(self._norm) as last:
            states = self._target(
                input_ids=torch.tensor([list(ids)], device=self._target.device),
                output_hidden_states=True,
                logits_to_keep=1,
                use_cache=False,
            ).hidden_states
        return torch.cat([states[i][0] for i in self._layers], -1), last[0][0]

    @torch.no_grad()
    def _check_teacher(self, lessons: Sequence[Lesson]) -> None:
        """Raise ConfigError if what the head is taught is not what the target says."""
        ids = [token for lesson in lessons for token in lesson.token_ids][:TRIED]
        if not ids:
            return
        own = self._target(input_ids=torch.tensor([ids], device=self._target.device), use_cache=False).logits[0].float()
        if self.model.t2d is not None:
            own = own[:, self.model.t2d]
        _, last = self.read(ids)
        taught = self.model.verifier_lm_head(self.model.verifier_norm(last)).float()
        away = float((torch.log_softmax(taught, -1) - torch.log_softmax(own, -1)).abs().max() / own.abs().max())
        if not away < ALIKE:
            raise ConfigError(f"{self._unfit}speculators computes other logits than the model ({away:.1%} apart)")

    def _build(
        self, checkpoint: Checkpoint, layers: int | None, lessons: Sequence[Lesson]
    ) -> tuple[Any, dict[str, Any]]:
        """Return a head of random weights, with the target's embeddings, and what its forward is given besides."""
        from loguru import logger
        from speculators.model import SpeculatorModel
        from speculators.train.cli import build_draft_model
        from speculators.train.config import TrainConfig
        from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

        logger.disable("speculators")
        asked: dict[str, Any] = {
            "verifier_name_or_path": checkpoint.source.path,
            "speculator_type": self._kind,
            "target_layer_ids": self._layers,
            "draft_attn_impl": "sdpa",
            "loss_implementation": "eager",  # the other one is written in Triton
            "trust_remote_code": checkpoint.trust_remote_code,
        }
        if layers is not None:
            asked["num_layers"] = layers
        config = TrainConfig.from_sources(cli=asked, argv=[])
        given = Namespace(**config.flatten())
        # no window of its own: a head that reads half a prompt does not know the passages. A block of DFlash's then
        # sees itself whole, which vLLM has to be told.
        given.full_attention_indices = list(range(given.num_layers))
        given.sliding_window_non_causal = True
        width = checkpoint.config.get_text_config().vocab_size
        words = min(width, VOCABULARY)
        to_target = to_draft = None
        if words < width:
            said = Counter(token for lesson in lessons for token in lesson.token_ids[lesson.prompt_tokens :])
            read = Counter(token for lesson in lessons for token in lesson.token_ids)
            often = {token: read[token] + said[token] * read.total() for token in read}  # what is said comes first
            to_target, to_draft = build_vocab_mappings_from_distribution(often, words, width)
        kind = SpeculatorModel.registry[self._kind]
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = build_draft_model(given, kind, to_draft, to_target, words)
        return model, kind.get_trainer_kwargs(**vars(given))[0]


def read_layers(count: int) -> list[int]:
    """Return the layers before which a head reads the target's state: an early, a middle and a late one.

    >>> read_layers(30), read_layers(4)
    ([2, 15, 27], [1, 2, 3])
    """
    return [2, count // 2, count - 3] if count > 6 else [count - 3, count - 2, count - 1]


def _longer(value: torch.Tensor, count: int) -> torch.Tensor:
    """Return (tokens, ...) with so many zeros behind."""
    return torch.cat([value, value.new_zeros(count, *value.shape[1:])])


@contextmanager
def _before(module: Any) -> Iterator[list[torch.Tensor]]:
    """Collect what `module` is given while the context is open."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()
