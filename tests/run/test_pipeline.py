import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ragspec.config.io import OutputConfig
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.run.generate import generate as run
from ragspec.runners.fake import Runner
from tests.conftest import read_jsonl, write_jsonl


def fake(tmp_path, records, **more):
    path = tmp_path / "in.jsonl"
    if isinstance(records, bytes):
        path.write_bytes(records)
    else:
        write_jsonl(path, records)
    raw = {"runner": "fake", "input": str(path), "output": str(tmp_path / "out.jsonl"), **more}
    return build_config(raw)


def output(tmp_path):
    return read_jsonl(tmp_path / "out.jsonl")


def questions(n, **more):
    return [{"id": f"q{i}", "query": f"question {i}", **more} for i in range(n)]


def test_every_record_is_answered_in_input_order(tmp_path):
    config = fake(tmp_path, questions(20, tag=1), runner_args={"reverse": True, "batch_size": 7})
    summary = run(config)
    assert [line["id"] for line in output(tmp_path)] == [f"q{i}" for i in range(20)]
    assert (summary.records, summary.failed, summary.skipped) == (20, 0, 0)
    assert output(tmp_path)[3]["output"] == "question 3\nAnswer:"
    assert output(tmp_path)[3]["metadata"] == {"tag": 1}


def test_a_stop_string_with_a_backslash_instead_of_a_line_break_is_noted(tmp_path):
    summary = run(fake(tmp_path, questions(1), sampling={"stop": ["\\n", "\n", "END"]}))
    assert [note for note in summary.notes if "sampling.stop" in note] == [
        "sampling.stop: '\\n' has a backslash and a letter, not a line break or tab: write $'\\n' in a shell, and "
        '"\\n" in double quotes in YAML'
    ]


def test_finish_order_is_a_choice(tmp_path):
    run(fake(tmp_path, questions(6), runner_args={"reverse": True, "batch_size": 3}, order="finish"))
    assert [line["id"] for line in output(tmp_path)] == ["q2", "q1", "q0", "q5", "q4", "q3"]


BAD = (
    b'{"id": "good", "query": "a"}\n'
    b"not json\n"
    b'{"id": "bytes", "query": "\xff"}\n'
    b"[1]\n"
    b'{"id": "empty"}\n'
    b'{"id": "ctx", "query": "a", "contexts": 5}\n'
    b'{"id": "good", "query": "again"}\n'
    b'{"id": "long", "query": "' + b"x" * 100 + b'"}\n'
    b'{"id": "fails", "query": "b"}\n'
    b'{"custom_id": "hot", "body": {"prompt": "p", "temperature": -1}}\n'
    b'{"id": "last", "query": "c"}\n'
)
ARGS = {"fail_ids": ["fails"], "context_length": 40}


def test_one_bad_record_is_an_error_line_and_the_batch_goes_on(tmp_path):
    config = fake(tmp_path, BAD, runner_args=ARGS, sampling={"max_new_tokens": 8})
    summary = run(config)
    lines = output(tmp_path)
    assert [line["id"] for line in lines] == [
        *("good", "2", "3", "4", "empty", "ctx", "good", "long", "fails", "hot", "last"),
    ]
    assert (summary.records, summary.failed) == (2, 9)
    messages = {line["id"]: line["error"]["message"] for line in lines if "error" in line}
    assert "in.jsonl:2: not valid JSON" in messages["2"]
    assert "in.jsonl:3: not UTF-8" in messages["3"]
    assert "must be a JSON object" in messages["4"]
    assert "no prompt" in messages["empty"]
    assert '"contexts" must be a list' in messages["ctx"]
    assert 'in.jsonl:7: id "good" appears twice' in messages["good"]
    assert "over the model's 40 less max_new_tokens (8)" in messages["long"]
    assert "configured to fail" in messages["fails"]
    assert '"body.temperature": -1' in messages["hot"]


def test_a_second_run_repeats_and_loses_nothing(tmp_path):
    config = fake(tmp_path, BAD, runner_args=ARGS, sampling={"max_new_tokens": 8})
    run(config)
    before = (tmp_path / "out.jsonl").read_bytes()
    summary = run(config)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert (summary.records, summary.failed, summary.skipped) == (0, 0, 11)


@pytest.mark.parametrize("done", range(12))
def test_resuming_after_any_number_of_lines_gives_the_same_file(tmp_path, done):
    config = fake(tmp_path, BAD, runner_args=ARGS, sampling={"max_new_tokens": 8})
    run(config)
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:done]) + b"".join(lines[done : done + 1])[:9])
    run(config)
    assert path.read_bytes() == whole


def test_a_changed_line_is_answered_again_and_said_so(tmp_path):
    config = fake(tmp_path, questions(3))
    run(config)
    records = questions(3)
    records[1]["query"] = "another question"
    write_jsonl(tmp_path / "in.jsonl", records)
    summary = run(config)
    assert (summary.records, summary.skipped) == (1, 2)
    assert output(tmp_path)[-1]["output"].startswith("another question")
    assert any("1 records changed" in note for note in summary.notes)


def test_lines_may_be_added_and_moved_between_runs(tmp_path):
    config = fake(tmp_path, questions(4))
    run(config)
    write_jsonl(tmp_path / "in.jsonl", questions(6)[::-1])
    assert run(config).records == 2
    assert sorted(line["id"] for line in output(tmp_path)) == [f"q{i}" for i in range(6)]


def test_retry_failed_tries_error_lines_again(tmp_path):
    config = fake(tmp_path, questions(4), runner_args={"fail_ids": ["q2"]})
    assert run(config).failed == 1
    summary = run(config, retry_failed=True)
    assert (summary.failed, summary.skipped) == (1, 3)
    assert sorted(line["id"] for line in output(tmp_path)) == ["q0", "q1", "q2", "q3"]


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_input_is_no_error_but_a_warning(tmp_path, content):
    summary = run(fake(tmp_path, content))
    assert summary.records == summary.failed == 0
    assert any("contains no records" in note for note in summary.notes)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_limit_reads_so_many_lines(tmp_path):
    assert run(fake(tmp_path, questions(9)), limit=4).records == 4


def test_input_must_not_be_the_output(tmp_path):
    config = fake(tmp_path, questions(1))
    with pytest.raises(ConfigError, match="would be both the input and output"):
        run(config.model_copy(update={"output": OutputConfig(path=str(config.input))}))


def test_statistics_replace_statistics_only(tmp_path):
    config, path = fake(tmp_path, questions(1)), tmp_path / "s.json"
    run(config, stats_path=str(path))
    run(config, stats_path=str(path))
    for text in ("runner: fake\n", '{"records": [1]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="exists and holds no statistics of a run"):
            run(config, stats_path=str(path))
        assert path.read_text() == text


@pytest.mark.parametrize("name", ["in.jsonl", "out.run.json", "out.stats.json", "out.pending.jsonl"])
def test_no_file_gets_two_uses(tmp_path, name):
    source = tmp_path / name
    write_jsonl(source, questions(2))
    before = source.read_bytes()
    config = build_config({"runner": "fake", "input": str(source), "output": str(tmp_path / "out.jsonl")})
    if name == "in.jsonl":
        with pytest.raises(ConfigError, match="would be both the input and --stats"):
            run(config, stats_path=str(source))
    else:
        with pytest.raises(ConfigError, match="would be both the input and the"):
            run(config)
    assert source.read_bytes() == before


def test_a_record_that_cannot_be_written_back_is_an_error_line(tmp_path):
    deep = b'{"id": "deep", "query": "x", "m": ' + b"[" * 300 + b"]" * 300 + b"}\n"
    summary = run(fake(tmp_path, deep + b'{"id": "next", "query": "y"}\n'))
    assert (summary.records, summary.failed) == (1, 1)
    assert "metadata cannot be written" in output(tmp_path)[0]["error"]["message"]


@pytest.mark.parametrize("template", ["{{ query }}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ query.x.y }}"])
def test_a_template_that_fails_on_a_record_is_that_records_error(tmp_path, template):
    summary = run(fake(tmp_path, questions(2), prompt={"template": template}))
    assert (summary.records, summary.failed) == (0, 2)


def test_error_lines_of_an_earlier_run_are_still_failures(tmp_path):
    config = fake(tmp_path, questions(3), runner_args={"fail_ids": ["q1"]})
    run(config)
    stats = (tmp_path / "out.stats.json").read_bytes()
    summary = run(config)
    assert (summary.skipped, summary.failed_before) == (3, 1)
    assert (tmp_path / "out.stats.json").read_bytes() == stats, "an idle run keeps the statistics of the work"


def test_contexts_without_a_query_come_back_under_metadata(tmp_path):
    run(fake(tmp_path, [{"id": "a", "prompt": "p", "contexts": ["c"], "body": "an email", "custom_id": 7}]))
    assert output(tmp_path)[0]["metadata"] == {"contexts": ["c"], "body": "an email", "custom_id": 7}


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.zst", "out.parquet"])
def test_a_limited_retry_tries_those_records_and_keeps_the_other_error_lines(tmp_path, name):
    records = [*questions(2), {"id": "bad"}, *questions(9)[2:6], {"id": "worse"}]
    config = fake(tmp_path, records, runner_args={"fail_ids": ["q1", "q4"]}, output=str(tmp_path / name))
    assert run(config).failed == 4
    retried = config.model_copy(update={"runner_args": {}})
    summary = run(retried, retry_failed=True, limit=3)
    assert (summary.records, summary.failed, summary.skipped) == (1, 1, 1)  # q1, bad, and q0 that was finished
    assert (summary.totals.records, summary.totals.failed) == (5, 3)
    summary = run(retried, retry_failed=True)
    assert (summary.records, summary.failed, summary.skipped) == (1, 2, 5)
    assert (summary.totals.records, summary.totals.failed) == (6, 2)


def test_a_limited_retry_of_a_pipe_is_refused():
    config = build_config({"runner": "fake", "input": "-", "output": "-"})
    with pytest.raises(ConfigError, match="reads its input twice; give a file"):
        run(config, retry_failed=True, limit=1)


def long_and_short(tmp_path, **more):
    """Return the config of a run in which the first of two records is too long."""
    records = [{"id": "long", "query": "x" * 50}, {"id": "short", "query": "x"}]
    given = {"runner_args": {"context_length": 40}, "sampling": {"max_new_tokens": 5}}
    return fake(tmp_path, records, **given | more)


@pytest.mark.parametrize(
    "change",
    [
        {"runner_args": {"context_length": 99}},
        {"prompt": {"template": "{{ query[:5] }}"}},
        {"prompt": {"system": "x", "template": "{{ query[:5] }}"}, "sampling": {"max_new_tokens": 3}},
    ],
)
def test_failed_records_may_be_tried_again_under_another_prompt_or_limit(tmp_path, change):
    config = long_and_short(tmp_path)
    assert run(config).failed == 1
    (before,) = [line for line in output(tmp_path) if line["id"] == "short"]
    other = long_and_short(tmp_path, **change)
    with pytest.raises(ConfigError, match="to try only the failed records under the new one, add --retry-failed"):
        run(other)
    summary = run(other, retry_failed=True)
    assert (summary.records, summary.failed, summary.skipped) == (1, 0, 1)
    lines = {line["id"]: line for line in output(tmp_path)}
    assert lines["short"] == before
    configs = json.loads((tmp_path / "out.run.json").read_text())["configs"]
    first, second = configs.items()
    assert lines["long"]["config"] == second[0]
    assert (first[1]["runner_args"], second[1]) == ({"context_length": 40}, other.identity())
    assert run(config).skipped == run(other).skipped == 2  # both go on with what they answered


def test_a_line_of_openais_form_names_the_config_that_answered_it_as_openai_does(tmp_path):
    openai = {"path": str(tmp_path / "out.jsonl"), "format": "openai"}
    assert run(long_and_short(tmp_path, output=openai)).failed == 1
    run(long_and_short(tmp_path, output=openai, runner_args={"context_length": 99}), retry_failed=True)
    bodies = {line["custom_id"]: line["response"]["body"] for line in output(tmp_path)}
    assert "system_fingerprint" not in bodies["short"]
    assert bodies["long"]["system_fingerprint"] in json.loads((tmp_path / "out.run.json").read_text())["configs"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"sampling": {"max_new_tokens": 5, "temperature": 0.5}}, "sampling.temperature"),
        ({"model": "another"}, "model"),
        ({"speculation": {"method": "prompt_lookup"}}, "speculation.method"),
        ({"structured": {"choice": ["a"]}}, "structured"),
    ],
)
def test_another_model_or_way_of_sampling_stays_refused_unless_all_failed(tmp_path, change, key):
    run(long_and_short(tmp_path))
    with pytest.raises(ConfigError, match=f"different config: {key}") as error:
        run(long_and_short(tmp_path, **change), retry_failed=True)
    assert "add --retry-failed" not in str(error.value)
    assert len(output(tmp_path)) == 2
    failing = fake(tmp_path, questions(2), output=str(tmp_path / "all.jsonl"), runner_args={"fail_ids": ["q0", "q1"]})
    assert run(failing).failed == 2
    other = fake(tmp_path, questions(2), output=str(tmp_path / "all.jsonl"), **change)
    assert run(other, retry_failed=True).records == 2
    assert "configs" not in json.loads((tmp_path / "all.run.json").read_text())


def test_failures_are_told_by_cause_the_most_frequent_first(tmp_path):
    records = [*questions(9), *({"id": f"n{i}", "query": "x" * (50 + i)} for i in range(3)), {"id": "n"}, {"id": "q0"}]
    args = {"context_length": 40, "fail_ids": ["q3"]}
    summary = run(fake(tmp_path, records, runner_args=args, sampling={"max_new_tokens": 5}))
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    told = [(each["records"], each["message"]) for each in stats["failures"]]
    assert told[0][0] == 3
    assert "the prompt has 58 tokens" in told[0][1]  # the first of them, as an example
    assert sorted(count for count, _ in told) == [1, 1, 1, 3]
    assert sum(count for count, _ in told) == summary.failed == 6
    assert stats["totals"]["failures"] == stats["failures"]


def test_causes_are_the_same_in_whichever_file_and_form_they_were(tmp_path):
    for name in ("a.jsonl", "b c.jsonl"):
        write_jsonl(tmp_path / name, [{"id": f"{name}{i}", "query": "x" * (50 + i)} for i in range(3)])
    (tmp_path / "c.csv").write_text("query\n" + "x" * 60)
    files = [str(tmp_path / name) for name in ("a.jsonl", "b c.jsonl", "c.csv")]
    args = {"runner_args": {"context_length": 40}, "sampling": {"max_new_tokens": 5}, "input": files}
    for shape in ("jsonl", "openai"):
        config = fake(tmp_path, [], **args, output={"path": str(tmp_path / f"{shape}.jsonl"), "format": shape})
        for summary in (run(config), run(config)):
            ((message, count),) = summary.totals.failures.ranked()
            assert count == 7
            assert message.startswith(f"{files[0]}:1: the prompt has 58 tokens")


def test_why_records_of_an_earlier_run_failed_is_told_again(tmp_path):
    config = fake(tmp_path, questions(3), runner_args={"fail_ids": ["q0", "q1", "q2"]})
    first, again = run(config), run(config)
    assert again.failures.records == 0
    assert (
        again.totals.failures.ranked() == first.failures.ranked() == [("the fake runner is configured to fail here", 3)]
    )


@pytest.fixture
def warmed(monkeypatch):
    """What the fake runner was told would come, each time that it warmed up."""
    told = []
    monkeypatch.setattr(Runner, "warm_up", lambda self, records=None: told.append(records))
    return told


def test_a_warm_up_knows_how_many_records_come(tmp_path, warmed):
    fake(tmp_path, questions(300))
    lines = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.csv").write_text("query\nwho?\nwhat?\n")
    (tmp_path / "few.jsonl.gz").write_bytes(gzip.compress(b"".join(lines.splitlines(keepends=True)[:3])))
    (tmp_path / "many.jsonl.gz").write_bytes(gzip.compress(lines))
    names = ["in.jsonl", "in.csv", "few.jsonl.gz", "many.jsonl.gz"]
    for name in names:
        run(fake(tmp_path, questions(300), input=str(tmp_path / name), output="-"))
    assert warmed == [300, 2, 3, None]


def test_a_warm_up_counts_only_what_is_left(tmp_path, warmed):
    config = fake(tmp_path, [*questions(5), {"id": "bad"}])
    for limit in (3, 4, None, None):
        run(config, limit=limit)
    assert warmed == [3, 1, 1]  # and none where nothing is left
    run(fake(tmp_path, questions(2), sampling={"n": 3, "temperature": 1.0}, output="-"))
    assert warmed[-1] == 6


@pytest.mark.parametrize("closed", [True, False])
def test_a_warm_up_for_a_pipe_knows_only_what_it_brought(tmp_path, warmed, closed):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    written = threading.Event()

    def write():
        with pipe.open("w") as lines:
            lines.write('{"query": "a"}\n')
            lines.flush()
            if not closed:
                written.wait(60)

    def load(self):
        time.sleep(0.2)  # loading takes long enough for a pipe to end
        return self

    monkey = pytest.MonkeyPatch()
    monkey.setattr(Runner, "__enter__", load)
    writer = threading.Thread(target=write)
    writer.start()
    warmed_up = Runner.warm_up
    monkey.setattr(Runner, "warm_up", lambda self, records=None: (warmed_up(self, records), written.set()))
    run(fake(tmp_path, [], input=str(pipe), output="-"))
    writer.join()
    monkey.undo()
    assert warmed == [1 if closed else None]


def test_a_batch_is_no_larger_than_the_input(tmp_path, tiny):
    (tmp_path / "in.csv").write_text("query\nwho?\nwhat?\n")
    given = {"model": tiny, "runner": "huggingface", "sampling": {"max_new_tokens": 2}}
    summary = run(fake(tmp_path, [], input=str(tmp_path / "in.csv"), speculation={"method": "context"}, **given))
    assert summary.about["runner"]["batch_size"] == 2
    assert any("batch_size: auto chose 2: there are no more records" in note for note in summary.notes)


def test_the_totals_are_those_of_all_runs(tmp_path):
    config = fake(tmp_path, [*questions(10), {"id": "bad"}], runner_args={"delay_s": 0.01})
    runs = [run(config, limit=4), run(config, limit=7), run(config), run(config)]
    totals = runs[2].totals
    assert (totals.records, totals.failed, totals.spent.runs) == (10, 1, 3)
    assert totals.output_tokens == sum(summary.output_tokens for summary in runs)
    assert totals.prompt_tokens == sum(summary.prompt_tokens for summary in runs)
    assert totals.spent.generate_s == pytest.approx(sum(summary.generate_s for summary in runs[:3]), abs=1e-3)
    assert runs[3].totals.to_json() == totals.to_json()  # a run that found all finished adds nothing
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    assert stats["totals"] == totals.to_json()
    assert stats["records"] == runs[2].records == 3
    anew = run(config, resume=False)
    assert (anew.totals.records, anew.totals.spent.runs) == (10, 1)


def test_an_output_from_before_there_were_totals_counts_what_its_statistics_say(tmp_path):
    config = fake(tmp_path, questions(6))
    run(config, limit=2)
    state, stats = tmp_path / "out.run.json", tmp_path / "out.stats.json"
    state.write_text(json.dumps({key: json.loads(state.read_text())[key] for key in ("config", "output")}))
    old = {key: value for key, value in json.loads(stats.read_text()).items() if key != "totals"}
    stats.write_text(json.dumps(old | {"load_s": 3.0, "warmup_s": 2.0, "generate_s": 7.0}))
    totals = run(config).totals
    assert (totals.records, totals.spent.runs) == (6, 2)
    assert totals.spent.load_s == pytest.approx(3.0, abs=0.1)
    assert totals.spent.generate_s > 7


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.zst"])
def test_the_time_of_a_run_that_was_killed_counts(tmp_path, name):
    config = fake(tmp_path, questions(60), output=str(tmp_path / name))
    path = tmp_path / "c.yaml"
    slow = config.model_copy(update={"runner_args": {"delay_s": 0.1, "batch_size": 1}})
    path.write_text(json.dumps(slow.model_dump(mode="json", exclude={"retrieval", "structured", "scale"})))
    lines = tmp_path / "out.jsonl" if name == "out.jsonl" else tmp_path / name / "_unsealed" / "lines.jsonl"
    command = [sys.executable, "-m", "ragspec", "generate", "-c", str(path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not lines.exists() or lines.read_bytes().count(b"\n") < 15):
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    summary = run(config)
    assert summary.skipped >= 15
    assert (summary.totals.records, summary.totals.spent.runs) == (60, 2)
    assert summary.totals.output_tokens > summary.output_tokens
    assert summary.totals.spent.generate_s > summary.generate_s + 1  # of the 1.5 s that the other took at least


def test_missing_input_is_explained():
    with pytest.raises(ConfigError, match="input: missing"):
        run(build_config({"runner": "fake"}))


def test_dropped_passages_are_named_on_the_output_line(tmp_path):
    record = {"id": "r", "query": "q", "contexts": [{"id": "d1", "text": "a" * 20}, {"id": "d2", "text": "b" * 50}]}
    run(fake(tmp_path, [record], prompt={"max_prompt_tokens": 60}))
    line = output(tmp_path)[0]
    assert (line["contexts"], line["dropped_contexts"]) == (["d1"], ["d2"])


def test_records_may_bring_their_own_sampling(tmp_path):
    batch_line = {"custom_id": "c", "body": {"prompt": "0123456789", "max_tokens": 4}}
    run(fake(tmp_path, [batch_line]))
    assert output(tmp_path)[0]["output"] == "6789"


def test_stats_file_adds_up_with_the_output_lines(tmp_path):
    run(fake(tmp_path, questions(12), speculation={"method": "prompt_lookup"}))
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    lines = output(tmp_path)
    for key in ("prompt_tokens", "output_tokens"):
        assert stats[key] == sum(line[key] for line in lines)
    for key in ("steps", "drafted", "accepted"):
        assert stats["speculation"][key] == sum(line["speculation"][key] for line in lines)
    assert stats["config"]["runner"] == "fake"
    assert len(stats["input_sha256"]) == 64
    assert {"records", "load_s", "warmup_s", "generate_s", "tokens_per_s", "latency_s", "seed"} <= stats.keys()


def test_generate_pulls_no_more_than_a_batch_ahead(tmp_path, monkeypatch):
    """Memory cannot grow with the input if records are read only as the runner asks for them."""
    from ragspec.run import record_reader as batch

    seen = []
    most = 0
    parse = batch.parse_record

    def counting(value, line, source):
        seen.append(line)
        return parse(value, line, source)

    monkeypatch.setattr(batch, "parse_record", counting)

    def report(summary, total):
        nonlocal most
        most = max(most, len(seen) - summary.records)

    run(fake(tmp_path, questions(500), runner_args={"batch_size": 5}), report=report)
    assert len(seen) == 500
    assert most <= 5


def on_disk(tmp_path):
    """Return the lines of the output and of those that wait, each once."""
    waiting = tmp_path / "out.pending.jsonl"
    lines = output(tmp_path) + (read_jsonl(waiting) if waiting.exists() else [])
    return {line["fingerprint"]: line for line in lines}.values()


def mixed(n):
    """Return questions of which every seventh cannot be answered."""
    return [{"id": f"q{i}"} if i % 7 == 3 else question for i, question in enumerate(questions(n))]


@pytest.mark.parametrize("stop", [InterruptedError, KeyboardInterrupt])
@pytest.mark.parametrize("order", ["input", "finish"])
@pytest.mark.parametrize("after", [1, 2, 5, 13, 29])
def test_the_totals_of_an_interrupted_run_and_of_the_next_one_add_up(tmp_path, order, after, stop):
    args = {"reverse": True, "batch_size": 8, "fail_ids": ["q5", "q6"]}
    config = fake(tmp_path, mixed(30), runner_args=args, order=order)

    def report(summary, _):
        if summary.records + summary.failed >= after:
            raise stop

    with pytest.raises(stop):
        run(config, report=report)
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    lines = on_disk(tmp_path)
    assert (stats["records"], stats["failed"]) == (
        sum("output" in line for line in lines),
        sum("error" in line for line in lines),
    )
    assert stats["records"] + stats["failed"] == after
    assert stats["output_tokens"] == sum(line.get("output_tokens", 0) for line in lines)
    summary = run(config)
    assert summary.skipped == after
    assert summary.failed_before == stats["failed"]
    assert summary.records + summary.failed + after == 30
    written = [line["id"] for line in output(tmp_path)]
    assert written == [f"q{i}" for i in range(30)] if order == "input" else len(set(written)) == len(written) == 30
    assert not (tmp_path / "out.pending.jsonl").exists()


def test_the_order_may_change_from_run_to_run(tmp_path):
    args = {"reverse": True, "batch_size": 8}
    config = fake(tmp_path, questions(30), runner_args=args)

    def stop(summary, _):
        if summary.records == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, report=stop)
    assert output(tmp_path) == []  # all five wait for the first
    with pytest.raises(KeyboardInterrupt):
        run(config.model_copy(update={"order": "finish"}), report=stop)
    assert [line["id"] for line in output(tmp_path)] == [f"q{i}" for i in (7, 6, 5, 4, 3, 12, 11, 10, 9, 8)]
    assert not (tmp_path / "out.pending.jsonl").exists()
    run(config)
    assert sorted(line["id"] for line in output(tmp_path)) == sorted(f"q{i}" for i in range(30))


def test_retrying_drops_the_error_lines_that_wait_too(tmp_path):
    config = fake(tmp_path, questions(16), runner_args={"reverse": True, "fail_ids": ["q6", "q12"]})

    def stop(summary, _):
        if summary.records + summary.failed == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, report=stop)
    assert sum("error" in line for line in on_disk(tmp_path)) == 2
    summary = run(config, retry_failed=True)
    assert (summary.records, summary.failed, summary.skipped, summary.failed_before) == (4, 2, 10, 0)
    assert sorted(line["id"] for line in output(tmp_path)) == sorted(f"q{i}" for i in range(16))


def test_a_limited_run_keeps_the_order_of_what_an_earlier_one_left(tmp_path):
    config = fake(tmp_path, questions(16), runner_args={"reverse": True, "batch_size": 16})

    def stop(summary, _):
        if summary.records == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, report=stop)
    assert run(config, limit=4).records == 4
    assert len(on_disk(tmp_path)) == 10
    assert run(config).records == 6
    assert [line["id"] for line in output(tmp_path)] == [f"q{i}" for i in range(16)]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ConfigError])
def test_a_pipe_gets_what_is_finished_in_the_order_of_the_input_when_a_run_breaks_off(tmp_path, stop):
    reading, writing = os.pipe()
    config = fake(tmp_path, questions(16), runner_args={"reverse": True})

    def report(summary, _):
        if summary.records == 12:
            raise stop

    with pytest.raises(stop):
        run(config.model_copy(update={"output": OutputConfig(path=f"/dev/fd/{writing}")}), report=report)
    os.close(writing)
    with open(reading) as pipe:
        assert [json.loads(line)["id"] for line in pipe] == [f"q{i}" for i in (*range(8), 12, 13, 14, 15)]


def test_a_pipe_whose_reader_has_gone_leaves_an_interruption_one(tmp_path):
    reading, writing = os.pipe()
    config = fake(tmp_path, questions(16), runner_args={"reverse": True})

    def stop(summary, _):
        if summary.records == 3:
            os.close(reading)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config.model_copy(update={"output": OutputConfig(path=f"/dev/fd/{writing}")}), report=stop)
    os.close(writing)
