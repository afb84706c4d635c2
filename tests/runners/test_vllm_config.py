"""What can be judged without vLLM: its words for our speculation, and what does not combine."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

from ragspec.config.load import build_config, load_config
from ragspec.config.sections import SpeculationConfig
from ragspec.errors import ConfigError
from ragspec.records import Sampling, TokenLogprob
from ragspec.runners.vllm import runner as vllm
from ragspec.runners.vllm.config import check_build, check_memory, check_parallel, speculative_config
from ragspec.runners.vllm.patches.steps import verified_in
from ragspec.runners.vllm.patches.undrafted import expanded, lost
from ragspec.runners.vllm.stream import logprobs_of, settings_of, spec_stats


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 15}]}, "block_size": 16}, 15),
        ({"dflash_config": {"block_size": 10}}, 9),
        ({"medusa_num_heads": 4}, 4),
        ({}, None),
    ],
)
def test_a_head_that_says_how_many_tokens_it_drafts_is_believed(tmp_path, config, tokens):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    found = translated(method="dflash", draft_model=str(tmp_path))
    assert found.get("num_speculative_tokens") == tokens
    assert translated(method="dflash", draft_model=str(tmp_path), num_tokens=2)["num_speculative_tokens"] == 2


def translated(**spec):
    return speculative_config(SpeculationConfig(**spec))


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ({"method": "none"}, None),
        (
            {"method": "prompt_lookup"},
            {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        ),
        (
            {"method": "prompt_lookup", "num_tokens": 3, "ngram_max": 1},
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1},
        ),
        (
            {"method": "draft_model", "draft_model": "d", "num_tokens": 5},
            {"method": "draft_model", "num_speculative_tokens": 5, "model": "d"},
        ),
        ({"method": "suffix"}, {"method": "suffix"}),
        (
            {"method": "suffix", "num_tokens": 16, "extra": {"suffix_decoding_max_tree_depth": 32}},
            {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_tree_depth": 32},
        ),
        ({"method": "eagle3", "draft_model": "e"}, {"method": "eagle3", "num_speculative_tokens": 3, "model": "e"}),
        ({"method": "medusa", "draft_model": "m"}, {"method": "medusa", "model": "m"}),
        ({"method": "mtp", "num_tokens": 1}, {"method": "mtp", "num_speculative_tokens": 1}),
        ({"method": "dflash", "draft_model": "f"}, {"method": "dflash", "model": "f"}),
        (
            {"method": "draft_model", "draft_model": "d", "num_tokens_by_batch_size": [[1, 8, 5], [9, 64, 0]]},
            {
                "method": "draft_model",
                "num_speculative_tokens": 4,
                "model": "d",
                "num_speculative_tokens_per_batch_size": [(1, 8, 5), (9, 64, 0)],
            },
        ),
        (
            {"method": "speculative_config", "speculative_config": {"method": "new", "knob": 1}},
            {"method": "new", "knob": 1},
        ),
    ],
)
def test_speculation_in_vllms_words(spec, config):
    assert translated(**spec) == config


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa", "dflash"])
def test_heads_need_the_name_of_their_draft(method):
    with pytest.raises(ConfigError, match=f'"{method}" needs the name of a draft model'):
        build_config({"model": "demo", "runner": "vllm", "speculation": {"method": method}})


def test_a_raw_speculative_config_goes_with_its_method_only():
    with pytest.raises(ConfigError, match="only valid with method: speculative_config"):
        build_config({"model": "m", "runner": "vllm", "speculation": {"speculative_config": {"method": "x"}}})


@pytest.mark.parametrize(
    ("args", "speculation"),
    [
        ({"speculative_model": "d", "num_speculative_tokens": 2}, {"method": "draft_model", "num_tokens": 2}),
        ({"speculative_config": {"method": "ngram"}}, {"method": "speculative_config"}),
    ],
)
def test_speculation_among_the_runner_args_is_moved_to_its_section(tmp_path, args, speculation):
    path = tmp_path / "c.yaml"
    path.write_text(f"model: m\nrunner: vllm\nrunner_args: {args | {'max_model_len': 64}}\n".replace("'", '"'))
    config, _ = load_config(str(path))
    assert config.runner_args == {"max_model_len": 64}
    assert config.speculation.model_dump().items() >= speculation.items()
    path.write_text(path.read_text() + "speculation: {method: prompt_lookup}\n")
    with pytest.raises(ConfigError, match="duplicates the speculation section"):
        load_config(str(path))


def test_what_a_build_lacks_is_said_with_the_way_out(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps arctic-inference"):
        check_build({"method": "suffix"}, on_cpu=True, version="0.32.0")
    with pytest.raises(ConfigError, match="ngram_gpu needs a GPU"):
        check_build({"method": "ngram_gpu"}, on_cpu=True, version="0.32.0")
    check_build({"method": "ngram_gpu"}, on_cpu=False, version="0.32.0")


def test_a_method_that_a_release_dropped_is_refused_from_there_on():
    check_build({"method": "medusa"}, False, "0.32.1+cu130")
    with pytest.raises(ConfigError, match=r"medusa: vLLM removed it in 0.33, and this is 0.33.0"):
        check_build({"method": "medusa"}, False, "0.33.0+cu130")


def test_vllm_not_installed_names_the_extra(monkeypatch):
    runner = vllm.Runner(build_config({"model": "m", "runner": "vllm"}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "ragspec\[vllm\]"'):
        runner.check()


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        ({"tensor_parallel_size": 4}, None, "needs 4 GPUs, this machine has 2"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, None, "needs 4 GPUs"),
        ({"data_parallel_size": 2}, None, "one process drives one engine"),
        ({"tensor_parallel_size": 2}, {"draft_tensor_parallel_size": 3}, "must be 1 or the target's"),
    ],
)
def test_gpus_that_do_not_combine_are_refused(args, config, message):
    with pytest.raises(ConfigError, match=message):
        check_parallel(args, config, devices=2)


def test_parallel_sizes_that_fit_pass_with_a_note_where_due():
    assert check_parallel({"tensor_parallel_size": 2}, {"method": "ngram"}, devices=2) == []
    assert "last stage" in check_parallel({"pipeline_parallel_size": 2}, {"method": "ngram"}, devices=2)[0]


def test_a_model_larger_than_the_memory_is_refused_with_figures(tiny):
    check_memory("tiny", tiny, 1 << 30)
    with pytest.raises(ConfigError, match=r"GiB of weights, 0\.0 GiB are free"):
        check_memory("tiny", tiny, 100)


def test_steps_without_a_draft_are_counted_from_the_tokens():
    class Metrics:
        per_step_drafted = (4, 4, 0, 2)
        per_step_accepted = (4, 1, 0, 0)

    stats = spec_stats(verified_in(Metrics()), 12, 12)
    assert (stats.drafted, stats.accepted, stats.drafted_steps, stats.steps) == (10, 5, 3, 7)
    assert spec_stats(verified_in(None), 9, 9).steps == 9


def test_tokens_behind_the_end_of_an_answer_are_cut_from_the_counts():
    class Metrics:
        per_step_drafted = (4, 4)
        per_step_accepted = (4, 3)

    stats = spec_stats(verified_in(Metrics()), 10, 7)
    assert stats.steps + stats.accepted - stats.cut == 7
    assert stats.drafted >= stats.accepted


def test_a_draft_that_outruns_the_answer_hides_no_step():
    """19 steps of one token; the last of 20 tokens has a draft of 16 right ones behind it."""

    class Metrics:
        per_step_drafted = (16,)
        per_step_accepted = (16,)

    stats = spec_stats(verified_in(Metrics()), 20, 20, steps=20)
    assert (stats.steps, stats.accepted, stats.drafted, stats.cut) == (20, 1, 16, 1)


@pytest.mark.parametrize(
    ("sampling", "extra", "on_cpu", "first"),
    [
        ({"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 3}, {}, True, ""),
        ({"logit_bias": ((5, 1.0),)}, {}, False, "logit_bias"),
        ({"temperature": 1.0, "min_p": 0.1}, {}, False, "min_p"),
        ({"min_p": 0.1}, {}, False, ""),  # greedy
        ({"temperature": 1.0}, {}, False, ""),
        ({"temperature": 1.0}, {}, True, "temperature"),
        ({}, {"temperature": 1.0}, True, "temperature"),
        ({"temperature": 1.0}, {"temperature": 0.0}, True, ""),
        ({}, {"logit_bias": {5: 1.0}}, False, "logit_bias"),
    ],
)
def test_what_vllm_gets_wrong_in_drafts_is_known_from_all_settings(sampling, extra, on_cpu, first):
    assert lost(settings_of(Sampling(**sampling), extra), on_cpu).split(":")[0] == first


def test_each_rows_number_is_repeated_for_its_draft_tokens():
    numbers, ends = torch.tensor([0.0, 0.5, 2.0, 0.7]), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    assert expanded(numbers, ends, 6, replace_from=0, replace_to=1).tolist() == pytest.approx([1, 1, 2, 2, 2, 0.7])
    assert expanded(torch.tensor([4, 5]), torch.tensor([1, 3]), 3).tolist() == [4, 5, 5]
    assert expanded(numbers, torch.zeros(4, dtype=torch.int32), 0).tolist() == []


def test_logprobs_are_the_tokens_own_and_as_many_of_the_likeliest_as_were_asked_for():
    """vLLM tells of a token beside the likeliest ones, or among them, in any order, and of those after the end."""

    def told(**values):
        return {int(name[1:]): SimpleNamespace(logprob=value) for name, value in values.items()}

    steps = [told(t9=-4.0, t1=-0.1, t2=-2.5), told(t2=-0.7, t1=-0.6), told(t5=-0.1, t6=-3.0)]
    first, second = logprobs_of(steps, [9, 2], 2)
    assert first == TokenLogprob(-4.0, ((1, -0.1), (2, -2.5)))
    assert second == TokenLogprob(-0.7, ((1, -0.6), (2, -0.7)))
    assert logprobs_of(steps, [9], 0) == (TokenLogprob(-4.0),)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("backend", "mode", "allowed"),
    [
        ("flex_attention.FlexAttentionBackend", "FULL_AND_PIECEWISE", True),
        ("triton_attn.TritonAttentionBackend", "FULL_AND_PIECEWISE", True),
        ("triton_attn.TritonAttentionBackend", "PIECEWISE", False),
        ("triton_attn.TritonAttentionBackend", "NONE", False),
        ("mla.triton_mla.TritonMLABackend", "FULL_AND_PIECEWISE", False),
        ("cpu_attn.CPUAttentionBackend", "FULL_AND_PIECEWISE", False),
        (None, "FULL_AND_PIECEWISE", False),
    ],
)
def test_full_graphs_are_taken_where_vllms_own_tables_allow_them_for_ragged_batches(
    demo, monkeypatch, backend, mode, allowed
):
    pytest.importorskip("vllm")
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import selector

    from ragspec.runners.vllm.graphs import allows_ragged_graphs

    def chosen(*asked, **named):
        if backend is None:
            raise ValueError("no backend")
        module, _, name = backend.rpartition(".")
        return getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name)

    # not get_attn_backend: modules that are first imported now would keep it for later tests
    monkeypatch.setattr(selector, "_cached_get_attn_backend", chosen)
    config = EngineArgs(model=demo, dtype="float32").create_engine_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    assert allows_ragged_graphs(config) == allowed
    config.model_config.attention_chunk_size = 8192
    assert not allows_ragged_graphs(config), "attention in chunks has no graphs"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("method", "given", "mode"),
    [
        ("context", {}, "FULL"),
        ("context", {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, "FULL"),
        ("context", {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "PIECEWISE"),
        ("none", {}, None),
    ],
)
def test_graphs_that_a_user_chose_are_left_alone(demo, monkeypatch, method, given, mode):
    pytest.importorskip("vllm")
    from ragspec.runners.vllm import plan
    from ragspec.runners.vllm.runner import Runner

    monkeypatch.setattr(plan, "allows_ragged_graphs", lambda config: True)
    monkeypatch.setattr(plan.Plan, "on_cpu", property(lambda plan: False, lambda plan, found: None), raising=False)
    monkeypatch.setattr(plan, "device_count", lambda: 1)
    monkeypatch.setattr(plan, "free_gpu_bytes", lambda: 1 << 40)
    config = {"model": demo, "runner": "vllm", "speculation": {"method": method}, "runner_args": given}
    runner = Runner(build_config(config))
    runner.check()
    chosen = runner.engine_args.get("compilation_config")
    assert (chosen.get("cudagraph_mode") if isinstance(chosen, dict) else None) == mode
    if isinstance(chosen, dict) and mode == "FULL":
        assert chosen == {**given.get("compilation_config", {}), "cudagraph_mode": "FULL"}
    assert runner.about()["own_process"]


@pytest.fixture
def small_gpu(monkeypatch):
    from ragspec.runners.vllm import plan

    monkeypatch.setattr(plan.Plan, "on_cpu", property(lambda plan: False, lambda plan, found: None), raising=False)
    monkeypatch.setattr(plan, "device_count", lambda: 1)
    monkeypatch.setattr(plan, "free_gpu_bytes", lambda: 100)


@pytest.mark.vllm
def test_a_model_larger_than_the_gpu_is_left_to_vllm_if_a_part_stays_outside(demo, small_gpu):
    pytest.importorskip("vllm")
    from ragspec.runners.vllm.runner import Runner

    config = {"model": demo, "runner": "vllm", "speculation": {"method": "none"}}
    with pytest.raises(ConfigError, match="GiB"):
        Runner(build_config(config)).check()
    Runner(build_config(config | {"runner_args": {"cpu_offload_gb": 1}})).check()


@pytest.mark.vllm
@pytest.mark.parametrize("reachable", [True, False])
def test_a_note_says_that_drafts_out_of_reach_are_not_paused(demo, monkeypatch, reachable):
    """As those that vLLM schedules asynchronously, on a GPU."""
    pytest.importorskip("vllm")
    from ragspec.runners.vllm import plan
    from ragspec.runners.vllm.runner import Runner

    monkeypatch.setattr(plan, "is_reachable", lambda config: reachable)
    speculation = {"method": "draft_model", "draft_model": demo}
    runner = Runner(build_config({"model": demo, "runner": "vllm", "speculation": speculation}))
    runner.check()
    assert any(note.startswith("guard: drafts of draft_model are not paused") for note in runner.notes) is not reachable


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["none", "context"])
def test_batches_are_as_large_as_the_llm_classs(demo, method):
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from ragspec.runners.vllm.runner import Runner

    runner = Runner(build_config({"model": demo, "runner": "vllm", "speculation": {"method": method}}))
    runner.check()
    own = EngineArgs(model=demo).create_engine_config(UsageContext.LLM_CLASS).scheduler_config
    ours = EngineArgs(**runner.engine_args).create_engine_config(UsageContext.LLM_CLASS).scheduler_config
    assert ours.max_num_batched_tokens == own.max_num_batched_tokens
    assert ours.max_num_scheduled_tokens in (None, own.max_num_batched_tokens)
    assert runner.about()["batch_size"] == own.max_num_seqs == ours.max_num_seqs


@pytest.mark.parametrize("key", ["temperature", "seed", "n", "stop", "logprobs"])
def test_what_is_also_read_outside_vllm_is_refused_among_its_own_arguments(key):
    """A temperature there would be sampled without the record's seed, and `n` answers would be one, n times."""
    raw = {"model": "m", "runner": "vllm", "input": "x", "output": "y", "runner_args": {"sampling_args": {key: 1}}}
    with pytest.raises(ConfigError, match=f"sampling_args.*belongs in the sampling section: sampling.{key}"):
        build_config(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [("include_stop_str_in_output", True), ("skip_special_tokens", False), ("prompt_logprobs", 3), ("output_kind", 1)],
)
def test_sampling_args_that_would_shape_vllms_own_texts_are_refused(key, value):
    raw = {"model": "m", "runner": "vllm", "input": "x", "output": "y", "runner_args": {"sampling_args": {key: value}}}
    with pytest.raises(ConfigError, match=f"sampling_args.*{key}: ragspec makes its outputs"):
        build_config(raw)
    raw["runner_args"] = {"sampling_args": {"include_stop_str_in_output": False, "skip_special_tokens": True}}
    build_config(raw)
