"""The doctor: before any weights load, what is here and what a config would do."""

import json

import pytest

from tests.conftest import SAMPLE
from tests.test_cli import ragspec


def examine(tmp_path, **config):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"input": str(SAMPLE), **config}))
    return ragspec("doctor", "-c", path)


def test_the_machine_alone():
    done = ragspec("doctor")
    assert done.returncode == 0, done.stderr
    assert "cores" in done.stderr
    assert "torch 2." in done.stderr
    assert done.stdout == ""


def test_a_config_that_works(tiny, tmp_path):
    done = examine(tmp_path, model=str(tiny), speculation={"method": "context"})
    assert done.returncode == 0, done.stderr
    assert "keys and values" in done.stderr
    assert "ragspec's batched engine will answer, with method context" in done.stderr


def test_a_fallback_is_said(tiny, tmp_path):
    done = examine(tmp_path, model=str(tiny), runner_args={"engine": "transformers"})
    assert "stock generate() will answer: runner_args.engine: transformers" in done.stderr


def test_a_draft_of_the_same_tokens(tiny, tmp_path):
    done = examine(tmp_path, model=str(tiny), speculation={"method": "draft_model", "draft_model": str(tiny)})
    assert done.returncode == 0, done.stderr
    assert "tokens are the target's" in done.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "no/such"}, 'error model: "no/such"'),
        (
            {"model": "TINY", "speculation": {"method": "context"}, "runner_args": {"engine": "transformers"}},
            "error runner_args",
        ),
    ],
)
def test_what_would_stop_the_run_is_an_error(tiny, tmp_path, config, message):
    done = examine(tmp_path, **json.loads(json.dumps(config).replace("TINY", str(tiny))))
    assert done.returncode == 2
    assert message in done.stderr
