import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.errors import ConfigError
from ragspec.speculation.methods import METHODS
from tests import warm
from tests.conftest import ROOT, read_jsonl, wide, write_jsonl
from tests.processes import start_interruptible

RAGSPEC = [sys.executable, "-m", "ragspec"]


def ragspec(*args, **kwargs):
    return subprocess.run([*RAGSPEC, *map(str, args)], capture_output=True, text=True, timeout=300, **kwargs)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "fake.yaml"
    path.write_text("runner: fake\n")
    return path


@pytest.fixture
def questions(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": f"question {i}"} for i in range(200)])


@pytest.mark.parametrize("command", [[], ["generate"], ["benchmark"]])
def test_help_imports_nothing_heavy(command):
    # (typer 0.29 imports pydantic itself)
    code = (
        "import sys; sys.argv = ['ragspec', *sys.argv[1:], '--help']\n"
        "from ragspec.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'vllm', 'jinja2', 'yaml', 'numpy', 'orjson', 'sqlite3'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def options_of(command):
    """Return the options that a command shows, by their long names: their letters, or none."""
    shown = [option for option in get_command(app).commands[command].params if not getattr(option, "hidden", False)]
    options = {}
    for option in shown:
        long = next((name for name in option.opts if name.startswith("--")), None)
        if long:
            options[long] = [name for name in option.opts if not name.startswith("--")]
    return options


COMMANDS = sorted(get_command(app).commands)
READERS = ("generate", "benchmark", "verify", "tune", "doctor", "retrieve")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_has_the_same_letter_in_every_command(command):
    letters = {"--config": "-c", "--input": "-i", "--output": "-o", "--method": "-m", "--top-k": "-k"}
    letters |= {"--quiet": "-q", "--verbose": "-v"}
    for name, short in options_of(command).items():
        assert short == ([letters[name]] if name in letters else []), name
    if command in READERS:
        assert "--input" in options_of(command)


def test_a_summary_of_a_command_is_one_short_sentence():
    for command in COMMANDS:
        text = get_command(app).commands[command].help
        assert text.endswith(".")
        assert len(text) <= 80, command


def test_the_help_of_method_names_every_method():
    done = ragspec("benchmark", "--help", env={**os.environ, "COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert ", ".join(METHODS) in done.stdout
    assert "--draft-tokens" in done.stdout
    assert "--num-tokens" not in done.stdout


def test_the_answers_length_is_a_flag_that_wins_over_set(config, questions, tmp_path):
    out = tmp_path / "out.jsonl"
    args = ["--set", "sampling.max_new_tokens=9", "--max-new-tokens", 4, "--limit", 2]
    assert ragspec("generate", "-c", config, "-i", questions, "-o", out, *args).returncode == 0
    assert [line["output_tokens"] for line in read_jsonl(out)] == [4, 4]


def test_only_records_go_to_stdout(config, questions):
    with open(questions) as lines:
        done = ragspec("generate", "-c", config, "--input", "-", "--output", "-", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [f"q{i}" for i in range(200)]
    assert "200 answered" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_closed_pipe_ends_quietly(config, tmp_path):
    path = write_jsonl(tmp_path / "many.jsonl", [{"query": f"question {i} " * 20} for i in range(5000)])
    command = f"{' '.join(RAGSPEC)} generate -c {config} -i {path} -o - 2>{tmp_path / 'err'} | head -n 2"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)
    assert (tmp_path / "err").read_text() == ""


@pytest.mark.parametrize(
    ("text", "args", "code", "message"),
    [
        ("runner: fake", ["-i", "nowhere.jsonl"], 2, "nowhere.jsonl: no such file"),
        ("runner: fake", [], 2, "input: missing"),
        ("runner: [", ["-i", "x"], 2, "not valid YAML"),
        ("runner: fak", ["-i", "x"], 2, 'did you mean "fake"?'),
        ("runner: fake", ["-i", "{in}", "-o", "/proc/nowhere/x.jsonl"], 2, "cannot be written"),
        ("runner: fake", ["-i", "{in}", "--set", "sampling.temperature=.nan"], 2, "sampling.temperature: NaN"),
        ("model: no/such-model", ["-i", "{in}"], 2, 'model: "no/such-model": is not a local folder'),
        (
            "runner: fake",
            ["-i", "{in}", "--stats", "/proc/nowhere/s.json"],
            2,
            "--stats: /proc/nowhere/s.json cannot be",
        ),
        ("runner: fake\nprompt: {template: '{{ a }}'}", ["-i", "{in}", "-o", "out.jsonl"], 2, '"a" is not known'),
        ("model: ./nowhere", ["-i", "{in}"], 2, 'model: "./nowhere": no such folder'),
        ("model: x.gguf", ["-i", "{in}"], 2, 'model: "x.gguf": no such file'),
    ],
)
def test_what_cannot_start_is_one_line_and_exit_code_2(tmp_path, questions, text, args, code, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    done = warm.ragspec(tmp_path, "generate", "-c", path, *(arg.replace("{in}", questions) for arg in args))
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "out.jsonl").exists()


MODEL = "--set model=demo --set speculation.method=context --set runner=huggingface"
RECORDS = "--input takes a file of records"
ANSWERS = "takes the output of a run: a file, a folder of parts, or a URL"


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.csv", "nowhere.parquet", "nowhere*.jsonl"])
@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("generate -c {config} -i", f"{RECORDS}, or - for stdin"),
        ("run-batch --model demo --runner huggingface -o out.jsonl -i", f"{RECORDS}, or - for stdin"),
        ("retrieve --index idx", f"{RECORDS} with queries, or - for stdin"),
        ("inspect", "INPUT takes files, folders, patterns or a dataset"),
        (f"verify -c {{config}} {MODEL} -i", RECORDS),
        ("benchmark -c {config} -i", RECORDS),
        (f"tune -c {{config}} {MODEL} -i", RECORDS),
        (f"train-draft -c {{config}} {MODEL} -i", RECORDS),
        ("evaluate", f"ANSWERS {ANSWERS}"),
        ("evaluate {answers} --against", f"--against {ANSWERS}"),
        ("evaluate {answers} --references", "--references takes a file of records that have a reference"),
    ],
)
def test_what_to_do_about_a_missing_file_fits_the_command(config, tmp_path, monkeypatch, command, name, advice):
    monkeypatch.chdir(tmp_path)
    answers = write_jsonl(tmp_path / "answers.jsonl", [{"id": "q", "output": "x", "metadata": {}}])
    done = CliRunner().invoke(app, [*command.format(config=config, answers=answers).split(), name])
    what = "no file matches" if "*" in name else "no such file"
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"{name}: {what}; {advice}"


def test_a_missing_config_of_a_judge_is_not_called_a_config_of_the_run(tmp_path):
    answers = write_jsonl(tmp_path / "answers.jsonl", [{"id": "q", "output": "x", "metadata": {}}])
    done = CliRunner().invoke(app, ["evaluate", answers, "--references", answers, "--judge", "nowhere.yaml"])
    assert str(done.exception) == "nowhere.yaml: no such file; --judge takes the path of a YAML file"


def test_a_named_pipe_is_read_once(config, questions, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    feeder = subprocess.Popen(["cp", questions, str(pipe)])
    done = ragspec("generate", "-c", config, "-i", pipe, "-o", tmp_path / "out.jsonl")
    feeder.wait()
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 200


@pytest.mark.parametrize("place", ["--config", "--input", "--output", "--stats"])
def test_a_link_to_itself_is_one_line_that_names_it(config, questions, tmp_path, place):
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    given = {"--config": config, "--input": questions, "--output": tmp_path / "out.jsonl", place: loop}
    done = ragspec("generate", *(word for option in given.items() for word in option))
    assert done.returncode == 2
    assert "loop.jsonl" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert loop.is_symlink()


def test_a_full_disk_is_one_line(config, questions):
    done = ragspec("generate", "-c", config, "-i", questions, "-o", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: /dev/full: cannot be written (No space left on device)")


def answers_on_disk(out):
    """Return the whole lines of an output and of those that wait for their turn, each once."""
    waiting = out.with_name("out.pending.jsonl")
    lines = read_jsonl(out) + (read_jsonl(waiting) if waiting.exists() else [])
    return {line["fingerprint"]: line for line in lines}


@pytest.mark.parametrize("order", ["input", "finish"])
@pytest.mark.parametrize("full", [1500, 8000, 20_000])  # amid the first to wait, their moving, and the later ones
def test_a_disk_that_fills_up_leaves_whole_lines_and_totals_that_add_up(config, tmp_path, order, full):
    out = tmp_path / "out.jsonl"
    records = [{"id": f"q{i}", "query": f"question {i}"} if i % 3 else {"id": f"q{i}"} for i in range(200)]
    questions = write_jsonl(tmp_path / "in.jsonl", records)
    args = ["generate", "-c", config, "-i", questions, "-o", out, "--order", order]
    args += ["--set", "runner_args.reverse=true", "--set", "runner_args.batch_size=20"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))  # noqa: E731
    done = ragspec(*args, preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "cannot be written (File too large)" in done.stderr
    kept = answers_on_disk(out)
    for path in {"out.jsonl", "out.pending.jsonl"}:
        if (tmp_path / path).exists():
            assert (tmp_path / path).read_bytes()[-1:] in (b"", b"\n")
            assert (str(tmp_path / path) in done.stderr) == ((tmp_path / path).stat().st_size > 0)
    assert "run the same command again to continue" in done.stderr
    if full > 5000:  # the statistics themselves fit
        stats = json.loads((tmp_path / "out.stats.json").read_text())
        assert stats["failed"] == sum("error" in line for line in kept.values())
        assert stats["records"] + stats["failed"] == len(kept)
    again = ragspec(*args)
    assert again.returncode == 1, again.stderr
    assert f"{len(kept)} finished before" in again.stderr
    ids = [line["id"] for line in read_jsonl(out)]
    assert (
        ids == [f"q{i}" for i in range(200)] if order == "input" else sorted(ids) == sorted(f"q{i}" for i in range(200))
    )


@pytest.mark.parametrize(("closed", "message"), [("<&-", "-: stdin is closed"), (">&-", "-: cannot be written")])
def test_a_closed_stdin_or_stdout_is_one_line(config, questions, closed, message):
    source = "-" if closed == "<&-" else questions
    command = f"{' '.join(RAGSPEC)} generate -c {config} -i {source} -o - {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_names_are_no_markup(config, questions, tmp_path):
    done = ragspec("generate", "-c", config, "-i", questions, "-o", tmp_path / "out[/b][bold]x.jsonl")
    assert done.returncode == 0, done.stderr
    assert "out[/b][bold]x.jsonl" in done.stderr


def test_debug_shows_the_traceback(config):
    done = ragspec("generate", "-c", config, "-i", "nowhere.jsonl", "--debug")
    assert "Traceback" in done.stderr


def test_failed_records_are_exit_code_1(config, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"query": "a"}\nbroken\n')
    done = ragspec("generate", "-c", config, "-i", path, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 1
    assert "1 answered, 1 failed" in done.stderr


@pytest.mark.parametrize(
    ("given", "code"),
    [("0", 1), ("1", 1), ("2", 0), ("9", 0), ("4%", 1), ("5%", 0), ("4.9%", 1), ("100%", 0), ("0%", 1)],
)
@pytest.mark.parametrize("command", ["generate", "run-batch"])
def test_so_many_records_may_fail(config, tmp_path, given, code, command):
    """2 of 40, when they fail and when they have failed."""
    bodies = [{"custom_id": f"q{i}", "body": {"prompt": "p"}} for i in range(38)]
    source = write_jsonl(tmp_path / "in.jsonl", [*bodies, {"custom_id": "a"}, {"custom_id": "b"}])
    config.write_text("runner: fake\nspeculation: {method: none}")
    args = [command, "-c", str(config), "-i", source, "-o", str(tmp_path / "out.jsonl"), "--max-failures", given]
    for _ in range(2):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == code, done.stderr
    assert "2 finished before" not in done.stderr


@pytest.mark.parametrize("given", ["-1", "x", "1.5", "101%", "%", "", "-3%", "1 %x"])
def test_what_is_no_number_of_failures_is_refused_before_anything_runs(config, questions, tmp_path, given):
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(
        app, ["generate", "-c", str(config), "-i", questions, "-o", str(out), f"--max-failures={given}"]
    )
    assert "must be a number of records, or a share of them such as 2%" in str(done.exception)
    assert not out.exists()


LIMIT = ["--set", "runner_args.context_length=20"]


def test_one_cause_of_all_failures_is_told_once(config, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": "x" * (30 + i)} for i in range(20)])
    done = ragspec("generate", "-c", config, "-i", source, "-o", "-", "--max-new-tokens", 5, *LIMIT)
    assert done.returncode == 1
    assert f"failed       every record: {source}:1: " in done.stderr
    assert done.stderr.count("the prompt has") == 1


def test_an_empty_input_is_exit_code_0_with_a_warning(config, tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    done = ragspec("generate", "-c", config, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert done.returncode == 0
    assert "contains no records" in done.stderr


def test_resume_with_a_changed_config_is_refused(config, questions, tmp_path):
    out = tmp_path / "out.jsonl"
    assert ragspec("generate", "-c", config, "-i", questions, "-o", out, "--limit", 3).returncode == 0
    done = ragspec("generate", "-c", config, "-i", questions, "-o", out, "--set", "sampling.seed=5")
    assert done.returncode == 2
    assert "sampling.seed: was 0, is now 5" in done.stderr
    assert len(read_jsonl(out)) == 3


def slow(out, questions, config, *more):
    args = ["generate", "-c", config, "-i", questions, "-o", out, *more]
    return [*RAGSPEC, *map(str, args), "--set", "runner_args.delay_s=0.02", "--set", "runner_args.batch_size=2"]


def wait_for_lines(out, wanted, process):
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < wanted):
        time.sleep(0.002)


def test_interrupt_keeps_what_is_finished_and_says_how_to_go_on(config, questions, tmp_path):
    out = tmp_path / "out.jsonl"
    process = start_interruptible(slow(out, questions, config))
    wait_for_lines(out, 5, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run the same command again to continue" in stderr
    done = len(read_jsonl(out))
    assert 5 <= done < 200
    assert subprocess.run(slow(out, questions, config), capture_output=True, timeout=60).returncode == 0
    assert [line["id"] for line in read_jsonl(out)] == [f"q{i}" for i in range(200)]


@pytest.mark.wide
@pytest.mark.parametrize("order", ["input", *wide("finish")])
def test_twenty_kills_lose_and_repeat_nothing(config, tmp_path, order):
    records = [{"id": f"q{i}", "query": f"question {i}"} if i % 17 else {"id": f"q{i}"} for i in range(200)]
    questions = write_jsonl(tmp_path / "in.jsonl", records)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    more = ["--order", order, "--set", "runner_args.reverse=true"]
    assert subprocess.run(slow(whole, questions, config, *more), capture_output=True, timeout=60).returncode == 1
    chance = random.Random(5)
    kills = 0
    for _ in range(20):
        process = subprocess.Popen(slow(out, questions, config, *more), stderr=subprocess.DEVNULL)
        before = out.read_bytes().count(b"\n") if out.exists() else 0
        wait_for_lines(out, before + chance.randrange(1, 9), process)
        time.sleep(chance.random() * 0.02)
        kills += process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert kills == 20
    subprocess.run(slow(out, questions, config, *more), capture_output=True, timeout=60)
    if order == "input":
        assert out.read_bytes() == whole.read_bytes()
    else:
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_memory_does_not_grow_with_the_input(config, tmp_path):
    peaks = []
    for count in (5_000, 60_000):
        path = write_jsonl(tmp_path / f"{count}.jsonl", [{"query": f"question {i}"} for i in range(count)])
        stats = tmp_path / f"{count}.stats.json"
        done = ragspec("generate", "-c", config, "-i", path, "-o", "/dev/null", "--stats", stats)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(stats.read_text())["peak_memory_gib"])
    assert peaks[1] - peaks[0] < 0.02, peaks  # the key set's bounded cache, not the records


def test_the_fake_sample_config_runs_as_written(tmp_path):
    done = ragspec("generate", "-c", "sample_configs/fake.yaml", "-o", tmp_path / "out.jsonl", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 10
