"""AutoGluon-RAG's three tutorial configurations as they are written there, with models that are here (vLLM's third is
in runners/test_vllm.py): they run on the engine, at any batch size, and no answer is another for it."""

import pytest
import torch
import yaml

from ragspec.config.load import config_of, load_config
from ragspec.inputs.record import parse_record
from ragspec.run.generate import generate
from ragspec.run.session import prepare
from tests.conftest import ROOT, SAMPLE, read_jsonl, save_llama, train_tokenizer, wide
from tests.families import learn_by_heart

pytestmark = pytest.mark.demo
NEW = 24


def answered(tmp_path, name, raw, batch_size):
    """Answer the sample questions with a config in AutoGluon-RAG's form."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    output = tmp_path / f"{name}.jsonl"
    overrides = [f"input={SAMPLE}", f"output={output}", f"sampling.max_new_tokens={NEW}"]
    config, _ = load_config(str(path), [*overrides, f"runner_args.batch_size={batch_size}"])
    summary = generate(config)
    assert summary.failed == 0
    return {line["id"]: line["output"] for line in read_jsonl(output)}, summary


@pytest.fixture(scope="module")
def plain(demo, tmp_path_factory):
    raw = {"generator_model_name": demo, "generator_model_platform": "huggingface"}
    texts, _ = answered(tmp_path_factory.mktemp("plain"), "plain", raw, 1)
    assert all(texts.values())
    return texts


@pytest.fixture(scope="module")
def other_draft(demo, plain, tmp_path_factory):
    """A draft of other tokens that knows the sample's prompts and the target's answers by heart."""
    from transformers import AutoModelForCausalLM

    config, _ = config_of({"generator_model_name": demo, "generator_model_platform": "huggingface"}, "tutorial")
    session = prepare(config)
    texts = []
    for number, record in enumerate(read_jsonl(SAMPLE)):
        prompt = session.prompts.build(parse_record(record, number, config.prompt.source), NEW)
        texts.append(session.runner.tokenizer.decode(prompt.token_ids) + plain[record["id"]])
    tokenizer = train_tokenizer(700, texts)
    folder = save_llama(tmp_path_factory.mktemp("other") / "draft", tokenizer, hidden=96, layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert learn_by_heart(model, tokenizer, texts, steps=150) < 1
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("batch_size", [*wide(1), 16])
@pytest.mark.parametrize("tutorial", ["autogluon_draft_model.yaml", *wide("autogluon_universal.yaml")])
def test_a_tutorial_config_runs_on_the_engine(tutorial, batch_size, tmp_path, demo, demo_draft, other_draft, plain):
    raw = yaml.safe_load((ROOT / "sample_configs" / tutorial).read_text())
    generate_params = raw["generator_model_platform_args"]["hf_generate_params"]
    draft = other_draft if "assistant_tokenizer" in generate_params else demo_draft
    raw["generator_model_name"] = demo
    raw["generator_model_platform_args"]["hf_generate_params"] = dict.fromkeys(generate_params, draft)
    texts, summary = answered(tmp_path, "tutorial", raw, batch_size)
    assert texts == plain
    runner = summary.about["runner"]
    assert (runner["engine"], runner["batch_size"]) == ("ragspec", batch_size)
    assert runner["draft_vocabulary"] == ("other" if draft == other_draft else "same")
    assert summary.spec.drafted > 0
    if draft == other_draft:
        assert summary.spec.accepted > 0
