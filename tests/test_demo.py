"""The real demo model on the sample data: the same words with and without speculation."""

import json

import pytest

from ragspec.config.load import build_config
from ragspec.run.generate import generate as run
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE, read_jsonl

pytestmark = pytest.mark.demo
RECORDS = 2


def answer(tmp_path, name, method, **spec):
    output = tmp_path / f"{name}.jsonl"
    raw = {
        "model": "demo",
        "input": str(SAMPLE),
        "output": str(output),
        "sampling": {"max_new_tokens": 24},
        "speculation": {"method": method, **spec},
        "runner_args": {"batch_size": 1},
    }
    summary = run(build_config(raw), limit=RECORDS)
    assert summary.failed == 0, output.read_text()
    return {line["id"]: line["output"] for line in read_jsonl(output)}, summary


@pytest.mark.long
def test_all_methods_give_the_same_text_and_report_acceptance(tmp_path, demo_draft, tiny_gpt2):
    plain, _ = answer(tmp_path, "none", "none")
    assert all(plain.values())
    for name, method, spec in [
        ("lookup", "prompt_lookup", {}),
        ("draft", "draft_model", {"draft_model": demo_draft, "num_tokens": 3}),
        ("universal", "draft_model", {"draft_model": tiny_gpt2, "draft_tokenizer": tiny_gpt2, "num_tokens": 3}),
        ("exit", "early_exit", {"early_exit_layer": 8, "num_tokens": 3}),
    ]:
        texts, summary = answer(tmp_path, name, method, **spec)
        assert texts == plain, name
        assert summary.spec.drafted > 0, name
        assert summary.spec.accepted + summary.spec.steps == summary.output_tokens, name
        if name == "lookup":
            assert summary.spec.accepted > 0


def test_the_quick_start_runs_from_the_command_line(tmp_path):
    out = tmp_path / "out.jsonl"
    done = ragspec("generate", "-c", "sample_configs/quickstart.yaml", "-o", out, "--limit", 2)
    assert done.returncode == 0, done.stderr
    assert "output tokens/s" in done.stderr
    assert "of drafts" in done.stderr or "drafted tokens" in done.stderr
    assert all(line["output"] for line in read_jsonl(out))
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    assert stats["speculation"]["method"] == "context"
    assert stats["versions"]["transformers"]
