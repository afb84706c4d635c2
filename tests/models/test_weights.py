"""Checkpoints that are not whole, or not a language model's: refused before anything is answered."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragspec.errors import ConfigError, ModelError
from ragspec.models.checks import INDEX, ONE, check_weights
from ragspec.models.loading import load_model
from ragspec.models.resolve import read_model_config, resolve
from ragspec.run.doctor import examine_config
from ragspec.runners.huggingface import runner as huggingface
from tests.conftest import SAMPLE, save_llama, train_tokenizer


def save_of_class(kind, tiny, folder, **changes):
    """Save a random model of another class with the tiny model's config."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(tiny)
    for key, value in changes.items():
        setattr(config, key, value)
    getattr(transformers, kind)(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{tiny}/{name}", folder)
    return folder


def copy(tiny, folder):
    shutil.copytree(tiny, folder)
    return folder


def rewrite(folder, change):
    tensors = load_file(folder / ONE)
    change(tensors)
    save_file(tensors, folder / ONE, metadata={"format": "pt"})
    return folder


def sharded(tiny, folder):
    from transformers import AutoModelForCausalLM

    copy(tiny, folder)
    (folder / ONE).unlink()
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(folder, max_shard_size="50KB")
    return folder


def drop(tensor):
    return lambda tiny, folder: rewrite(copy(tiny, folder), lambda tensors: tensors.pop(tensor))


def rename_head(tiny, folder):
    return rewrite(copy(tiny, folder), lambda t: t.update({"output.weight": t.pop("lm_head.weight")}))


def narrow_head(tiny, folder):
    return rewrite(copy(tiny, folder), lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:300].clone()}))


def overwrite(content):
    def damage(tiny, folder):
        (copy(tiny, folder) / ONE).write_bytes(content)
        return folder

    return damage


def cut(tiny, folder):
    file = copy(tiny, folder) / ONE
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def lose_shard(tiny, folder):
    sorted(sharded(tiny, folder).glob("model-*.safetensors"))[1].unlink()
    return folder


def lose_index(tiny, folder):
    (sharded(tiny, folder) / INDEX).unlink()
    return folder


def damage_index(tiny, folder):
    (sharded(tiny, folder) / INDEX).write_text("{")
    return folder


def lose_weights(tiny, folder):
    (copy(tiny, folder) / ONE).unlink()
    return folder


def pickle_weights(tiny, folder):
    torch.save(load_file(copy(tiny, folder) / ONE), folder / "pytorch_model.bin")
    (folder / ONE).unlink()
    return folder


BROKEN = {
    "a tensor left out": (drop("model.layers.1.mlp.up_proj.weight"), r"lack 1 of the 21 .*layers\.1\.mlp\.up_proj"),
    "no head": (drop("lm_head.weight"), r"lack 1 of the 21 tensors .*lm_head\.weight"),
    "embeddings left out": (drop("model.embed_tokens.weight"), r"embed_tokens"),
    "a head of another name": (rename_head, r"lm_head\.weight"),
    "a base model": (lambda tiny, folder: save_of_class("LlamaModel", tiny, folder), r"lm_head\.weight"),
    "a classifier": (
        lambda tiny, folder: save_of_class("LlamaForSequenceClassification", tiny, folder),
        r"is a LlamaForSequenceClassification",
    ),
    "a classifier with tied embeddings": (
        lambda tiny, folder: save_of_class("LlamaForSequenceClassification", tiny, folder, tie_word_embeddings=True),
        r"is a LlamaForSequenceClassification",
    ),
    "a tagger": (
        lambda tiny, folder: save_of_class("LlamaForTokenClassification", tiny, folder),
        r"is a LlamaForTokenClassification",
    ),
    "another shape": (narrow_head, r"the shapes of .*lm_head\.weight"),
    "a cut file": (cut, r"model\.safetensors \([\d,]+ bytes\) is damaged or cut off"),
    "an empty file": (overwrite(b""), r"\(0 bytes\) is damaged or cut off"),
    "a pointer": (overwrite(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), r"git lfs pull"),
    "a lost shard": (lose_shard, r"model-00002-of-\d+\.safetensors, listed in .* is missing"),
    "a lost index": (lose_index, r"no model\.safetensors\.index\.json"),
    "a damaged index": (damage_index, r"index\.json cannot be read"),
    "no weights": (lose_weights, r"the folder has no weights"),
    "pickled weights": (pickle_weights, r"runner_args\.model_args\.use_safetensors: false"),
}


def config_of(model, **more):
    from ragspec.config.load import build_config

    return build_config({"model": str(model), "runner": "huggingface", "input": str(SAMPLE), **more})


@pytest.fixture(params=BROKEN.values(), ids=BROKEN)
def broken(request, tiny, tmp_path):
    make, why = request.param
    return make(tiny, tmp_path / "broken"), why


def test_a_broken_checkpoint_is_refused_before_it_loads_and_doctor_says_so(broken):
    folder, why = broken
    with pytest.raises(ConfigError, match=why):
        huggingface.Runner(config_of(folder)).check()
    errors = [finding.text for finding in examine_config(config_of(folder), []) if finding.level == "error"]
    assert len(errors) == 1
    assert str(folder) in errors[0]


def test_a_broken_checkpoint_does_not_load_either(broken):
    folder, _ = broken
    if "Classification" in json.loads((folder / "config.json").read_text())["architectures"][0]:
        pytest.skip("only its config says that it is one")
    with pytest.raises(ModelError, match=str(folder)):
        load_model(resolve(str(folder)), device="cpu", dtype="auto")


@pytest.mark.vllm
@pytest.mark.parametrize(
    "word", [word for word in BROKEN if word not in ("no weights", "pickled weights", "a lost index")]
)
def test_vllm_does_not_start_with_a_broken_checkpoint(word, tiny, tmp_path):
    from ragspec.runners.vllm import runner as vllm

    make, why = BROKEN[word]
    folder = make(tiny, tmp_path / "broken")
    with pytest.raises(ConfigError, match=why):
        vllm.Runner(config_of(folder, runner="vllm")).check()


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlamaModel"])
def test_tied_weights_lack_nothing(kind, tiny, tmp_path):
    folder = save_of_class(kind, tiny, tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / ONE)
    source = resolve(str(folder))
    check_weights(source, read_model_config(source))


def test_shards_and_tensors_that_nobody_needs_are_fine(tiny, tmp_path):
    for folder in (
        sharded(tiny, tmp_path / "shards"),
        rewrite(copy(tiny, tmp_path / "more"), lambda tensors: tensors.update({"vision.weight": torch.ones(3)})),
    ):
        source = resolve(str(folder))
        check_weights(source, read_model_config(source))


@pytest.mark.parametrize(("value", "why"), [(float("nan"), "not numbers in float32"), (0.0, "the same score")])
def test_weights_whose_scores_say_nothing_are_refused(value, why, tiny, tmp_path):
    folder = rewrite(copy(tiny, tmp_path / "noise"), lambda t: t["lm_head.weight"].fill_(value))
    with pytest.raises(ModelError, match=why):
        load_model(resolve(str(folder)), device="cpu", dtype="auto")


def test_target_and_draft_have_switches_of_their_own_for_pickled_weights(tiny, tiny_draft, tmp_path):
    pickled = pickle_weights(tiny_draft, tmp_path / "pickled")
    spec = {"method": "draft_model", "draft_model": str(pickled)}
    with pytest.raises(ConfigError, match=r"speculation\.draft_model_args\.use_safetensors: false"):
        huggingface.Runner(config_of(tiny, speculation=spec)).check()
    spec["draft_model_args"] = {"use_safetensors": False}
    runner = huggingface.Runner(config_of(tiny, speculation=spec, runner_args={"compile": "off"}))
    runner.check()
    with runner:
        assert runner.about()["draft_model"] == str(pickled)


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_a_broken_draft_is_refused(engine, tiny, tiny_draft, tmp_path):
    folder = drop("lm_head.weight")(tiny_draft, tmp_path / "draft")
    spec = {"method": "draft_model", "draft_model": str(folder)}
    with pytest.raises(ConfigError, match=r"speculation\.draft_model: .*lm_head\.weight"):
        huggingface.Runner(config_of(tiny, speculation=spec, runner_args={"engine": engine})).check()


@pytest.mark.parametrize("content", ["1", "null", "[]"])
def test_a_generation_config_that_is_no_object_is_named(tiny, tmp_path, content):
    folder = copy(tiny, tmp_path / "broken")
    (folder / "generation_config.json").write_text(content)
    said = f'"{folder}": generation_config.json must be a JSON object; fix or delete it'
    spec = {"method": "draft_model", "draft_model": str(folder)}
    for config, key in ((config_of(folder), "model"), (config_of(tiny, speculation=spec), "speculation.draft_model")):
        with pytest.raises(ConfigError) as refused:
            huggingface.Runner(config).check()
        assert str(refused.value) == f"{key}: {said}"


def test_a_file_that_is_no_gguf_is_refused_in_one_line(tmp_path):
    for content, why in (
        (b"GGUF", r"has no tensors \(4 bytes\)"),
        (b"", r"is not a GGUF file"),
        (b"PK\x03\x04 and so on, for a while", r"is not a GGUF file"),
        (b"GGUF\x03\0\0\0" + b"\x01" + bytes(15), r"is it complete\?"),
    ):
        file = tmp_path / "model.gguf"
        file.write_bytes(content)
        with pytest.raises((ConfigError, ModelError), match=why):
            resolve(str(file))


def test_a_cut_gguf_is_refused_in_one_line(tmp_path, monkeypatch):
    from ragspec.models.resolve import _demo_file

    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    whole = _demo_file().read_bytes()
    for length in (1000, 2_000_000):
        file = tmp_path / "cut.gguf"
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: transformers cannot read"):
            resolve(str(file))


def test_tensors_that_nothing_uses_are_told(tiny, tmp_path):
    folder = copy(tiny, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1, "layer_types": None}))
    (note,) = check_weights(resolve(str(folder)), read_model_config(resolve(str(folder))))
    assert "tensors of the model's files are not used (model.layers.1." in note
    assert check_weights(resolve(tiny), read_model_config(resolve(tiny))) == []


def test_an_index_beside_a_single_file_is_not_looked_at_as_transformers_does_not(tiny, tmp_path):
    folder = copy(tiny, tmp_path / "left")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    source = resolve(str(folder))
    config = read_model_config(source)
    check_weights(source, config)
    missing = r"model-00001-of-00002.safetensors, listed in .* is missing"
    with pytest.raises(ConfigError, match=missing):  # vLLM does look
        check_weights(source, config, by_transformers=False)


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tiny, tmp_path, monkeypatch):
    """A LoRA adapter of the tiny model, in a folder of its own."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change_adapter(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_adapter_is_merged_into_its_base_model(adapter, tiny):
    import peft
    from transformers import AutoModelForCausalLM

    folder = resolve(str(adapter)).path
    assert resolve(str(adapter)).path == folder, "once"
    ids = torch.tensor([[5, 6, 7]])
    base = AutoModelForCausalLM.from_pretrained(tiny)
    plain = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, str(adapter))(ids).logits
    found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert torch.allclose(found, adapted, atol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.parametrize("changes", [{"target_modules": ["q_proj"]}, {"layers_to_transform": [0]}])
def test_an_adapter_is_not_merged_in_part(adapter, changes):
    change_adapter(adapter, **changes)
    with pytest.raises(
        ConfigError, match=r"tensors of the adapter \(.*lora_A.*\) are for layers that its adapter_conf"
    ):
        resolve(str(adapter))


def test_another_adapter_of_the_same_name_is_merged_anew(adapter):
    before = resolve(str(adapter)).path
    rewrite_adapter(adapter, lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
    assert resolve(str(adapter)).path != before


def rewrite_adapter(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_an_adapter_beside_a_models_weights_is_not_ignored(adapter, tiny):
    shutil.copytree(tiny, adapter, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=r"the weights of a model and a PEFT adapter"):
        resolve(str(adapter))


def test_an_adapter_that_cannot_be_merged_is_refused_in_one_line(adapter, tiny_gpt2, tmp_path):
    def lose(folder):
        (folder / "adapter_model.safetensors").unlink()

    def cut_off(folder):
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-50])

    for number, (damage, why) in enumerate(
        (
            (lambda f: change_adapter(f, task_type="SEQ_CLS"), r"for SEQ_CLS, which does not generate text"),
            (lambda f: change_adapter(f, base_model_name_or_path=None), r"does not name the base model"),
            (lambda f: change_adapter(f, base_model_name_or_path="/nowhere"), r'"/nowhere": no such folder'),
            (lambda f: change_adapter(f, base_model_name_or_path=tiny_gpt2), r"cannot be merged into"),
            (lambda f: rewrite_adapter(f, lambda t: t.pop(sorted(t)[0])), r"the adapter is incomplete"),
            (lose, r"without weights"),
            (cut_off, r"cannot be merged"),
            (lambda f: (f / "adapter_config.json").write_text("["), r"cannot be read"),
        )
    ):
        folder = tmp_path / f"bad{number}"
        shutil.copytree(adapter, folder)
        damage(folder)
        with pytest.raises(ConfigError, match=why) as caught:
            resolve(str(folder))
        assert "\n" not in str(caught.value)


def test_an_adapter_with_tokens_of_its_own_brings_their_embeddings(adapter, sample_texts, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = save_llama(tmp_path / "base", train_tokenizer(400, sample_texts))
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(410)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "wider")
    source = resolve(str(tmp_path / "wider"))
    assert read_model_config(source).vocab_size == 410


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_of_two_tied_layers_changes_that_one_alone(target, adapter, sample_texts, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = save_llama(tmp_path / "base", train_tokenizer(400, sample_texts), tied=True)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", target], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "one")
    ids = torch.tensor([[5, 6, 7]])
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "one")(ids).logits
    found = AutoModelForCausalLM.from_pretrained(resolve(str(tmp_path / "one")).path)(ids).logits
    assert torch.allclose(found, adapted, atol=1e-3)


def test_what_a_base_model_asks_for_is_kept_even_if_transformers_would_not_save_it(adapter, tiny, tmp_path):
    base = shutil.copytree(tiny, tmp_path / "base")
    asked = json.loads((base / "generation_config.json").read_text()) | {"do_sample": False, "temperature": 0.6}
    (base / "generation_config.json").write_text(json.dumps(asked))
    change_adapter(adapter, base_model_name_or_path=str(base))
    found = json.loads((Path(resolve(str(adapter)).path) / "generation_config.json").read_text())
    assert (found["temperature"], found["eos_token_id"]) == (0.6, asked["eos_token_id"])


def test_an_adapter_whose_tokenizer_changed_is_merged_anew(adapter, tiny):
    before = resolve(str(adapter)).path
    shutil.copy(Path(tiny) / "tokenizer.json", adapter)
    shutil.copy(Path(tiny) / "tokenizer_config.json", adapter)
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    after = Path(resolve(str(adapter)).path)
    assert (str(after) != before, (after / "chat_template.jinja").is_file()) == (True, True)


def test_without_peft_an_adapter_says_what_to_install(adapter, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else found(name, *rest))
    with pytest.raises(ConfigError, match=r'pip install "ragspec\[peft\]"'):
        resolve(str(adapter))
