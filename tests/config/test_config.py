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


def test_set_overrides_any_key_with_yaml_values(tmp_path):
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
