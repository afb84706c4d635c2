"""Whose code may run: trust in the target is none in the draft, nor in any other model."""

import json
import shutil

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.models.resolve import brings_code, resolve
from ragspec.retrieval.chunks import model_tokens
from ragspec.run.doctor import examine_config
from ragspec.runners.huggingface import runner as huggingface
from ragspec.runners.vllm.config import check_draft_code
from tests.conftest import SAMPLE

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "{kind}"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(params=["llama", "mine"])
def coded(request, tiny_draft, tmp_path):
    """A draft with code of its own, which leaves a mark where it runs: one that can do without, one that cannot."""
    folder, mark = tmp_path / f"coded_{request.param}", tmp_path / "code-ran"
    shutil.copytree(tiny_draft, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": request.param,
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE.format(mark=str(mark), kind=request.param))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    tokens |= {"auto_map": {"AutoTokenizer": [None, "own.Tokens"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return request.param, str(folder), mark


def config_of(tiny, draft, *, trust=False, draft_trust=False, runner="huggingface", **more):
    spec = {"method": "draft_model", "draft_model": draft, "draft_trust_remote_code": draft_trust}
    return build_config(
        {"model": tiny, "runner": runner, "input": str(SAMPLE), "speculation": spec, **more}
        | {"runner_args": {"trust_remote_code": trust}}
    )


def test_a_trusted_target_lets_no_code_of_the_draft_run(tiny, coded):
    kind, draft, mark = coded
    runner = huggingface.Runner(config_of(tiny, draft, trust=True))
    if kind == "mine":
        with pytest.raises(ConfigError) as caught:
            runner.check()
        assert str(caught.value).startswith(f'speculation.draft_model: "{draft}": needs its own code to load; ')
        assert "set speculation.draft_trust_remote_code: true" in str(caught.value)
    else:
        runner.check()
        with runner:
            pass
    assert not mark.exists()


def test_a_trusted_draft_runs_its_code_beside_a_target_that_may_not(tiny, coded):
    _, draft, mark = coded
    runner = huggingface.Runner(config_of(tiny, draft, draft_trust=True))
    runner.check()
    with runner:
        assert mark.exists()
    mark.unlink()
    runner = huggingface.Runner(config_of(draft, tiny, draft_trust=True))
    if coded[0] == "mine":
        with pytest.raises(ConfigError, match=r"model: .* set runner_args\.trust_remote_code: true"):
            runner.check()
    assert not mark.exists()


def test_a_draft_tokenizer_is_trusted_no_more_than_the_draft(tiny, tiny_stranger, coded):
    _, draft, mark = coded
    config = config_of(tiny, tiny_stranger, trust=True)
    spec = config.speculation.model_copy(update={"draft_tokenizer": draft})
    try:
        huggingface.Runner(config.model_copy(update={"speculation": spec})).check()
    except ConfigError as error:
        assert "speculation.draft_tokenizer" in str(error)  # noqa: PT017 (it may load, and it may not)
    assert not mark.exists()


def test_the_doctor_runs_no_code_that_a_run_would_not(tiny, coded):
    kind, draft, mark = coded
    findings = list(examine_config(config_of(tiny, draft, trust=True), []))
    assert not mark.exists()
    assert any("draft_trust_remote_code" in finding.text for finding in findings) == (kind == "mine")


@pytest.mark.parametrize("config", [{"method": "draft_model"}, {"method": "eagle3"}, {}])
def test_vllm_which_trusts_both_or_neither_is_not_handed_code_of_the_draft(tiny, coded, config):
    _, draft, mark = coded
    config |= {"model": draft}
    with pytest.raises(ConfigError, match="set both to true"):
        check_draft_code(config, tiny, trust=True, draft_trust=False)
    check_draft_code(config, tiny, trust=True, draft_trust=True)
    check_draft_code(config, tiny, trust=False, draft_trust=False)  # vLLM runs none
    check_draft_code(config, draft, trust=True, draft_trust=False)  # the target's own heads
    check_draft_code({**config, "model": tiny}, tiny, trust=True, draft_trust=False)
    assert not mark.exists()


@pytest.mark.parametrize("config", [None, {"method": "ngram"}, {"method": "custom_class", "model": "a.b.C"}])
def test_drafts_without_a_model_bring_no_code(config):
    check_draft_code(config, "m", trust=True, draft_trust=False)


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["draft_model", "speculative_config"])
def test_the_vllm_runner_refuses_a_draft_with_code_unless_both_are_trusted(tiny, coded, method):
    from ragspec.runners.vllm.runner import Runner

    _, draft, mark = coded
    config = config_of(tiny, draft, trust=True, runner="vllm")
    if method == "speculative_config":
        raw = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
        spec = config.speculation.model_copy(update={"method": method, "speculative_config": raw, "draft_model": None})
        config = config.model_copy(update={"speculation": spec})
    with pytest.raises(ConfigError, match=r"speculation\.draft_trust_remote_code") as caught:
        Runner(config).check()
    assert "runner_args.trust_remote_code" in str(caught.value)
    assert not mark.exists()


def test_other_models_than_target_and_draft_run_no_code_and_ask_nobody(coded, monkeypatch):
    """transformers that is told nothing asks on stdin, where records may come from."""
    _, folder, mark = coded
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    try:
        model_tokens(folder)
    except ConfigError as error:
        assert "ragspec runs only for the model and its draft" in str(error)  # noqa: PT017
    assert not mark.exists()


def test_an_embedding_model_with_code_is_refused_without_naming_a_key_that_is_none(coded):
    pytest.importorskip("sentence_transformers")
    from ragspec.retrieval.embedding import Embedder

    kind, folder, mark = coded
    if kind == "llama":
        pytest.skip("it loads without its code")
    with pytest.raises(ConfigError, match="which ragspec runs only for the model and its draft"):
        Embedder(folder)
    assert not mark.exists()


def test_code_is_seen_without_running(tiny, coded):
    _, folder, mark = coded
    assert brings_code(resolve(folder))
    assert not brings_code(resolve(tiny))
    assert not mark.exists()


def test_a_tokenizers_arguments_may_say_what_ragspec_says_too(tiny):
    config = build_config({"model": tiny, "runner_args": {"tokenizer_args": {"trust_remote_code": False}}})
    huggingface.Runner(config).check()
