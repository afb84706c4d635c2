"""The script behind `make demo-draft`: a draft of other tokens from answers that are there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_jsonl

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "demo_drafts.py"


@pytest.mark.demo
def test_a_draft_of_other_tokens_is_made_from_answers(demo, tmp_path, sample_texts):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoTokenizer.from_pretrained(demo)
    ids = [target(text)["input_ids"][:60] for text in (sample_texts * 24)[:24]]
    sampling = {"max_new_tokens": 50}
    rows = [
        {"id": f"q{i}", "prompt_token_ids": own[:10], "token_ids": own[10:], "sampling": sampling}
        for i, own in enumerate(ids)
    ]
    write_jsonl(tmp_path / "answers.jsonl", rows)
    command = [sys.executable, SCRIPT, tmp_path, "--words", "400", "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "held-out tokens guessed" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert len(tokenizer) == 400 <= model.config.vocab_size
