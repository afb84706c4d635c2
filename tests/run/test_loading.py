"""What a run says it does before its first answer."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from ragspec.config.load import build_config
from ragspec.models import resolve as models
from ragspec.run import loading as module
from ragspec.run.loading import Loading
from ragspec.run.local import Pipeline
from ragspec.run.runner_choice import remember, usual_start_s
from ragspec.stats import RunSummary
from tests.conftest import ROOT
from tests.warm import ragspec

WEIGHTS = 500_000_000


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Reading:
    """Files whose reading the test decides."""

    done, total = 0, WEIGHTS

    def __init__(self, files):
        Reading.files = files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a Loading whose clock and weights the test moves."""
    monkeypatch.setattr(module, "Reading", Reading)
    monkeypatch.setattr(Reading, "done", 0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    config = build_config({"model": str(folder), "runner": "huggingface"})
    remember(config, RunSummary(load_s=20.0, warmup_s=10.0, prompt_tokens=1, generate_s=1.0))
    clock = Clock()
    found = Loading(config, clock)
    return found, clock


def test_each_phase_is_said_with_what_is_read_and_how_long_it_takes(told):
    loading, clock = told
    assert loading.text() == f"loading {Reading.files[0].parent} (0.5 GB of weights), 0:00 so far"
    for after_s, done, said in [
        (4, 100_000_000, "loading weights 0.1 of 0.5 GB, 0:04 so far, about 0:30 left"),
        (9, 300_000_000, "loading weights 0.3 of 0.5 GB, 0:09 so far, about 0:25 left"),
        (14, WEIGHTS, "starting the engine, 0:14 so far, about 0:20 left"),
        (60, WEIGHTS, "starting the engine, 1:00 so far"),  # longer than usual
    ]:
        clock.now, Reading.done = 100.0 + after_s, done
        assert loading.text() == said
    loading.warming_up()
    assert loading.text() == "warming up, 1:00 so far"


def test_a_model_that_is_not_here_yet_is_downloaded_or_converted(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    blobs = tmp_path / "hub" / "models--org--name" / "blobs"
    clock = Clock()
    loading = Loading(build_config({"model": "org/name", "runner": "huggingface"}), clock)
    assert loading.doing() == "loading org/name"
    blobs.mkdir(parents=True)
    (blobs / "a.incomplete").write_bytes(bytes(60_000_000))
    (blobs / "b").write_bytes(bytes(60_000_000))
    clock.now += 1
    assert loading.doing() == "downloading org/name, 0.1 GB so far"
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")
    given = build_config({"model": str(file), "runner": "huggingface"})
    assert Loading(given, clock).doing() == f"converting {file}, once"
    made = models.made_folder("small", [file])
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    assert Loading(given, clock).doing() == f"loading {file} (0.0 GB of weights)"
    assert Loading(build_config({"runner": "fake"}), clock).doing() == "starting"


def test_how_long_loading_takes_is_learnt_from_loading_alone(tiny):
    config = build_config({"model": str(tiny), "runner": "huggingface"})
    assert usual_start_s(config) is None
    phases = []
    with Pipeline(config) as pipeline:
        pass
    pipeline.load(lambda: phases.append("warming up"))
    pipeline.load(lambda: phases.append("not again"))
    pipeline.close()
    assert phases == ["warming up"]
    assert usual_start_s(config) > 0
    auto = config.model_copy(update={"runner": "auto"})
    assert usual_start_s(auto) == usual_start_s(config)
    remember(config, RunSummary(load_s=50.0, prompt_tokens=9, generate_s=1.0))
    with Pipeline(config):
        pass
    assert usual_start_s(config) == pytest.approx(25, abs=25)  # between the two, and no third


def on_a_terminal(*command, environment, folder):
    """Return what a command writes to a terminal of 80 columns, without colours and movements, and its exit code."""
    ours, theirs = pty.openpty()
    shown = []

    def read():
        try:
            while data := os.read(ours, 1 << 16):
                shown.append(data)
        except OSError:  # the terminal is gone
            pass

    reader = threading.Thread(target=read)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder) as process:
        os.close(theirs)
        reader.start()
        code = process.wait(600)
    reader.join()
    os.close(ours)
    text = b"".join(shown).decode(errors="replace")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", re.sub(r"\x1b\[[0-9;]*m", "", text)), code


def test_a_terminal_sees_what_is_loading_and_a_pipe_does_not(tmp_path, tiny):
    (tmp_path / "in.txt").write_text("Who?\n")
    model = ["--model", str(tiny), "--runner", "huggingface", "--max-new-tokens", "2"]
    commands = [["ask", "Who?", *model], ["generate", "-i", "in.txt", "-o", "out.jsonl", *model]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    for command in commands:
        text, code = on_a_terminal(sys.executable, "-m", "ragspec", *command, environment=environment, folder=tmp_path)
        assert code == 0, text
        assert f"loading {str(tiny)[:40]}" in text
        assert re.search(r"(loading weights|starting the engine|warming up)[^\n]*, 0:\d\d so far", text)
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        piped = ragspec(tmp_path, *command)
        assert piped.returncode == 0
        for word in ("loading", "warming", "\r"):
            assert word not in piped.stderr


def test_no_librarys_bar_is_printed_by_the_command():
    script = (
        "import sys; sys.argv = ['ragspec', '--version']; from ragspec.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "from tqdm.auto import tqdm; list(tqdm(range(3)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TQDM_DISABLE", None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("ragspec ")
    assert done.stderr == ""
