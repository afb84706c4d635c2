"""Grammars in the engine: the answers of a plain loop over transformers under the same masks, whatever is drafted."""

import json
import random

import numpy as np
import pytest
import torch
from jsonschema import validate

from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.model.loaded import prepare
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.engine.proposers.draft_model import DraftModel
from ragspec.engine.sampling import Noise, draw
from ragspec.records import Failure, Passage, Request, Sampling
from ragspec.speculation.drafters.base import Draft, NoDrafter
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.structured.form import Form
from ragspec.structured.grammars import Grammars
from tests.conftest import wide
from tests.engine.test_engine import CHEAP, Fixed, answers, ids, loaded, texts  # noqa: F401

NEW = 40
EOS = 0
PASSAGES = [Passage("p1", 'Ann wrote "Tides".\nIt has 300 pages.'), Passage("p2", "The sea is salt, caf\u00e9.")]
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 12},
        "sure": {"type": "boolean"},
        "sources": {"type": "array", "items": {"enum": {"$contexts": "id"}}, "minItems": 1, "maxItems": 2},
    },
    "required": ["answer", "sure", "sources"],
    "additionalProperties": False,
}
QUOTED = {
    "type": "object",
    "properties": {"quotes": {"type": "array", "items": {"$quote": True, "maxLength": 20}, "maxItems": 2}},
    "required": ["quotes"],
}
FORMS = {
    "json_schema": Form("json_schema", SCHEMA),
    "quotes": Form("json_schema", QUOTED),
    "regex": Form("regex", r"[0-9]{4}-[0-9]{2} (yes|no)( or (yes|no)){0,3}"),
    "choice": Form("choice", ["Ann wrote it.", "Ann did not.", 'It is "Tides".', "yes"]),
    "grammar": Form("grammar", 'start: item (", " item)*\nitem: /[a-c]{2,5}/ | "(" item ")"'),
}
SAMPLINGS = [
    Sampling(max_new_tokens=NEW),
    Sampling(max_new_tokens=NEW, temperature=0.9, top_k=30),
    Sampling(max_new_tokens=NEW, presence_penalty=0.9, repetition_penalty=1.2),
]


def requests_of(tokenizer, sampling, form=None):
    """Return nine requests of one form, or of all of them and of none."""
    forms = [form] if form else [*FORMS, None]
    for i, text in enumerate(texts(9)):
        name = forms[i % len(forms)]
        grammar = FORMS[name].grammar(PASSAGES) if name else ""
        yield Request(i, f"r{i}", tokenizer.encode(text, special_tokens=True), sampling, grammar=grammar)


@torch.inference_mode()
def by_hand(model, tokenizer, request):
    """Return an answer from one whole forward per token, every token that the grammar refuses left out."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling, answer, noise = request.sampling, [], Noise(request.sampling.seed, request.id)
    width = model.config.vocab_size
    read = from_tokenizer(tokenizer.inner, width, eos_token=[EOS])
    matcher = LLMatcher(read, LLMatcher.grammar_from_lark(request.grammar)) if request.grammar else None
    while len(answer) < sampling.max_new_tokens and answer[-1:] != [EOS]:
        scores = model(torch.tensor([request.token_ids + answer])).logits[0, -1]
        if sampling.repetition_penalty != 1:
            text = torch.tensor([request.token_ids + answer])
            scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(text, scores[None])[0]
        for token in set(answer):
            scores[token] -= sampling.presence_penalty
        if matcher is not None:
            mask = allocate_token_bitmask(1, width)
            fill_next_token_bitmask(matcher, mask)
            scores[
                ~torch.from_numpy(np.unpackbits(mask.view(np.uint8), bitorder="little")[:width].astype(bool))
            ] = -torch.inf
        if sampling.temperature > 0:
            scores = scores / sampling.temperature
            least = scores.topk(sampling.top_k).values[-1]
            scores[scores < least] = -torch.inf
            answer += draw(torch.softmax(scores.double(), -1)[None], [noise.at(len(answer))])
        else:
            answer.append(int(scores.argmax()))
        if matcher is not None:
            assert matcher.consume_token(answer[-1])
    return answer


@pytest.fixture(scope="module")
def plain_model(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(plain_model, loaded, tiny):  # noqa: F811
    """What each request's answer is, by sampling and form; worked out once."""
    tokenizer, known = loaded(tiny)[1], {}

    def of(sampling, form=None):
        if (sampling, form) not in known:
            asked = requests_of(tokenizer, sampling, form)
            known[sampling, form] = {request.index: by_hand(plain_model, tokenizer, request) for request in asked}
        return known[sampling, form]

    return of


@pytest.fixture(scope="module")
def run(loaded, tiny):  # noqa: F811
    """Answer requests with the engine."""
    model, tokenizer = loaded(tiny)
    grammars = Grammars(tokenizer.inner, 400, {EOS})
    rules = rules_of(model.inner)

    def go(sampling, proposer=None, rows=4, form=None, **settings):
        return answers(
            loaded,
            tiny,
            proposer,
            rows,
            requests_of(tokenizer, sampling, form),
            eos=[EOS],
            grammars=lambda: grammars,
            processors=lambda request: rules.processors(request.sampling, len(request.token_ids)),
            **settings,
        )

    return go


def rules_of(model):
    from ragspec.models.logits_processors import GenerationRules

    return GenerationRules(model, frozenset([EOS]), EOS)


class Right:
    """Drafts the answers that are known, up to a length that changes, and then something else."""

    def __init__(self, whole):
        self.whole = whole

    def __call__(self, tokens, prompt_tokens):
        answer = self.whole.get(tuple(tokens[:prompt_tokens]), [])
        return [*answer[len(tokens) - prompt_tokens :][: len(tokens) * 7 % 6], 3, 5]


def drafter_of(name, tokenizer, whole):
    if name == "right":
        asked = {tuple(r.token_ids): whole[r.index] for r in requests_of(tokenizer, SAMPLINGS[0])}
        return Fixed(Right(asked))
    made = {
        "junk": Fixed(lambda tokens, prompt_tokens: [399 - tokens[-1], EOS, 2, 3]),
        "forced": NoDrafter(),
        "context": ContextDrafter(),
        "lookup": PromptLookup(),
    }
    return made[name]


@pytest.mark.parametrize("rows", [*wide(1), 4, *wide(16)])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("name", [None, "junk", "right", "forced", "context", "lookup"])
def test_no_draft_changes_a_structured_answer(run, expected, loaded, tiny, name, sampling, rows):  # noqa: F811
    proposer = None
    if name is not None:
        proposer = RowProposer(drafter_of(name, loaded(tiny)[1], expected(sampling)), None, CHEAP)
    outcomes = run(sampling, proposer, rows, cost=CHEAP)
    assert ids(outcomes) == expected(sampling)
    if name in ("forced", "right"):
        assert proposer.forced.right > 0
        assert sum(outcome.spec.accepted for outcome in outcomes.values()) > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_forced_tokens_are_drafts_like_any_other(run, expected, form, num_tokens):
    outcomes = run(SAMPLINGS[0], RowProposer(NoDrafter(), num_tokens, None), form=form)
    assert ids(outcomes) == expected(SAMPLINGS[0], form)
    assert all(max(len(o.spec.drafted_at) - 1, 0) <= num_tokens for o in outcomes.values())


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_tokens", [1, 4, None])
def test_a_draft_model_writes_what_the_grammar_admits(run, expected, loaded, tiny, tiny_draft, sampling, num_tokens):  # noqa: F811
    draft = loaded(tiny_draft)[0]
    draft.resize(4)
    outcomes = run(sampling, DraftModel(draft, 400, None, num_tokens, CHEAP), cost=CHEAP)
    if sampling.temperature == 0:
        assert ids(outcomes) == expected(sampling)
    else:  # another answer of the same distribution; whole ones have the form
        assert all(outcome.finish_reason in ("stop", "length") for outcome in outcomes.values())
    assert sum(outcome.spec.accepted for outcome in outcomes.values()) > 0


def test_the_distribution_of_a_sampled_draft_is_the_targets_under_the_mask(run, loaded, tiny, tiny_draft, plain_model):  # noqa: F811
    """One place, thousands of draws: with a draft model, and with a draft that guesses what the grammar refuses."""
    tokenizer = loaded(tiny)[1]
    form = Form("regex", "(a|b|c|d)")
    prompt = tokenizer.encode("one two", special_tokens=True)
    grammars = Grammars(tokenizer.inner, 400, {EOS})
    mask = torch.full((400,), -torch.inf)
    letters = [tokenizer.encode(letter, special_tokens=False)[0] for letter in "abcd"]
    mask[letters] = 0
    with torch.inference_mode():
        scores = plain_model(torch.tensor([prompt])).logits[0, -1] / 6.0 + mask
        weights = torch.softmax(scores.double(), -1)[letters]
    draws = 1000
    asked = [
        Request(i, f"s{i}", prompt, Sampling(max_new_tokens=2, temperature=6.0, seed=i), grammar=form.grammar())
        for i in range(draws)
    ]
    settings = {
        "grammars": lambda: grammars,
        "processors": lambda request: rules_of(plain_model).processors(request.sampling, len(prompt)),
    }
    first = {}
    for name in ("model", "refused"):
        if name == "model":
            draft = loaded(tiny_draft)[0]
            draft.resize(16)
            proposer = DraftModel(draft, 400, None, 1, None)
        else:
            proposer = RowProposer(Refused(letters[0]), 1, None)
        outcomes = answers(loaded, tiny, proposer, 16, iter(asked), eos=[EOS], **settings)
        counts = [sum(outcome.token_ids[0] == letter for outcome in outcomes.values()) for letter in letters]
        assert sum(counts) == draws
        first[name] = sum((n - draws * w) ** 2 / (draws * w) for n, w in zip(counts, weights.tolist(), strict=True))
    assert max(first.values()) < 21.1, first  # chi square, 3 degrees of freedom: one in ten thousand


class Refused:
    """Guesses a letter half of the time, and else a token that the grammar refuses, and says so."""

    def __init__(self, letter):
        self.letter, self.chance = letter, random.Random(0)

    def open(self, prompt, passages=()):
        return self

    def propose(self, limit):
        if limit < 1:
            return Draft()
        weights = torch.zeros(1, 400, dtype=torch.float64)
        weights[0, [5, self.letter]] = 0.5
        return Draft([self.chance.choice([5, self.letter])], [0.9], [None], weights)

    def extend(self, token_ids):
        pass

    def close(self):
        pass


def test_answers_have_their_form(run, loaded, tiny):  # noqa: F811
    tokenizer = loaded(tiny)[1]
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "sources": {"items": {"enum": ["p1", "p2"]}}}}
    whole = 0
    for sampling in (Sampling(max_new_tokens=90), Sampling(max_new_tokens=90, temperature=1.0)):
        for outcome in run(
            sampling, RowProposer(ContextDrafter(), None, CHEAP), form="json_schema", cost=CHEAP
        ).values():
            if outcome.finish_reason == "stop":
                whole += 1
                validate(json.loads(tokenizer.decode(outcome.token_ids)), schema)
        for outcome in run(sampling, RowProposer(NoDrafter(), None, CHEAP), form="quotes", cost=CHEAP).values():
            if outcome.finish_reason == "stop":
                whole += 1
                for quote in json.loads(tokenizer.decode(outcome.token_ids))["quotes"]:
                    assert any(quote in passage.text for passage in PASSAGES)
    assert whole >= 18


def test_a_grammar_that_cannot_be_used_fails_its_record_alone(loaded, tiny):  # noqa: F811
    model, tokenizer = loaded(tiny)
    model.resize(2)
    grammars = Grammars(tokenizer.inner, 400, {EOS})
    asked = [
        Request(i, f"r{i}", [5, 6, 7], Sampling(max_new_tokens=4), grammar=text)
        for i, text in enumerate(['start: "yes"', "start: nothing", 'start: %json {"enum": []}', 'start: "no"'])
    ]
    engine = Engine(model, NoProposer(), tokenizer, frozenset([EOS]), EngineSettings(grammars=lambda: grammars))
    outcomes = {outcome.index: outcome for outcome in engine.run(asked)}
    assert [tokenizer.decode(outcomes[i].token_ids) for i in (0, 3)] == ["yes", "no"]
    assert [isinstance(outcomes[i], Failure) for i in (1, 2)] == [True, True]
    assert "Unsatisfiable" in outcomes[2].message


def test_without_an_end_token_an_answer_ends_where_nothing_may_follow(loaded, tiny):  # noqa: F811
    tokenizer = loaded(tiny)[1]
    grammars = Grammars(tokenizer.inner, 400, set())
    asked = [Request(0, "r", [5, 6, 7], Sampling(max_new_tokens=30), grammar='start: "Ann wrote it."')]
    outcome = answers(loaded, tiny, None, 1, asked, grammars=lambda: grammars)[0]
    assert (tokenizer.decode(outcome.token_ids), outcome.finish_reason) == ("Ann wrote it.", "stop")


@pytest.mark.wide
@pytest.mark.demo
def test_without_an_end_token_no_draft_goes_on_behind_an_answer(loaded, tiny):  # noqa: F811
    """Though a grammar admits the tokenizer's own end token there."""
    tokenizer = loaded(tiny)[1]
    grammars = Grammars(tokenizer.inner, 400, ())

    def written(proposer=None):
        asked = requests_of(tokenizer, SAMPLINGS[0], "choice")
        return ids(answers(loaded, tiny, proposer, requests=asked, grammars=lambda: grammars))

    plain = written()
    asked = requests_of(tokenizer, SAMPLINGS[0], "choice")
    longer = {tuple(request.token_ids): [*plain[request.index], EOS] for request in asked}
    drafter = Fixed(lambda tokens, prompt_tokens: longer[tuple(tokens[:prompt_tokens])][len(tokens) - prompt_tokens :])
    assert written(RowProposer(drafter, 9, None)) == plain


def test_with_a_real_tokenizer_too_the_engine_writes_what_masks_admit(demo):
    """Where the text is certain a mask admits one division into tokens; the demo's tokenizer has many."""
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    from ragspec.models.logits_processors import GrammarMasks
    from ragspec.models.resolve import resolve
    from ragspec.models.tokenizer import HFTokenizer, load_tokenizer

    source = resolve(str(demo))
    tokenizer = HFTokenizer(load_tokenizer(source))
    stock = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    eos = {tokenizer.inner.eos_token_id}
    grammars = Grammars(tokenizer.inner, stock.config.vocab_size, eos)
    text = FORMS["json_schema"].grammar(PASSAGES)
    asked = [
        Request(i, f"r{i}", tokenizer.encode(prompt, special_tokens=False), Sampling(max_new_tokens=NEW), grammar=text)
        for i, prompt in enumerate(["Who wrote Tides? As JSON:", "Is the sea salt? As JSON:", "Why? JSON:"])
    ]
    expected = {}
    for request in asked:
        prompt = torch.tensor([request.token_ids])
        masks = LogitsProcessorList([GrammarMasks([grammars.matcher(text)], prompt.shape[1])])
        out = stock.generate(prompt, do_sample=False, max_new_tokens=NEW, logits_processor=masks)
        expected[request.index] = out[0, prompt.shape[1] :].tolist()
    model = prepare(stock)
    for proposer in (None, RowProposer(ContextDrafter(), None, CHEAP), RowProposer(NoDrafter(), None, CHEAP)):
        model.resize(3)
        settings = EngineSettings(grammars=lambda: grammars, cost=CHEAP if proposer else None)
        engine = Engine(model, proposer or NoProposer(), tokenizer, frozenset(eos), settings)
        assert {outcome.index: outcome.token_ids for outcome in engine.run(asked)} == expected


@pytest.mark.demo
def test_where_nothing_is_certain_asking_says_what_a_mask_says(demo):
    from ragspec.models.resolve import resolve
    from ragspec.models.tokenizer import HFTokenizer, load_tokenizer

    tokenizer = HFTokenizer(load_tokenizer(resolve(str(demo))))
    eos = tokenizer.inner.eos_token_id
    grammars = Grammars(tokenizer.inner, len(tokenizer.inner), {eos})
    chance, asked, left = random.Random(0), 0, 0
    for form in FORMS.values():
        for _ in range(4):
            matcher = grammars.matcher(form.grammar(PASSAGES))
            for _ in range(30):
                admitted = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
                some = {
                    *chance.sample(range(len(tokenizer.inner)), 200),
                    *chance.sample(admitted, min(50, len(admitted))),
                }
                answers = {token: matcher.admits(token) for token in some}
                left += None in answers.values()
                asked += None not in answers.values()
                assert all(said is None or said == (token in admitted) for token, said in answers.items())
                token = chance.choice(admitted)
                if token == eos:
                    break
                matcher.take([token])
    assert asked > 50 < left
