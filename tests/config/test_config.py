import pytest

from ragspec.config.load import build_config, load_config
from ragspec.errors import ConfigError
from tests.conftest import ROOT

SAMPLE_CONFIGS = sorted((ROOT / "sample_configs").glob("*.yaml"))


def load(tmp_path, text, *overrides, **direct):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_config(str(path), overrides, **direct)[0]


@pytest.mark.parametrize("path", SAMPLE_CONFIGS, ids=lambda path: path.name)
def test_every_sample_config_loads(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    load_config(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: demo\nsampeling: {seed: 1}", '"sampeling" is not a known key; did you mean "sampling"?'),
        (
            "model: demo\nsampling: {temprature: 1}",
            '"sampling.temprature" is not a known key; did you mean "temperature"?',
        ),
        ("model: demo\nsampling: {temperature: .nan}", "sampling.temperature: NaN is not allowed: must be"),
        (
            "model: demo\nsampling: {temperature: -1}",
            "sampling.temperature: -1 is not allowed: must be greater than or",
        ),
        (
            "model: demo\nsampling: {temperature: hot}",
            'sampling.temperature: "hot" is not allowed: must be a valid number',
        ),
        ("model: demo\nsampling: {max_new_tokens: 0}", "sampling.max_new_tokens: 0 is not allowed"),
        ("model: demo\nsampling: {max_new_tokens: true}", "sampling.max_new_tokens: true is not allowed"),
        ("model: demo\nsampling: {top_p: 0}", "sampling.top_p: 0 is not allowed"),
        (
            "model: demo\nspeculation: {num_tokens: 0}",
            'num_tokens: 0 is not allowed: must be a whole number from 1, or "auto"',
        ),
        (
            "model: demo\nspeculation: {num_tokens: many}",
            'num_tokens: "many" is not allowed: must be a whole number from 1',
        ),
        ("model: demo\nspeculation: {method: draftmodel}", '"draftmodel" is not known; did you mean "draft_model"?'),
        (
            "model: demo\nrunner: huggingface\nspeculation: {method: eagle3}",
            'runner "huggingface" does not have "eagle3" (it needs runner vllm); choose one of none,',
        ),
        ("model: demo\nspeculation: {method: draft_model}", "speculation.draft_model: missing"),
        ("model: demo\nspeculation: {method: early_exit}", "speculation.early_exit_layer: missing"),
        ("model: demo\nspeculation: {draft_model: x}", 'speculation.draft_model: "x" has no effect with method "none"'),
        ("model: demo\nrunner: hugingface", 'runner: "hugingface" is not known; did you mean "huggingface"?'),
        ("model: demo\nrunner: base", 'runner: "base" is not known'),
        (
            "model: demo\nrunner_args: {batchsize: 4}",
            '"runner_args.batchsize" is not a known key; did you mean "batch_size"?',
        ),
        (
            "model: demo\nrunner_args: {batch_size: 0}",
            "runner_args.batch_size: 0 is not allowed: must be a whole number from 1",
        ),
        ("runner: huggingface", "model: missing"),
        ("model: [a", "c.yaml: not valid YAML"),
        ("model: demo\nmodel: demo", 'c.yaml:2: not valid YAML: key "model" appears twice'),
        ("- a\n- b", "must contain keys and values"),
        ("", "must contain keys and values"),
        ("model: demo\nrunner_args: &a {model_args: *a}", "nested too deeply, or contains itself"),
        ("model: demo\nprompt: {template: nowhere.jinja}", 'prompt.template: cannot read "nowhere.jinja"'),
        ("model: demo\nsampling: 3", "sampling: 3 is not allowed: must contain keys and values"),
        ("model: demo\nretrieval: {top_k: 3}", "retrieval.index: missing; name the folder of the index"),
        (
            "model: demo\nstructured: {choice: [yes, no]}",
            "structured.choice.0: true is not allowed: must be a valid string; in YAML, a text such as yes, no, on, "
            "off or true needs quotes",
        ),
        ("model: demo\nsampling: {stop: ['']}", 'sampling.stop.0: "" is not allowed: must have at least 1 character'),
    ],
)
def test_bad_config_is_one_line_that_names_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    line = str(caught.value)
    assert message in line
    assert "c.yaml" in line
    assert "\n" not in line


def test_missing_config_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_config("nowhere.yaml")


TEXTS = [
    *(
        "null",
        "~",
        "yes",
        "off",
        "42",
        "1e3",
        "0x1F",
        "2024-01-01",
        "1:30",
        "",
        " x ",
        "a: b",
        "a #b",
        "#b",
        "- x",
        "?",
    ),
    *("*x", "&a", "!t", "%p", "@q", "`c", "|", ">", '"q"', "'q'", '"', "[a]", "[a", "{a: 1}", "{a", "a=b", "\n", "---"),
]
TEXT_KEYS = ["prompt.system", "prompt.query_prefix", "runner_args.revision", "retrieval.storage_options.region"]


@pytest.mark.parametrize("key", TEXT_KEYS)
@pytest.mark.parametrize("text", TEXTS)
def test_set_takes_a_text_as_it_stands(tmp_path, key, text):
    raw = config_value(load(tmp_path, "model: demo\nretrieval: {index: x}", f"{key}={text}"), key)
    assert raw == text


def config_value(config, key):
    found = config.model_dump()
    for part in key.split("."):
        found = found[part]
    return found


@pytest.mark.parametrize("text", [text for text in TEXTS if text not in ("", "[a]")])
def test_set_takes_one_text_or_a_list_in_brackets(tmp_path, text):
    assert load(tmp_path, "model: demo", f"sampling.stop={text}").sampling.stop == [text]
    if not text.strip().startswith(("[", "{")):
        assert load(tmp_path, "model: demo", f"input={text}").input.path == [text]
        assert load(tmp_path, "model: demo", f"output={text}").output.path == text


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("sampling.stop=[a, '#b', 1, null, yes, \"\\n\"]", ["a", "#b", "1", "null", "yes", "\n"]),
        ("sampling.temperature=1e-1", 0.1),
        ("sampling.logprobs=null", None),
        ("sampling.logprobs=", None),
        ("sampling.logit_bias={5: 1}", {5: 1.0}),
        ("sampling.logit_bias.5=-1", {5: -1.0}),
        ("prompt.chat=no", False),
        ("prompt.chat=auto", "auto"),
        ("speculation.num_tokens=4", 4),
        ("speculation.num_tokens=auto", "auto"),
        ("runner_args.compile=off", False),
        ("runner_args.batch_size=auto", "auto"),
        ("runner_args.device=3", "3"),
        ("runner_args.model_args.a=true", True),
        ("runner_args.model_args.a=1.5", 1.5),
        ("runner_args.model_args.a='1.5'", "1.5"),
        ("runner_args.model_args.a=x #y: z", "x #y: z"),
        ("runner_args.model_args.a=2024-01-01", "2024-01-01"),
        ("runner_args.model_args.a={b: [1, x]}", {"b": [1, "x"]}),
        ("speculation.extra.a=*x", "*x"),
        ("structured.json_schema={type: object}", {"type": "object"}),
        ("structured.choice=[yes, 1]", ["yes", "1"]),
        ("structured.regex=[a-c] #1", "[a-c] #1"),
        ("input.path=[1, b]", ["1", "b"]),
        ("input.path=[ab].jsonl", ["[ab].jsonl"]),
        ("output.part_records=5", 5),
        ("retrieval.file_types=.md", [".md"]),
    ],
)
def test_set_reads_a_value_as_its_keys_type_means_it(tmp_path, given, value):
    config = load(tmp_path, "model: demo\nspeculation: {method: context}\nretrieval: {index: x}", given)
    key = given.partition("=")[0].removesuffix(".5")
    assert config_value(config, key) == value
    assert type(config_value(config, key)) is type(value)


def test_set_reads_arguments_of_the_runner_that_is_set(tmp_path):
    given = ["runner_args.seed=3", "runner_args.revision=3", "runner=vllm", "runner_args.guard=no"]
    assert load(tmp_path, "model: demo", *given).runner_args == {"seed": 3, "revision": 3, "guard": False}
    given = ["runner=fake", "runner_args.fail_ids=[1, null]", "runner_args.delay_s=0"]
    assert load(tmp_path, "model: demo", *given).runner_args == {"fail_ids": ["1", "null"], "delay_s": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sampling.temperature=0.5 # hot", 'sampling.temperature: "0.5 # hot" is not allowed'),
        ("sampling.seed=null", "sampling.seed: null is not allowed"),
        (
            "runner_args.model_args.a=[1, 2] # both",
            "--set runner_args.model_args.a: not valid YAML: there is more after",
        ),
        ("runner_args.model_args.a=[1, 2", "--set runner_args.model_args.a: not valid YAML"),
        ("structured.choice=a", "structured.choice"),
        ("retrieval={index", "--set retrieval: not valid YAML"),
    ],
)
def test_set_refuses_what_its_keys_type_does_not_take(tmp_path, given, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "model: demo", given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_passages_can_be_mapped_by_a_path_or_by_their_fields(tmp_path):
    mapped = load(
        tmp_path, "model: demo\ninput: {path: a, columns: {contexts: docs}}", "input.columns.contexts.text=body"
    )
    assert mapped.input.columns.given == {"contexts": {"path": "docs", "text": "body"}}
    plain = load(tmp_path, "model: demo\ninput: {path: a, columns: {contexts: docs}}")
    assert plain.input.columns.given == {"contexts": "docs"}
    assert plain.identity()["columns"] == {"contexts": "docs"}  # outputs that were begun with it go on
    with pytest.raises(ConfigError, match=r'"input.columns.contexts.txt" is not a known key; did you mean "text"'):
        load(tmp_path, "model: demo\ninput: {path: a, columns: {contexts: {path: docs, txt: body}}}")


def test_set_overrides_any_key(tmp_path):
    config = load(
        tmp_path, "model: demo", "sampling.temperature=0.5", "sampling.stop=[a, b]", "runner_args.batch_size=2"
    )
    assert (config.sampling.temperature, config.sampling.stop) == (0.5, ["a", "b"])
    assert config.runner_args == {"batch_size": 2}


@pytest.mark.parametrize("override", ["sampling.seed", "=3", "model.name=3"])
def test_bad_override_is_explained(tmp_path, override):
    with pytest.raises(ConfigError, match="--set"):
        load(tmp_path, "model: demo", override)


def test_flags_win_over_set_and_file(tmp_path):
    config = load(tmp_path, "model: demo\ninput: a", "input=b", input="c", output=None)
    assert (str(config.input), str(config.output)) == ("c", "-")


def test_merge_keys_work_and_empty_sections_are_defaults(tmp_path):
    text = "model: demo\nsampling: &s {seed: 3}\nprompt:\nspeculation:\n  <<: {method: prompt_lookup}\n"
    config = load(tmp_path, text)
    assert (config.sampling.seed, config.speculation.method) == (3, "prompt_lookup")


def test_exponents_without_a_dot_are_numbers(tmp_path):
    assert load(tmp_path, "model: demo\nsampling: {temperature: 1e-1}").sampling.temperature == 0.1


def test_template_file_is_replaced_by_its_text(tmp_path):
    (tmp_path / "t.jinja").write_text("Q: {{ query }}")
    config = load(tmp_path, f"model: demo\nprompt: {{template: {tmp_path / 't.jinja'}}}")
    assert config.prompt.template == "Q: {{ query }}"


def test_sampled_batches_must_keep_their_size():
    sampled = {"model": "demo", "sampling": {"temperature": 1.0}}
    one, two = (build_config({**sampled, "runner_args": {"batch_size": size}}) for size in (1, 2))
    assert one.identity() != two.identity()


def test_identity_leaves_out_what_cannot_change_an_answer():
    one = build_config({"model": "demo", "output": "a", "runner_args": {"batch_size": 1}})
    two = build_config({"model": "demo", "output": "b", "runner_args": {"batch_size": 4}, "order": "finish"})
    other = build_config({"model": "demo", "sampling": {"seed": 1}})
    assert one.identity() == two.identity() != other.identity()


@pytest.mark.parametrize(("word", "meant"), [("on", "on"), ("off", "off"), ("true", "on"), ("auto", "auto")])
def test_on_and_off_mean_what_they_say_though_yaml_reads_booleans(tmp_path, word, meant):
    config = load(tmp_path, f"model: demo\nrunner: huggingface\nrunner_args: {{compile: {word}}}")
    assert config.args().compile == meant


@pytest.mark.parametrize(("given", "meant"), [(1e-5, 1e-5), (9e-6, 0.0), (5e-324, 0.0), (0, 0.0)])
def test_a_temperature_that_scores_cannot_be_divided_by_is_greedy(given, meant):
    assert build_config({"model": "demo", "sampling": {"temperature": given}}).sampling.temperature == meant
