"""The engine against stock generate(), family by family, and the visible fallback where a model does not fit."""

import pytest
import torch
import transformers

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.engine import backend
from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.model import attention
from ragspec.engine.model import loaded as prepared
from ragspec.engine.model import self_check as selfcheck
from ragspec.engine.proposers.base import RowProposer
from ragspec.errors import ConfigError, ModelError
from ragspec.models.loading import apply_workarounds
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Request, Sampling
from ragspec.runners.huggingface import runner as huggingface
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.step_cost import StepCost
from tests.conftest import SAMPLE, read_jsonl, save_gpt2, train_tokenizer

NEW = 20
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": ("Llama", SMALL),
    "llama-heads-of-16": ("Llama", {**SMALL, "head_dim": 16, "num_hidden_layers": 4}),
    "llama-bias": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 8}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": None}),
    "mistral-sliding": ("Mistral", {**SMALL, "sliding_window": 12}),
    "phi3": ("Phi3", {**SMALL, "pad_token_id": 0}),
    "gemma3-sliding": ("Gemma3Text", {**SMALL, "head_dim": 8, "sliding_window": 10, "num_hidden_layers": 7}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512, "initializer_range": 0.3}),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "opt": (
        "OPT",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 32,
            "init_std": 0.3,
        },
    ),
}
OTHERS = {
    "mistral-long": ("Mistral", {**SMALL, "sliding_window": 400}),
    "mamba": ("Mamba", {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
}
# a window that texts outgrow as they are written
OTHERS["gemma2-wide"] = ("Gemma2", {**SMALL, "head_dim": 8, "sliding_window": 140, "num_hidden_layers": 4})
FAMILIES["gemma2"] = ("Gemma2", {**SMALL, "head_dim": 8, "sliding_window": 10, "attn_logit_softcapping": 5.0})


@pytest.fixture(scope="module")
def tokenizer(sample_texts):
    return HFTokenizer(train_tokenizer(400, sample_texts))


def build(family, tokenizer):
    kind, settings = (FAMILIES | OTHERS)[family]
    torch.manual_seed(11)
    inner = tokenizer.inner
    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": len(inner), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0, **settings}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():  # families differ in what initializer_range reaches
        if parameter.dim() > 1 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.3)
        assert name
    return apply_workarounds(model)


def requests_for(tokenizer, lengths=(90, 40, 7, 63, 25)):
    records = read_jsonl(SAMPLE)
    for i, length in enumerate(lengths):
        ids = tokenizer.encode(records[i]["contexts"][0]["text"], special_tokens=True)[:length]
        yield Request(i, f"r{i}", ids, Sampling(max_new_tokens=NEW))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_tokens_of_stock_generate(family, tokenizer):
    inner = build(family, tokenizer)
    stock = {}
    for request in requests_for(tokenizer):
        prompt = torch.tensor([request.token_ids])
        out = inner.generate(prompt, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
        stock[request.index] = out[0, prompt.shape[1] :].tolist()
    assert len({tuple(answer) for answer in stock.values()}) == len(stock)  # not one loop for all
    model = prepared.prepare(inner)
    for rows, tokens in ((1, None), (3, 5)):
        model.resize(rows)
        engine = Engine(
            model, RowProposer(ContextDrafter(), tokens or 4, None), tokenizer, frozenset(), EngineSettings(chunk=32)
        )
        answers = {outcome.index: outcome.token_ids for outcome in engine.run(requests_for(tokenizer))}
        assert answers == stock


def test_a_model_that_does_not_fit_is_refused_and_left_as_it_was(tokenizer):
    inner = build("mamba", tokenizer)
    prompt = torch.tensor([next(iter(requests_for(tokenizer))).token_ids])
    before = inner.generate(prompt, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    with pytest.raises(prepared.Refused, match="recurrent state"):
        prepared.prepare(inner)
    assert torch.equal(inner.generate(prompt, do_sample=False, max_new_tokens=NEW, pad_token_id=0), before)


@pytest.mark.parametrize("what", ["scaling", "window", "positions"])
def test_the_self_check_finds_what_is_computed_wrongly(what, tokenizer, monkeypatch):
    inner = build("llama" if what != "window" else "mistral-long", tokenizer)
    right = attention.attend

    def wrong(module, query, key, value, mask, scaling=None, **kwargs):
        if what == "scaling":
            scaling = scaling * 1.05
        if what == "window":
            assert mask is not None
            mask = None  # 400 tokens: the self-check has 48
        return right(module, query, key, value, mask, scaling=scaling, **kwargs)

    monkeypatch.setattr(attention, "attend", wrong)
    if what == "positions":
        monkeypatch.setattr(attention, "attend", right)
        monkeypatch.setattr(
            inner.model.rotary_emb, "forward", _shifted(inner.model.rotary_emb.forward, selfcheck.TOKENS)
        )
    with pytest.raises(prepared.Refused, match="sliding_window of 400" if what == "window" else "different logits"):
        prepared.prepare(inner)


def _shifted(forward, tokens):
    """Return a rotary embedding that is right for a whole text only, as position ids made up by a model would be."""

    def shifted(x, position_ids):
        if position_ids.shape[1] < tokens:
            position_ids = position_ids * 0 + torch.arange(position_ids.shape[1])
        return forward(x, position_ids)

    return shifted


def run(folder, method="none", runner_args=None, sampling=None, **spec):
    config = build_config(
        {
            "model": folder,
            "sampling": {"max_new_tokens": NEW, **(sampling or {})},
            "speculation": {"method": method, **spec},
            "runner_args": {"batch_size": 3, **(runner_args or {})},
        }
    )
    runner = huggingface.Runner(config)
    runner.check()
    with runner:
        runner.warm_up()
        requests = [
            Request(i, f"r{i}", runner.tokenizer.encode(r["query"], special_tokens=True), to_sampling(config.sampling))
            for i, r in enumerate(read_jsonl(SAMPLE)[:5])
        ]
        outcomes = list(runner.generate(requests))
        about = runner.about()
    return {outcome.index: outcome for outcome in outcomes}, about, runner


def tokens(outcomes):
    return {index: outcome.token_ids for index, outcome in sorted(outcomes.items())}


@pytest.mark.parametrize(
    ("method", "spec"),
    [
        ("none", {}),
        ("context", {}),
        ("context", {"isolate": True, "num_tokens": 3}),
        ("prompt_lookup", {}),
        ("prompt_lookup", {"ngram_min": 2, "ngram_max": 4, "num_tokens": 5}),
        ("draft_model", {"draft_model": "tiny_draft"}),
        ("draft_model", {"draft_model": "tiny", "num_tokens": 3}),
        ("draft_model", {"draft_model": "tiny_gpt2", "draft_tokenizer": "tiny_gpt2"}),
        ("draft_model", {"draft_model": "tiny_gpt2", "draft_tokenizer": "tiny_gpt2", "num_tokens": 4}),
        ("early_exit", {"early_exit_layer": 1}),
        ("early_exit", {"early_exit_layer": 1, "num_tokens": 3}),
    ],
)
def test_every_method_runs_in_batches_with_the_answers_of_stock_generate(tiny, method, spec, request):
    spec = {k: request.getfixturevalue(v) if k.startswith("draft_") else v for k, v in spec.items()}
    stock, about, _ = run(tiny, runner_args={"engine": "transformers"})
    assert about["engine"] == "transformers"
    outcomes, about, runner = run(tiny, method, **spec)
    assert tokens(outcomes) == tokens(stock)
    assert about["engine"] == "ragspec"
    assert about["batch_size"] == 3
    assert runner.decode_tokens == sum(len(answer) - 1 for answer in tokens(outcomes).values())
    assert runner.prefill_s > 0 < runner.decode_s


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_size_is_chosen_and_said(tiny, monkeypatch, temperature):
    monkeypatch.setattr("ragspec.engine.backend.seconds_of", lambda model, rows: rows)  # more rows add no speed
    sampling = {"temperature": temperature, "seed": 3}
    outcomes, about, runner = run(tiny, "context", {"batch_size": "auto"}, sampling)
    assert about["batch_size"] == 16
    assert any("batch_size: auto chose 16: a larger batch would" in note for note in runner.notes)
    alone, _, _ = run(tiny, "none", {"batch_size": 1}, sampling)
    assert tokens(outcomes) == tokens(alone)


def test_memory_limits_the_batch_size(tiny, monkeypatch):
    from ragspec.engine.kv import budget as capacity

    monkeypatch.setattr(capacity, "free_on", lambda device: 200_000)
    _, about, runner = run(tiny, "none", {"batch_size": "auto"})
    assert 1 < about["batch_size"] < 16
    assert any("available for the KV cache" in note for note in runner.notes)


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("none", {"runner_args": {"engine": "transformers"}}, "engine: transformers"),
        ("none", {"runner_args": {"generate_args": {"num_beams": 2}}}, "generate_args"),
        ("prompt_lookup", {"schedule": "heuristic_transient"}, "schedule"),
    ],
)
def test_stock_generate_answers_where_only_it_can_and_says_so(tiny, method, settings, why):
    _, about, runner = run(tiny, method, **settings)
    assert about["engine"] == "transformers"
    assert any(note.startswith("stock generate() answers") and why in note for note in runner.notes)
    args = {**settings.pop("runner_args", {}), "engine": "ragspec"}
    if "transformers" not in why:
        with pytest.raises(ConfigError, match=why):
            run(tiny, method, args, **settings)


def test_a_model_that_does_not_fit_falls_back_and_says_why(tokenizer, tmp_path):
    build("mamba", tokenizer).save_pretrained(tmp_path)
    tokenizer.inner.save_pretrained(tmp_path)
    _, about, runner = run(str(tmp_path))
    assert about["engine"] == "transformers"
    assert any("recurrent state" in note for note in runner.notes)
    with pytest.raises(ModelError, match="recurrent state"):
        run(str(tmp_path), "context")


@pytest.mark.wide
def test_sampling_with_a_draft_model_is_the_targets_own_distribution(tiny, tiny_draft):
    """The first two sampled tokens of many records against plain sampling, by chi-square over the common tokens."""
    counts = []
    for spec in ({}, {"draft_model": tiny_draft, "num_tokens": 3}):
        config = build_config(
            {
                "model": tiny,
                "sampling": {"max_new_tokens": 4, "temperature": 0.35, "top_k": 6, "seed": len(spec)},
                "speculation": {"method": "draft_model" if spec else "none", **spec},
                "runner_args": {"batch_size": 64},
            }
        )
        runner = huggingface.Runner(config)
        runner.check()
        ids = runner.tokenizer.encode("Why is the sky blue?", special_tokens=True)
        requests = (Request(i, f"r{i}", ids, to_sampling(config.sampling)) for i in range(3000))
        seen = {}
        with runner:
            for outcome in runner.generate(requests):
                pair = tuple(outcome.token_ids[1:3])
                seen[pair] = seen.get(pair, 0) + 1
        counts.append(seen)
    plain, drafted = counts
    common = [pair for pair, n in plain.items() if n + drafted.get(pair, 0) >= 40]
    assert len(common) >= 5
    chi = sum((plain[p] - drafted.get(p, 0)) ** 2 / (plain[p] + drafted.get(p, 0)) for p in common)
    degrees = len(common)
    assert chi < degrees + 4 * (2 * degrees) ** 0.5 + 8


def passes(runner, config, count=2):
    """Yield, pass by pass, the outcomes."""
    requests = [
        Request(i, f"r{i}", runner.tokenizer.encode(r["query"], special_tokens=True), to_sampling(config.sampling))
        for i, r in enumerate(read_jsonl(SAMPLE))
    ]
    for _ in range(count):
        yield list(runner.generate(requests))


@pytest.mark.parametrize("method", ["context", "prompt_lookup"])
def test_a_second_pass_drafts_what_the_first_one_did(tiny, method):
    """Answers of the first pass would be the best of drafts in the second."""
    spec = {"method": method, "num_tokens": 6}
    config = build_config({"model": tiny, "sampling": {"max_new_tokens": NEW}, "speculation": spec})
    runner = huggingface.Runner(config)
    runner.check()
    with runner:
        counts = [[(o.index, o.spec) for o in outcomes] for outcomes in passes(runner, config)]
    assert counts[0] == counts[1]
    assert sum(spec.drafted for _, spec in counts[0]) > 0


@pytest.mark.parametrize("method", ["context", "prompt_lookup", "auto"])
def test_nothing_learnt_in_a_pass_is_left_in_the_next(tiny, method, monkeypatch):
    """What drafts, who drafts and what a step costs are made anew for each pass."""
    made = []
    for owner, name in ((backend, "drafters_on"), (backend, "MethodSelector"), (StepCost, "anew")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, name=name, make=make: made.append(name) or make(*given))
    config = build_config({"model": tiny, "sampling": {"max_new_tokens": NEW}, "speculation": {"method": method}})
    runner = huggingface.Runner(config)
    runner.check()
    with runner:
        runner.warm_up()
        del made[:]
        for _ in passes(runner, config):
            assert set(made) == {"drafters_on", "MethodSelector", "anew"}
            del made[:]
    assert not runner.remembers


@pytest.mark.parametrize("positions", [48, 100])
def test_steps_are_timed_within_the_positions_of_a_model(tmp_path, sample_texts, positions):
    """Learned positions end with the context."""
    folder = save_gpt2(tmp_path / "short", train_tokenizer(400, sample_texts), positions=positions)
    sampling = {"max_new_tokens": 8}
    stock, _, _ = run(folder, runner_args={"engine": "transformers"}, sampling=sampling)
    for size in (3, "auto"):
        outcomes, about, _ = run(folder, "context", {"batch_size": size}, sampling)
        assert about["engine"] == "ragspec"
        assert tokens(outcomes) == tokens(stock)
