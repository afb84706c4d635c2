"""EAGLE-3 and DFlash heads on a frozen target, built from the models and losses of vLLM's `speculators`.

A head reads the hidden states of three target layers and drafts the tokens that follow; vLLM runs it. Sources: EAGLE-3,
arXiv:2503.01840; DFlash, arXiv:2602.06036. The package's own trainer needs a GPU, a server and all hidden states on
disk; here the target's forward runs beside the head's, so nothing is stored and a CPU will do. Limit: targets whose
decoder ends in a norm called `norm`, as speculators requires too.
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
from ragspec.training.examples import Example

KINDS = ("eagle3", "dflash")
LEARNING_RATE = 4e-4
ANCHORS = 128  # most positions of an answer at which DFlash drafts a block
MAX_LOGIT_ERROR = 1e-2  # of the teacher's logits against the target's, relative to their size
CHECK_TOKENS = 32  # tokens on which that is checked
SEED = 0  # of a head's initial weights
VOCABULARY = 32_000  # most tokens that a head can draft: its output layer costs most
LAYERS_READ = 3  # target layers whose hidden states a head reads


def check_head(kind: str, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if heads cannot be trained here, or not for this target."""
    if importlib.util.find_spec("speculators") is None:
        raise ConfigError(
            f'--method {kind}: needs the speculators package (pip install "ragspec[heads]"), which is not installed; '
            "--method draft_model needs nothing more"
        )
    if checkpoint.source.revision not in (None, "main"):
        raise ConfigError(f"--method {kind}: heads cannot use a model revision; set `model` to a local folder")
    layers = checkpoint.config.get_text_config().num_hidden_layers
    if layers < LAYERS_READ:
        raise ConfigError(f"--method {kind}: the target has {layers} layers, and a head reads {LAYERS_READ}")


class Head:
    """A head to train.

    Args:
        kind: One of KINDS.
        checkpoint: The target's.
        target: The loaded target.
        layers: Of the head; None: the default of its kind.
        examples: To choose the head's vocabulary by, and to check the teacher on.

    Raises:
        ConfigError: If the target cannot have such a head.
    """

    rate = LEARNING_RATE

    def __init__(
        self, kind: str, checkpoint: Checkpoint, target: Any, layers: int | None, examples: Sequence[Example]
    ) -> None:
        self._kind = kind
        self._refusal = f"--method {kind}: {type(target).__name__} cannot have such a head: "
        self._target = target.eval()
        self._norm = getattr(target.get_decoder(), "norm", None)
        if self._norm is None:
            raise ConfigError(f"{self._refusal}its final norm is not named `norm`")
        self._layers = read_layers(target.config.get_text_config().num_hidden_layers)
        try:
            self.model, self._forward_args = self._build(checkpoint, layers, examples)
        except (OSError, ValueError, KeyError) as error:  # raised by speculators for unknown targets
            raise ConfigError(f"{self._refusal}{flat(error, 300)}") from error
        self.model.to(target.device)
        self._check_teacher(examples)

    def learn(self, batch: Sequence[Example], turn: int) -> float:
        """Add the gradients of a batch, one example at a time, with the loss of the head's kind."""
        total = 0.0
        for example in batch:
            loss, _ = self.forward(example, turn)
            (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total / len(batch)

    @torch.no_grad()
    def agreement(self, examples: Sequence[Example]) -> float:
        """Return the share of the target's choices that the head guesses, where it drafts.

        For EAGLE-3 that counts the first token of each draft, for DFlash all tokens of a block.
        """
        self.model.eval()
        name = "full_acc_0" if self._kind == "eagle3" else "full_acc"
        right = total = 0.0
        for example in examples:
            _, found = self.forward(example, 0)
            right, total = right + float(found[f"{name}_sum"]), total + float(found[f"{name}_total"])
        return right / total if total else 0.0

    def save(self, folder: Path) -> None:
        """Write the head in the layout of speculators, which vLLM loads, without the code that is saved beside it."""
        self.model.save_pretrained(folder, safe_serialization=True)
        path = folder / "config.json"
        config = {key: value for key, value in json.loads(path.read_text()).items() if key != "auto_map"}
        path.write_text(json.dumps(config, indent=2))
        for code in folder.glob("*.py"):
            code.unlink()

    def forward(self, example: Example, turn: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of an example and the metrics of the kind. turn: seeds where blocks of DFlash begin."""
        ids = example.token_ids
        answer_tokens = min(len(ids) - example.prompt_tokens, len(ids) - 1)
        states, last = self.read(ids)
        tensors = {
            "input_ids": torch.tensor(ids),
            "hidden_states": states,
            "verifier_last_hidden_states": last,
            "loss_mask": torch.arange(len(ids)) >= len(ids) - answer_tokens,
            "position_ids": torch.arange(len(ids)),
            "lengths": torch.tensor([len(ids)]),
        }
        given, beyond = dict(self._forward_args), 0
        if self._kind == "eagle3":
            from speculators.models.eagle3.data import shift_batch

            tensors = shift_batch(tensors)
        else:
            given["max_anchors"] = min(answer_tokens, ANCHORS)
            beyond = self.model.config.block_size
        del tensors["lengths"]
        inputs = {name: _pad(value, beyond)[None].to(self._target.device) for name, value in tensors.items()}
        texts = torch.zeros_like(inputs["input_ids"])
        texts[:, texts.shape[1] - beyond :] = -1  # padding belongs to no document
        with torch.random.fork_rng():
            torch.manual_seed(turn)  # a resumed training is the same
            _, loss, found = self.model(**inputs, document_ids=texts, **given)
        return loss, found

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's hidden states: (tokens, 3 * size) of the layers read, and (tokens, size) of the last."""
        with _inputs_of(self._norm) as last:
            states = self._target(
                input_ids=torch.tensor([list(ids)], device=self._target.device),
                output_hidden_states=True,
                logits_to_keep=1,
                use_cache=False,
            ).hidden_states
        return torch.cat([states[i][0] for i in self._layers], -1), last[0][0]

    @torch.no_grad()
    def _check_teacher(self, examples: Sequence[Example]) -> None:
        """Raise ConfigError if the teacher's logits are not the target's."""
        ids = [token for example in examples for token in example.token_ids][:CHECK_TOKENS]
        if not ids:
            return
        own = self._target(input_ids=torch.tensor([ids], device=self._target.device), use_cache=False).logits[0].float()
        if self.model.t2d is not None:
            own = own[:, self.model.t2d]
        _, last = self.read(ids)
        taught = self.model.verifier_lm_head(self.model.verifier_norm(last)).float()
        away = float((torch.log_softmax(taught, -1) - torch.log_softmax(own, -1)).abs().max() / own.abs().max())
        if not away < MAX_LOGIT_ERROR:
            raise ConfigError(f"{self._refusal}speculators computes different logits from the model ({away:.1%} apart)")

    def _build(
        self, checkpoint: Checkpoint, layers: int | None, examples: Sequence[Example]
    ) -> tuple[Any, dict[str, Any]]:
        """Return a head of random weights with the target's embeddings, and extra arguments of its forward."""
        from loguru import logger
        from speculators.model import SpeculatorModel
        from speculators.train.cli import build_draft_model
        from speculators.train.config import TrainConfig
        from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

        logger.disable("speculators")
        settings: dict[str, Any] = {
            "verifier_name_or_path": checkpoint.source.path,
            "speculator_type": self._kind,
            "target_layer_ids": self._layers,
            "draft_attn_impl": "sdpa",
            "loss_implementation": "eager",  # the alternative is written in Triton
            "trust_remote_code": checkpoint.trust_remote_code,
        }
        if layers is not None:
            settings["num_layers"] = layers
        config = TrainConfig.from_sources(cli=settings, argv=[])
        given = Namespace(**config.flatten())
        # no sliding window: a head that reads half a prompt does not know the passages. A DFlash block then attends
        # to all of itself, which vLLM has to be told.
        given.full_attention_indices = list(range(given.num_layers))
        given.sliding_window_non_causal = True
        width = checkpoint.config.get_text_config().vocab_size
        vocabulary = min(width, VOCABULARY)
        to_target = to_draft = None
        if vocabulary < width:
            answered = Counter(token for example in examples for token in example.token_ids[example.prompt_tokens :])
            read = Counter(token for example in examples for token in example.token_ids)
            # answer tokens come first
            frequencies = {token: read[token] + answered[token] * read.total() for token in read}
            to_target, to_draft = build_vocab_mappings_from_distribution(frequencies, vocabulary, width)
        kind = SpeculatorModel.registry[self._kind]
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = build_draft_model(given, kind, to_draft, to_target, vocabulary)
        return model, kind.get_trainer_kwargs(**vars(given))[0]


def read_layers(count: int) -> list[int]:
    """Return the layers whose input a head reads: an early, a middle and a late one.

    >>> read_layers(30), read_layers(4)
    ([2, 15, 27], [1, 2, 3])
    """
    return [2, count // 2, count - 3] if count > 6 else [count - 3, count - 2, count - 1]


def _pad(value: torch.Tensor, count: int) -> torch.Tensor:
    """Return (tokens, ...) padded with `count` zeros at the end."""
    return torch.cat([value, value.new_zeros(count, *value.shape[1:])])


@contextmanager
def _inputs_of(module: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the inputs of `module` while the context is open."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()
