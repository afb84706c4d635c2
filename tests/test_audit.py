"""The losslessness audit: what is identical, what is a tie, what is a bug; and a planted bug that it must find."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ragspec.benchmark.lossless import SAFETY, Audit, judge, partings
from ragspec.benchmark.referee import ModelReferee
from tests.conftest import SAMPLE
from tests.test_cli import ragspec

GREEDY = {
    **{"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"stop": [], "seed": 0},
}


def line(name, ids):
    return {"id": name, "token_ids": ids, "prompt_token_ids": [1, 2], "sampling": GREEDY}


class Fixed:
    def __init__(self, *values):
        self.values = values

    def judge(self, parting):
        return self.values


def test_answers_are_matched_by_id_and_compared_to_the_first_difference():
    audit = Audit()
    plain = [line("a", [1, 2, 3]), line("b", [1, 2, 3]), line("c", [1, 2]), {"id": "d", "error": {}}, line("e", [1])]
    other = [line("b", [1, 9, 3]), line("a", [1, 2, 3]), line("c", [1, 2, 3]), line("d", [1]), line("f", [1])]
    found = list(partings(plain, other, audit))
    assert audit.identical == 1
    assert [(p.id, p.position, p.plain, p.speculative) for p in found] == [("b", 1, 2, 9), ("c", 2, None, 3)]
    assert found[0].common == [1]
    assert audit.unanswered == ["d", "e", "f"]


@pytest.mark.parametrize(
    ("values", "tie"),
    [
        ((0.0, 1e-6, 1e-6), True),
        ((SAFETY * 0.9e-6, 0.0, 1e-6), True),
        ((SAFETY * 1.1e-6, 0.0, 1e-6), False),
        ((0.0, SAFETY * 1.1e-6, 1e-6), False),  # plain decoding was wrong: a bug all the same
    ],
)
def test_a_tie_lies_within_what_shapes_alone_do(values, tie):
    parting = next(partings([line("b", [1, 2])], [line("b", [1, 3])], Audit()))
    assert judge(parting, Fixed(*values)).tie is tie


def test_an_answer_that_ends_early_is_never_a_tie():
    parting = next(partings([line("b", [1, 2])], [line("b", [1])], Audit()))
    assert not judge(parting, Fixed(0.0, 0.0, 1.0)).tie


@pytest.fixture(scope="module")
def referee(tiny):
    return ModelReferee.load(str(tiny), None, {})


@pytest.mark.parametrize("sampling", [GREEDY, GREEDY | {"repetition_penalty": 1.3}])
def test_the_referee_knows_the_models_choice(referee, sampling):
    prompt = list(range(5, 30))
    logits = referee._model(torch.tensor([prompt])).logits[0, -1]
    if sampling["repetition_penalty"] != 1:
        seen = torch.tensor(prompt)
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.3, logits[seen] / 1.3)
    best, worst = int(logits.argmax()), int(logits.argmin())
    line_of = lambda token: {"id": "x", "token_ids": [token], "prompt_token_ids": prompt, "sampling": sampling}  # noqa: E731
    parting = next(partings([line_of(best)], [line_of(worst)], Audit()))
    shortfall, plain_shortfall, noise = referee.judge(parting)
    assert plain_shortfall <= noise
    assert shortfall == pytest.approx(float(logits.max() - logits.min()), rel=1e-3)
    assert shortfall > 100 * SAFETY * noise


def test_the_referee_draws_as_the_engine_does(referee):
    """The token that the record's own noise chooses has no shortfall; its neighbours have one."""
    from ragspec.engine.sampling import Noise, draw, probabilities
    from ragspec.records import Sampling

    sampling = GREEDY | {"temperature": 1.0, "seed": 7}
    prompt = list(range(5, 30))
    logits = referee._model(torch.tensor([prompt])).logits[:, -1].float()
    weights = probabilities(logits.detach(), Sampling(**{**sampling, "stop": ()}))
    chosen = draw(weights, [Noise(7, "x").at(0)])[0]
    other = (chosen + 3) % weights.shape[1]
    lines = [{"id": "x", "token_ids": [t], "prompt_token_ids": prompt, "sampling": sampling} for t in (chosen, other)]
    shortfall, plain_shortfall, noise = referee.judge(next(partings(lines[:1], lines[1:], Audit())))
    assert plain_shortfall <= noise
    assert shortfall > SAFETY * noise


def config_of(tiny, tmp_path, **more):
    config = {
        "model": str(tiny),
        "input": str(SAMPLE),
        "sampling": {"max_new_tokens": 24},
        "prompt": {"max_prompt_tokens": 300},
        "speculation": {"method": "prompt_lookup", "num_tokens": 4},
    }
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(config | more))
    return path


def test_verify_proves_that_nothing_changed(tiny, tmp_path):
    config = config_of(tiny, tmp_path, sampling={"max_new_tokens": 24, "temperature": 0.8})
    done = ragspec("verify", "-c", config, "--limit", 4, "-o", tmp_path / "v")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 answers are identical" in done.stderr
    audit = json.loads((tmp_path / "v" / "verify.json").read_text())
    assert (audit["records"], audit["identical"], audit["ties"], audit["bugs"]) == (4, 4, [], [])


def test_verify_finds_a_planted_wrong_verifier(tiny, tmp_path):
    """A verifier that accepts every draft unseen: answers change, and the audit must call that a bug."""
    (tmp_path / "sitecustomize.py").write_text(
        "import ragspec.engine.verify as verify\nverify.agreement = lambda draft, chosen: len(draft)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    config = config_of(tiny, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", "verify", "-c", config, "--limit", "4", "-o", tmp_path / "v"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1, done.stderr
    assert "BUG: " in done.stderr
    audit = json.loads((tmp_path / "v" / "verify.json").read_text())
    assert audit["bugs"]
    assert all(bug["shortfall"] > bug["noise"] for bug in audit["bugs"] if bug["shortfall"] is not None)
    reproducer = json.loads(next((tmp_path / "v" / "bugs").iterdir()).read_text())
    assert reproducer["config"]["speculation"]["method"] == "prompt_lookup"
    assert reproducer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"speculation": {"method": "none"}}, "none has nothing to verify"),
        ({"sampling": {"temperature": 0.7}, "runner_args": {"engine": "transformers"}}, "same distribution"),
    ],
)
def test_verify_refuses_what_it_cannot_compare(tiny, tmp_path, more, message):
    done = ragspec("verify", "-c", config_of(tiny, tmp_path, **more), "-o", tmp_path / "v")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
