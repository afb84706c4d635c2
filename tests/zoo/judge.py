"""Who answers for a config: the engine with the tokens of stock generate(), or stock generate() itself.

    >>> judge(Entry("llama", "llama"))
    Outcome(by='engine', why='', fault='', ties=0)

The engine's answers are compared once more where a grammar shapes them. Limit: greedy answers, no end token, prompts of
the lengths below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ragspec.config.load import build_config
from ragspec.engine import scheduler as sharing
from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.model import loaded as prepared
from ragspec.engine.model.compiled import Compile, CompiledLayers, called_with
from ragspec.engine.model.self_check import differs
from ragspec.engine.native.layer import Builder
from ragspec.engine.proposers.base import NoProposer, Proposer, RowProposer
from ragspec.engine.proposers.early_exit import EarlyExit, LayerSplit
from ragspec.models.compat import tolerance
from ragspec.models.loading import apply_workarounds
from ragspec.models.logits_processors import GenerationRules, GrammarMasks
from ragspec.models.resolve import ModelSource
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Failure, Generation, Request, Sampling
from ragspec.runners.huggingface import runner as huggingface
from ragspec.runners.huggingface.checkpoint import Checkpoint
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.structured.grammars import Grammars
from tests.conftest import SAMPLE, read_jsonl, train_tokenizer
from tests.engine.test_engine import Fixed
from tests.zoo.entry import Entry, Outcome
from tests.zoo.tiny import VOCAB, build

NEW = 20
BEGUN = 8  # of them, with attention that is slow here, where a generation_config asks for nothing
LENGTHS = (90, 9, 57, 75, 23)  # just below each limit of the configs (10, 24, 60), and beyond all of them
SHARED = 64  # tokens that the two longest have in common
ALONE = LENGTHS[:2]  # what one row answers: a short record over the slots of a long one
PLAIN_IDS = range(1, 390)  # the others are a config's end, padding or image
sharing.LEAST = 4  # tokens; the prompts are short
NO_END = 100_000  # an id that no model writes
GRAMMAR = r'start: "{\"answer\": \"" /[A-Z][a-z ,]{40,}/ "\"}"'  # longer than NEW tokens
ROUNDINGS = 64  # of float32, relative to the largest score, within which two are equal


@dataclass(frozen=True)
class Answer:
    """What stock generate() wrote. scores: (NEW, vocab), those by which each token was chosen."""

    token_ids: list[int]
    scores: torch.Tensor

    def ties_with(self, other: Sequence[int]) -> bool:
        """Return whether `other` differs first where both tokens are equally likely."""
        at = next(i for i, (a, b) in enumerate(zip(self.token_ids, other, strict=True)) if a != b)
        step = self.scores[at]
        gap = (step[self.token_ids[at]] - step[other[at]]).abs()
        return bool(gap <= ROUNDINGS * torch.finfo(torch.float32).eps * step[step.isfinite()].abs().max())


class InMemory(Checkpoint):
    """A model that is in memory already."""

    def __init__(self, model: Any) -> None:
        self.source, self.config, self.context_length = ModelSource("zoo", "zoo"), model.config, None
        self.tokenizer = tokenizer()
        self.ends, self.rules = frozenset([NO_END]), GenerationRules(model, frozenset([NO_END]), 0)
        self._model = model

    def load(self) -> Any:
        return self._model


class Loaded(huggingface.Runner):
    """The Hugging Face runner with a model that is in memory already."""

    def __init__(self, model: Any) -> None:
        super().__init__(build_config({"model": "zoo", "sampling": {"max_new_tokens": NEW}}))
        self.use_checkpoint(InMemory(model))


@cache
def tokenizer() -> HFTokenizer:
    """Return a tokenizer of VOCAB tokens."""
    texts = [passage["text"] for record in read_jsonl(SAMPLE) for passage in record["contexts"]]
    return HFTokenizer(train_tokenizer(VOCAB, texts))


@cache
def prompts() -> tuple[list[int], ...]:
    """Return prompts of the sample's own text, one of each length."""
    texts = [" ".join(passage["text"] for passage in record["contexts"]) for record in read_jsonl(SAMPLE)]
    ids = [[i for i in tokenizer().encode(text, special_tokens=False) if i in PLAIN_IDS] for text in texts]
    ids[3] = ids[0][:SHARED] + ids[3]
    return tuple(own[:length] for own, length in zip(ids, LENGTHS, strict=False))


@cache
def grammars() -> Grammars:
    """Return the grammars of that tokenizer, for answers without an end token."""
    return Grammars(tokenizer().inner, VOCAB, ())


def requests(lengths: Sequence[int] = LENGTHS, grammar: str = "", new: int = NEW) -> Iterator[Request]:
    """Yield a request for each prompt of these lengths, each for `new` tokens."""
    for index, prompt in enumerate(prompts()):
        if len(prompt) in lengths:
            yield Request(index, f"r{index}", prompt, Sampling(max_new_tokens=new), grammar=grammar)


def model_of(entry: Entry) -> Any:
    """Return the entry's model, asked for nothing but what the entry says."""
    model = apply_workarounds(build(entry.model_type, entry.settings))
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=NO_END, pad_token_id=0, **entry.generation)
    return model


def judge(entry: Entry, kernels: bool = False) -> Outcome:
    """Return who answers, and with which attention. kernels: as in judge_engine."""
    pristine = model_of(entry)
    right = {request.index: stock_answer(pristine, request) for request in requests()}
    found = judge_engine(entry, pristine, right, kernels)
    if found.by == "stock" or found.fault:
        return found
    tried: dict[str, str] = {}
    for attention in ("sdpa", "flex"):
        fault, tried[attention] = _with_attention(attention, pristine, right, asks=bool(entry.generation))
        if fault:
            return replace(found, fault=f"{fault} ({attention})")
    return replace(found, **tried)


def _with_attention(attention: Any, pristine: Any, right: dict[int, Answer], asks: bool) -> tuple[str, str]:
    """Return the first fault of the engine with this attention, or "", and "exact" or why it is not used."""
    notes: list[str] = []
    model = prepared.prepare(copy.deepcopy(pristine), notes, attention=attention, graphs="emulate")
    if attention == "flex" and model.steps is None:
        return "", next(note.partition("is not used: ")[2] for note in notes if "FlexAttention, which" in note)
    proposer = RowProposer(Fixed(_ragged(right)), 7, None)
    new = NEW if asks else BEGUN  # what a generation_config asks for may depend on the length
    begun = {index: replace(answer, token_ids=answer.token_ids[:new]) for index, answer in right.items()}
    fault, _ = _compare(begun, engine_answers(model, 3, 32, proposer, new=new))
    return fault, "exact"


def judge_engine(entry: Entry, pristine: Any, right: dict[int, Answer], kernels: bool) -> Outcome:
    """Return who answers, and whether the tokens are right in every order and with every draft that is tried.

    pristine: the entry's model. right: stock generate()'s answers. kernels: with layers that our own kernels run, too,
    which takes some seconds more.
    """
    if len({tuple(answer.token_ids) for answer in right.values()}) < len(right):
        raise ValueError(f"{entry.name}: its answers say nothing, for they do not depend on the prompt")
    rules = GenerationRules(pristine, frozenset([NO_END]), 0)
    if asked := rules.only_stock():
        fault, ties = _compare(right, stock_path(pristine))
        return Outcome("stock", f"its generation_config asks for {asked}", fault, ties)
    try:
        model = prepared.prepare(copy.deepcopy(pristine))
    except prepared.Refused as reason:
        fault, ties = _compare(right, stock_path(pristine))
        return Outcome("stock", str(reason), fault, ties)
    except Exception as error:
        return Outcome("engine", fault=f"the self-check fails: {type(error).__name__}: {error}")
    ties, fused = 0, False
    if not entry.generation:  # what a config forces or forbids may be all that the grammar refuses or admits
        shaped = {request.index: stock_answer(pristine, request) for request in requests(grammar=GRAMMAR)}
        proposer = RowProposer(ContextDrafter(), None, None)
        fault, ties = _compare(shaped, engine_answers(model, 3, 8, proposer, grammar=GRAMMAR))
        if fault:
            return Outcome("engine", fault=f"{fault} (by a grammar)", ties=ties)
    halves = _halves(model)
    if halves is not None:
        fault, more = _compare(right, engine_answers(model, 3, 8, EarlyExit(model, halves, VOCAB, 3, None)))
        ties += more
        if fault:
            return Outcome("engine", fault=f"{fault} (early exit)", ties=ties)
    for how in ("", "captured", "by kernels") if kernels else ("", "captured"):
        if how == "captured" and not _runs_compiled(model, lambda graph: called_with(graph.module), least=2):
            return Outcome("engine", ties=ties, halves=halves is not None)
        if how == "by kernels" and not _runs_compiled(model, Builder(model)):
            break
        for rows, chunk, proposer, lengths in (
            (3, 8, RowProposer(ContextDrafter(), 4, None), LENGTHS),
            (3, 32, RowProposer(Fixed(_ragged(right)), 7, None), LENGTHS),
            (1, 512, NoProposer(), ALONE),
        ):
            fault, more = _compare(right, engine_answers(model, rows, chunk, proposer, lengths))
            ties += more
            if fault:
                return Outcome("engine", fault=f"{fault} ({how})" if how else fault, ties=ties)
    else:
        fused = kernels
    return Outcome("engine", ties=ties, captured=True, halves=halves is not None, fused=fused)


def _halves(model: Any) -> LayerSplit | None:
    """Return the model in two halves, None where it does not run so."""
    try:
        return prepared.halves_of(model, 1)
    except prepared.Refused:
        return None


def _runs_compiled(model: Any, compile_graph: Compile, least: int = 1) -> bool:
    """Let the layers that can be captured run as graphs, by `compile_graph`, where the model allows it."""
    if model.compiled is not None:
        model.compiled.off()
    try:
        layers = CompiledLayers(model, compile_graph, least)
        layers.on()
        return not differs(model, tolerance(model.inner.dtype))
    except Exception:  # as in speedup.compile_layers: it then runs uncompiled
        return False


@torch.inference_mode()
def stock_answer(pristine: Any, request: Request) -> Answer:
    """Return what generate() answers, alone, without a draft, from a model that has answered nothing before."""
    model = copy.deepcopy(pristine)  # a dynamic RoPE remembers the longest text
    prompt = torch.tensor([request.token_ids])
    masks = [GrammarMasks([grammars().matcher(request.grammar)], prompt.shape[1])] if request.grammar else []
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        logits_processor=LogitsProcessorList(masks),
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return Answer(out.sequences[0, prompt.shape[1] :].tolist(), torch.cat(out.scores).float())


def engine_answers(
    model: Any,
    rows: int,
    chunk: int,
    proposer: Proposer,
    lengths: Sequence[int] = LENGTHS,
    grammar: str = "",
    new: int = NEW,
) -> list[Generation | Failure]:
    """Return the engine's outcomes."""
    model.resize(rows)
    rules = GenerationRules(model.inner, frozenset([NO_END]), 0)
    engine = Engine(
        model,
        proposer,
        tokenizer(),
        frozenset([NO_END]),
        EngineSettings(
            chunk=chunk,
            grammars=grammars,
            processors=lambda request: rules.processors(request.sampling, len(request.token_ids)),
        ),
    )
    return list(engine.run(requests(lengths, grammar, new)))


def stock_path(model: Any) -> list[Generation | Failure]:
    """Return the outcomes of the runner, which falls back to generate() and says so."""
    with Loaded(model) as runner:
        outcomes = list(runner.generate(requests()))
        assert runner.about()["engine"] == "transformers"
        assert any(note.startswith("stock generate() answers") for note in runner.notes)
    return outcomes


def _ragged(right: dict[int, Answer]) -> Callable[[list[int], int], list[int]]:
    """Return a guess that is right up to a length that changes from step to step, and then wrong."""
    texts = [[*request.token_ids, *right[request.index].token_ids] for request in requests()]

    def guess(tokens: list[int], prompt_tokens: int) -> list[int]:
        text = next((text for text in texts if text[: len(tokens)] == tokens), tokens)
        good = text[len(tokens) :][: len(tokens) * 7 % 5]
        return [*good, (tokens[-1] + 1) % VOCAB, 3, 5]

    return guess


def _compare(right: dict[int, Answer], outcomes: Sequence[Generation | Failure]) -> tuple[str, int]:
    """Return the first fault, or "", and how many records part at a tie."""
    ties = 0
    for outcome in sorted(outcomes, key=lambda outcome: outcome.index):
        tokens = len(prompts()[outcome.index])
        if isinstance(outcome, Failure):
            return f"the prompt of {tokens} tokens fails: {outcome.message}", ties
        if outcome.token_ids != right[outcome.index].token_ids:
            if not right[outcome.index].ties_with(outcome.token_ids):
                return f"another answer to the prompt of {tokens} tokens", ties
            ties += 1
    return "", ties
