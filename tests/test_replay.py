"""The scripts that replay recorded answers: the drafter's speed modelled, its priors fitted."""

import json
import random
import sys
from pathlib import Path

import pytest

from ragspec.speculation.drafters.calibration import Calibration
from ragspec.speculation.drafters.context import ContextDrafter

SCRIPTS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import fit_priors
    import replay

    yield replay, fit_priors
    for name in ("fit_priors", "replay"):
        sys.modules.pop(name)


@pytest.fixture
def recorded(tmp_path):
    """Answers that copy pieces of their prompts, as a benchmark writes them."""
    chance, path = random.Random(0), tmp_path / "none-b8.jsonl"
    with path.open("w") as file:
        for number in range(30):
            prompt = [chance.randrange(200) for _ in range(80)]
            answer = []
            while len(answer) < 40:
                start = chance.randrange(70)
                answer += [*prompt[start : start + chance.randrange(2, 10)], chance.randrange(200)]
            line = {"id": str(number), "prompt_token_ids": prompt, "token_ids": answer}
            file.write(json.dumps(line | {"sampling": {"max_new_tokens": 60}}) + "\n")
        file.write('{"id": "failed", "error": "no memory"}\n')
    return str(path)


def test_an_oracle_never_drafts_in_vain_and_every_token_is_written_once(scripts, recorded):
    replay, _ = scripts
    answers = replay.read_answers(recorded)
    tokens = sum(len(answer) - 1 for _, answer, _ in answers)
    steps, drafted, written = replay.replay(ContextDrafter(), answers, None)
    assert written == tokens == steps + drafted
    assert drafted > tokens / 3
    steps, drafted, written = replay.replay(ContextDrafter(), answers, 1.0)
    assert (steps, drafted, written) == (tokens, 0, tokens)


def test_what_drafting_takes_is_told(scripts, recorded, capsys):
    replay, _ = scripts
    replay.main(recorded, "prompt_lookup")
    first, *_, last = capsys.readouterr().out.splitlines()
    tokens = sum(len(answer) for _, answer, _ in replay.read_answers(recorded))
    assert first == f"30 records, {tokens:,} output tokens, prompt_lookup"
    assert last.startswith("drafting: ")
    assert int(last.split()[1]) > 0


def test_priors_are_found_again_in_guesses_that_follow_them(scripts):
    _, fit_priors = scripts
    chance, guesses = random.Random(0), []
    for _ in range(20_000):
        length, share = chance.choice((1, 5, 21)), chance.choice((0.3, 0.7, 1.0))
        features = Calibration.features(chance.choice((0, 2)), length, 7, 8, share=share)
        log_odds = {1: -1, 5: 1, 21: 2}[length] + {0.3: -1, 0.7: 0, 1.0: 1}[share] - 0.5 * (features[0][0] == 2)
        guesses.append((features, chance.random() < fit_priors.chance(log_odds)))
    found = fit_priors.fit(guesses)
    expected = {("length", 1): -1, ("length", 5): 1, ("length", 9): 2, ("doubt", 2): -0.5}
    expected |= {("share", 0): -1, ("share", 1): 0, ("share", 2): 1}
    assert found == pytest.approx(expected, abs=0.15)


def test_priors_are_printed_with_the_guesses_behind_them(scripts, recorded, capsys):
    _, fit_priors = scripts
    fit_priors.main([recorded])
    printed = capsys.readouterr().out
    assert [line.split(" = ")[0] for line in printed.splitlines()[1:]] == [
        "PRIOR",
        "AGREEMENT",
        "MORE_ORIGINS",
        "MORE_MATCHES",
        "PRIOR_LOG_ODDS",
    ]


def test_nothing_to_fit_is_said(scripts, tmp_path):
    (empty := tmp_path / "none.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no guess was made"):
        scripts[1].main([str(empty)])
