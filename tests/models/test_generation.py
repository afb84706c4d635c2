"""What a model's own generation_config asks for is done as generate() does it, drafts or not, or handed to it."""

import json
import shutil
from pathlib import Path

import pytest

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.errors import ModelError
from ragspec.models.logits_processors import asked_beyond_sampling
from ragspec.records import Request
from ragspec.runners.huggingface import runner as huggingface
from tests.conftest import SAMPLE, read_jsonl, wide

NEW = 24
ASKED = {
    "no_repeat_ngram_size": 2,
    "suppress_tokens": list(range(40, 90)),
    "begin_suppress_tokens": list(range(100, 330)),
    "bad_words_ids": [[n, n + 1] for n in range(90, 390)] + [[n] for n in range(330, 350)],
    "min_new_tokens": 9,
    "min_length": 40,
    "forced_bos_token_id": 17,
    "forced_eos_token_id": 5,
    "exponential_decay_length_penalty": [4, 1.5],
    "sequence_bias": [[[n], 4.0] for n in range(200, 260)],
    "remove_invalid_values": True,
}


@pytest.fixture(scope="module")
def asking(tiny, tmp_path_factory):
    """Return a folder of the tiny model whose generation_config asks for something."""

    def make(**asked):
        folder = tmp_path_factory.mktemp("asking") / "model"
        shutil.copytree(tiny, folder)
        path = Path(folder) / "generation_config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(config | asked))
        return str(folder)

    return make


def answered(folder, method="none", sampling=None, draft=None, **runner_args):
    config = build_config(
        {
            "model": folder,
            "sampling": {"max_new_tokens": NEW, **(sampling or {})},
            "speculation": {"method": method} | ({"draft_model": draft} if draft else {}),
            "runner_args": {"batch_size": 3, **runner_args},
        }
    )
    runner = huggingface.Runner(config)
    runner.check()
    with runner:
        runner.warm_up()
        requests = [
            Request(i, f"r{i}", runner.tokenizer.encode(r["query"], special_tokens=True), to_sampling(config.sampling))
            for i, r in enumerate(read_jsonl(SAMPLE)[:7])
        ]
        outcomes = {outcome.index: outcome for outcome in runner.generate(requests)}
        about = runner.about()
    return {index: outcomes[index] for index in sorted(outcomes)}, about["engine"], runner.notes


def ids(outcomes):
    return {index: outcome.token_ids for index, outcome in outcomes.items()}


SOME = ["no_repeat_ngram_size", "min_length", "sequence_bias", "begin_suppress_tokens"]


@pytest.mark.parametrize("key", [*SOME, *wide(*(key for key in ASKED if key not in SOME))])
def test_the_engine_does_what_generation_config_asks_as_stock_generate_does(asking, tiny, key):
    eos = {"eos_token_id": list(range(250, 300))} if "min" in key or "decay" in key else {}
    folder = asking(**{key: ASKED[key]}, **eos)
    stock, engine, _ = answered(folder, engine="transformers", batch_size=1)
    assert engine == "transformers"
    unasked, _, _ = answered(asking(**eos) if eos else tiny)
    if key not in ("remove_invalid_values", "forced_bos_token_id"):  # the second is for prompts of one token
        assert ids(stock) != ids(unasked)
    for method in ("none", "context", "prompt_lookup"):
        outcomes, engine, _ = answered(folder, method)
        assert engine == "ragspec"
        assert ids(outcomes) == ids(stock)


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_no_end_token_is_made_likelier_where_none_ends_an_answer(asking, tiny, engine):
    ignored = {"ignore_eos": True}
    longer = asking(exponential_decay_length_penalty=[4, 1.5])
    assert ids(answered(longer, sampling=ignored, engine=engine)[0]) == ids(answered(tiny, sampling=ignored)[0])


def test_an_ignored_end_token_of_generate_args_ends_no_answer(tiny):
    expected = ids(answered(tiny, sampling={"ignore_eos": True})[0])
    ends = {"eos_token_id": [answer[3] for answer in expected.values()]}
    for engine in ("auto", "transformers"):
        outcomes, _, _ = answered(tiny, sampling={"ignore_eos": True}, engine=engine, generate_args=ends)
        assert ids(outcomes) == expected


def test_all_of_them_together(asking):
    asked = {key: value for key, value in ASKED.items() if key != "forced_bos_token_id"}
    folder = asking(**asked, eos_token_id=list(range(250, 300)))
    stock, _, _ = answered(folder, engine="transformers", batch_size=1)
    outcomes, engine, _ = answered(folder, "context")
    assert engine == "ragspec"
    assert ids(outcomes) == ids(stock)


def test_generate_args_are_served_in_the_engine_where_they_only_change_logits(tiny):
    asked = {"no_repeat_ngram_size": 2, "suppress_tokens": list(range(60))}
    stock, _, _ = answered(tiny, engine="transformers", batch_size=1, generate_args=asked)
    outcomes, engine, _ = answered(tiny, "context", generate_args=asked)
    assert engine == "ragspec"
    assert ids(outcomes) == ids(stock)


@pytest.mark.parametrize("asked", [{"typical_p": 0.6}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.02}, {"top_h": 0.4}])
def test_sampling_by_the_models_own_warpers_is_the_same_with_and_without_drafts(asking, tiny, asked):
    sampling = {"temperature": 0.9, "seed": 4}
    folder = asking(**asked, no_repeat_ngram_size=4)
    plain, _, _ = answered(folder, "none", sampling, batch_size=1)
    assert ids(plain) != ids(answered(tiny, "none", sampling)[0])
    for method in ("context", "prompt_lookup"):
        assert ids(answered(folder, method, sampling)[0]) == ids(plain)


@pytest.mark.parametrize("asked", [{"num_beams": 3}, {"guidance_scale": 1.5}, {"stop_strings": ["the"]}])
def test_what_only_generate_does_is_handed_to_it_and_said(asking, asked):
    folder = asking(**asked)
    _, engine, notes = answered(folder)
    assert engine == "transformers"
    (key,) = asked
    assert any(note.startswith("stock generate() answers") and f"generation_config.{key}" in note for note in notes)


def generated(folder):
    """Return what generate() itself answers, without ragspec."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = {}
    for index, record in enumerate(read_jsonl(SAMPLE)[:7]):
        prompt = tokenizer(record["query"], return_tensors="pt")
        settings = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer}
        output = model.generate(**prompt, **settings, return_dict_in_generate=False)
        found[index] = output[0, prompt["input_ids"].shape[1] :].tolist()
    return found


ONLY_GENERATE: list[dict] = [
    {"encoder_no_repeat_ngram_size": 1},
    {"guidance_scale": 1.5},
    {"guidance_scale": 0},
    {"encoder_repetition_penalty": 1.9},
]
HARMLESS: list[dict] = [
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"output_scores": True, "output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True},
    {"num_return_sequences": 2, "do_sample": True},
]


@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
@pytest.mark.parametrize("asked", ONLY_GENERATE, ids=repr)
def test_what_only_generate_does_it_does_under_every_method(asking, tiny, asked, method):
    folder = asking(**asked)
    outcomes, engine, _ = answered(folder, method)
    assert engine == "transformers"
    assert ids(outcomes) == generated(folder)
    assert ids(outcomes) != generated(tiny)


@pytest.mark.parametrize("method", ["none", "prompt_lookup", "draft_model"])
@pytest.mark.parametrize("asked", HARMLESS, ids=repr)
def test_settings_of_how_generate_works_change_no_answer(asking, tiny, tiny_draft, asked, method, tmp_path):
    draft = shutil.copytree(tiny_draft, tmp_path / "draft")
    (draft / "generation_config.json").write_text(json.dumps(asked))
    drafts = {"draft": str(draft)} if method == "draft_model" else {}
    assert ids(answered(asking(**asked), method, engine="transformers", **drafts)[0]) == generated(tiny)


def test_a_cache_that_drafts_do_without_is_told(asking, tiny):
    outcomes, _, notes = answered(asking(cache_implementation="offloaded"), "prompt_lookup")
    assert ids(outcomes) == generated(tiny)
    assert "cache_implementation: offloaded has no effect in stock generate() with drafts" in notes
    assert not [note for note in answered(tiny, "prompt_lookup", engine="transformers")[2] if "cache_impl" in note]


def test_a_draft_models_own_kind_of_cache_is_not_used(asking, tiny):
    draft = asking(cache_implementation="quantized")
    assert ids(answered(tiny, "draft_model", engine="transformers", draft=draft)[0]) == generated(tiny)


@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
def test_a_setting_that_generate_rejects_ends_the_run_in_one_line(asking, method):
    with pytest.raises(ModelError, match=r"cannot answer a first prompt: .*Dola.*generation_config") as error:
        answered(asking(dola_layers="high"), method)
    assert "\n" not in str(error.value)


INVALID = [
    ({"bad_words_ids": [[5, 5000]]}, "5000"),
    *wide(({"sequence_bias": [[[5000], 1.0]]}, "5000")),
    ({"forced_eos_token_id": 5000}, "5000"),
]


@pytest.mark.parametrize(("asked", "named"), INVALID)
def test_a_setting_that_names_what_the_model_lacks_ends_the_run_in_one_line(asking, asked, named):
    sampling = {"temperature": 0.5}
    with pytest.raises(ModelError, match=rf"generation_config, or generate_args, cannot be used: .*{named}") as error:
        answered(asking(**asked), sampling=sampling)
    assert "\n" not in str(error.value)


def test_a_setting_that_rewrites_prompts_ends_the_run(asking, tiny):
    folder = asking(token_healing=True)
    with pytest.raises(ModelError, match=r"generation_config\.token_healing"):
        answered(folder)
    assert ids(answered(folder, generate_args={"token_healing": False})[0]) == generated(tiny)


def test_the_sampling_section_wins_over_the_models_own_and_the_run_says_so(asking, tiny):
    folder = asking(do_sample=True, temperature=0.6, top_p=0.5, top_k=3, repetition_penalty=1.4)
    expected, _, _ = answered(tiny)
    for settings in ({}, {"engine": "transformers", "batch_size": 1}):
        outcomes, _, notes = answered(folder, **settings)
        assert ids(outcomes) == ids(expected)
        (note,) = [note for note in notes if "generation_config asks for" in note]
        assert "sampling instead of greedy decoding" in note
        assert "repetition_penalty 1.4" in note
    sampled = {"temperature": 0.6, "seed": 1}
    ours, _, notes = answered(folder, sampling=sampled)
    assert ids(ours) == ids(answered(tiny, sampling=sampled)[0])
    assert any("top_p 0.5, top_k 3, repetition_penalty 1.4" in note for note in notes)


def test_a_model_that_asks_for_nothing_is_not_talked_about(tiny):
    assert not [note for note in answered(tiny)[2] if "generation_config" in note]


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.3}, {}])
def test_padding_in_stock_batches_changes_no_answer(asking, tiny, sampling):
    """Padding is the end token here: a penalty on what stands before would count it."""
    folder = asking(no_repeat_ngram_size=3) if not sampling else tiny
    alone, _, _ = answered(folder, "none", sampling, engine="transformers", batch_size=1)
    together, _, _ = answered(folder, "none", sampling, engine="transformers", batch_size=4)
    assert ids(together) == ids(alone)


def test_what_a_model_asks_for_beyond_sampling_is_found_in_its_folder(asking, tiny, tmp_path):
    assert asked_beyond_sampling(tiny) == []
    folder = asking(do_sample=True, temperature=0.6, no_repeat_ngram_size=2, num_beams=3, typical_p=1.0)
    assert asked_beyond_sampling(folder) == ["no_repeat_ngram_size", "num_beams"]
    assert asked_beyond_sampling(asking(forced_bos_token_id=1, min_length=0)) == ["forced_bos_token_id"]
    assert asked_beyond_sampling(str(tmp_path)) == []
    (tmp_path / "generation_config.json").write_text("null")
    assert asked_beyond_sampling(str(tmp_path)) == []
