"""`ragspec evaluate`: mean scores of a run's answers, their differences from another run, and a model as the judge.

    >>> found = evaluate("out/answers.jsonl", against="out/others.jsonl")
    >>> found.scores["f1"].formatted(), found.differences["f1"].formatted(sign=True)
    ('41.3 (38.2 to 44.0)', '-0.4 (-1.9 to +1.0)')

Scores are per cent, output_tokens are tokens. A judge is any config; it gets PROMPT, is constrained to yes and no, and
decodes greedily. Its agreement with F1 is reported, since small models say yes to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.config.io import InputConfig, OutputConfig
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.storage import advising
from ragspec.outputs.reader import OUTPUT_HINT
from ragspec.outputs.target import target_of
from ragspec.quality.gates import Gate, Verdict, check_computed, check_gates, decide
from ragspec.quality.graded import NAMED, REFUSAL, Answers, Graded, read_graded, read_questions
from ragspec.quality.metrics import Estimate, estimate, exact_match, f1, has_rouge, precision, recall, rouge_l
from ragspec.run.local import Pipeline

RIGHT_F1 = 0.5  # F1 from which an answer counts as right
MIN_VERDICT_TOKENS = 16  # tokens for a verdict; reasoning comes on top
VERDICTS = ("yes", "no")
PROMPT = """\
Question: {question}

Reference answers, all of them right:
{references}

Answer to be judged:
{answer}

Does the answer to be judged say the same as one of the reference answers? It may say more, and in other words, but \
nothing that contradicts them. Reply with yes or no."""


def judge_config(config: RunConfig) -> RunConfig:
    """Return a config for judging: the same model, constrained to verdicts. Its reasoning settings stay."""
    raw: dict[str, Any] = config.model_dump()
    kept = {key: raw["prompt"][key] for key in ("system", "chat", "chat_template_kwargs", "split_reasoning")}
    raw["prompt"] = {"source": "query", "template": "{{ query }}", **kept}
    raw["sampling"] = {"max_new_tokens": max(MIN_VERDICT_TOKENS, config.sampling.longest)}
    raw |= {"structured": {"choice": list(VERDICTS)}, "retrieval": None, "scale": None, "input": None}
    return build_config(raw, "--judge")


def verdicts(config: RunConfig, answers: Mapping[str, Graded], questions: Mapping[str, str]) -> dict[str, bool]:
    """Return by id whether the judge finds an answer right.

    Answers without reference or question have no verdict, nor do those on which the judge fails. Raises ConfigError and
    ModelError.
    """
    found: dict[str, bool] = {}
    with Pipeline(judge_config(config)) as pipeline:
        for line in pipeline.answers(_asked(answers, questions)):
            if line.get("output") in VERDICTS:
                found[line["id"]] = line["output"] == "yes"
    return found


def _asked(answers: Mapping[str, Graded], questions: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for name, answer in answers.items():
        if answer.references and name in questions:
            references = "\n".join(f"- {reference}" for reference in answer.references)
            text = PROMPT.format(question=questions[name], references=references, answer=answer.text)
            yield {"id": name, "query": text}


# -- scores ----------------------------------------------------------------------------------------

Score = Callable[[Graded], float | None]  # None: the record does not have this score


def _referenced(score: Callable[[str, tuple[str, ...]], float]) -> Score:
    return lambda one: 100 * score(one.text, one.references) if one.references else None


def _cited(score: Callable[[set[str], set[str]], float]) -> Score:
    """Return the score; an answer that has gold passages and cites nothing counts as citing an empty set."""
    return lambda one: 100 * score(one.cited or set(), one.gold) if one.gold else None


SCORES: dict[str, Score] = {
    "exact_match": _referenced(exact_match),
    "f1": _referenced(f1),
    "rougeL": _referenced(rouge_l),
    "refusals": lambda one: 100.0 * one.refuses,
    "output_tokens": lambda one: one.output_tokens,
    "citation_precision": _cited(precision),
    "citation_recall": _cited(recall),
}
JUDGED = "judged_right"  # per cent; only with a judge
FAILED = "failed"  # per cent of the records without an answer
CITATION_SCORES = ("citation_precision", "citation_recall")

Scores = dict[str, dict[str, float]]  # score name -> record id -> value


@dataclass(slots=True)
class Evaluation:
    """The result of `ragspec evaluate`.

    differences: from the other run, if given. speed: relative to the other run's, if both have statistics. agreement:
    of judge and F1 in per cent; None without a judge. by_record, others_by_record: the scores of each record.
    """

    answers: str
    records: int
    failed: int
    scores: dict[str, Estimate]
    other: str | None = None
    pairs: int = 0
    differences: dict[str, Estimate] = field(default_factory=dict)
    speed: float | None = None
    agreement: Estimate | None = None
    notes: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    by_record: Scores = field(default_factory=dict)
    others_by_record: Scores = field(default_factory=dict)

    def record_rows(self) -> list[dict[str, Any]]:
        """Return one row per record: its scores, and those of the other run with the differences from them."""
        ids = dict.fromkeys(name for scores in self.by_record.values() for name in scores)
        found = []
        for record in ids:
            row: dict[str, Any] = {"id": record}
            for name, scores in self.by_record.items():
                row[name] = own = scores.get(record)
                if self.other is not None:
                    row[f"{name}_against"] = other = self.others_by_record.get(name, {}).get(record)
                    row[f"{name}_difference"] = None if own is None or other is None else own - other
            found.append(row)
        return found

    def shown(self) -> dict[str, Estimate]:
        """Return the scores for a table: `failed` only if a record of a run failed."""
        other = self.differences.get(FAILED)
        hidden = not self.failed and (other is None or not other.mean)
        return {name: one for name, one in self.scores.items() if name != FAILED or not hidden}

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per score for `--format`."""
        found = []
        for name, one in self.shown().items():
            row: dict[str, Any] = {"score": name, "mean": one.mean, "low": one.low, "high": one.high}
            row["records"] = one.count
            if self.other is not None:
                beside = self.differences.get(name)
                for key, value in (("difference", "mean"), ("difference_low", "low"), ("difference_high", "high")):
                    row[key] = getattr(beside, value, None)
            found.append(row)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the object that the command prints."""
        found: dict[str, Any] = {
            "answers": self.answers,
            "records": self.records,
            "failed": self.failed,
            "scores": {name: one.to_json() for name, one in self.scores.items()},
        }
        if self.agreement is not None:
            found["judge"] = {"agreement_with_f1": self.agreement.to_json()}
        if self.other is not None:
            differences = {name: one.to_json() for name, one in self.differences.items()}
            found["against"] = {"answers": self.other, "pairs": self.pairs, "differences": differences}
            found["against"]["speed"] = None if self.speed is None else round(self.speed, 4)
        if self.verdicts:
            found["gates"] = [verdict.to_json() for verdict in self.verdicts]
        return found | {"notes": self.notes}


def evaluate(
    answers: str,
    *,
    references: InputConfig | str | None = None,
    against: str | None = None,
    refusal: str = REFUSAL,
    judge: RunConfig | None = None,
    gates: Sequence[Gate] = (),
) -> Evaluation:
    """Return the scores of a run's answers.

    Args:
        answers: The run's output.
        references: Records with references (and questions, for a judge); by default the answers' own metadata.
        against: The output of another run over the same records.
        refusal: Regular expression of answers that refuse.
        judge: Config of a model that judges answers too; needs `references`.
        gates: Conditions to decide on.

    Raises:
        ConfigError: For inputs that cannot be read or do not belong together, and gates on what is not computed.
        ModelError: If the judge's model fails.
    """
    if judge is not None and references is None:
        raise ConfigError("--judge needs the questions: give the records with --references")
    check_gates(gates, (*SCORES, JUDGED, FAILED), _not_computed(judge is not None), compared=against is not None)
    with advising(f"ANSWERS {OUTPUT_HINT}", [answers]):
        own = read_graded(answers, references, refusal)
    with advising(f"--against {OUTPUT_HINT}", [against] if against else []):
        other = None if against is None else read_graded(against, references, refusal)
    citing = cites(own) if other is None else cites(own, other)
    scores = scores_of(own, citing=citing)
    others = {} if other is None else scores_of(other, citing=citing)
    check_computed(gates, scores, None if other is None else others, [JUDGED, FAILED])
    questions = read_questions(references, own.names) if judge is not None and references is not None else {}
    if judge is not None:
        scores |= _judged(judge, own, questions)
    found = Evaluation(answers, len(own.graded), len(own.failed), means(scores), notes=_notes(own))
    found.scores[FAILED] = _failed(own)
    if judge is not None:
        found.agreement = _agreement(scores)
        if missing := sum(bool(one.references) for one in own.graded.values()) - len(scores.get(JUDGED, {})):
            found.notes.append(f"the judge gave no verdict on {missing} answers")
    if against is not None and other is not None:
        found.notes += [f"{against}: {note}" for note in (*_repeated(other), *_invalid(other))]
        found.other, found.pairs = against, len(own.graded.keys() & other.graded.keys())
        if own.ids.isdisjoint(other.ids):
            raise ConfigError(f"--against {against}: none of its records are in {answers}")
        if left := len(own.graded.keys() ^ other.graded.keys()):
            found.notes.append(f"{left} records are in only one of the runs, and are not compared")
        if gone := len(other.ids - own.ids):
            found.notes.append(f"{gone} {'record' if gone == 1 else 'records'} of {against} are missing in {answers}")
        if judge is not None:
            others |= _judged(judge, other, questions)
        before = _failed(other).mean
        found.differences = differences(scores, others)
        found.differences[FAILED] = _exact(found.scores[FAILED].mean - before, len(own.ids & other.ids))
        speeds = [_speed(path) for path in (answers, against)]
        found.speed = speeds[0] / speeds[1] if speeds[0] and speeds[1] else None
    found.by_record, found.others_by_record = scores, others
    everything = own.ids if other is None else own.ids | other.ids
    found.verdicts = decide(gates, found.scores, found.differences, len(everything))
    return found


def _failed(answers: Answers) -> Estimate:
    """Return the per cent of a run's records that have no answer."""
    count = len(answers.ids)
    return _exact(100.0 * (count - len(answers.graded)) / count, count)


def _exact(value: float, count: int) -> Estimate:
    return Estimate(value, value, value, count, exact=True)


def _not_computed(judged: bool) -> dict[str, str]:
    """Return the scores that are not computed here, with what they need."""
    missing = {} if has_rouge() else {"rougeL": 'it needs rouge-score: pip install "ragspec[quality]"'}
    return missing if judged else missing | {JUDGED: "it needs a judge: give its config with --judge"}


def _judged(judge: RunConfig, answers: Answers, questions: dict[str, str]) -> Scores:
    found = verdicts(judge, answers.graded, questions)
    return {JUDGED: {name: 100.0 * right for name, right in found.items()}} if found else {}


def _agreement(scores: Scores) -> Estimate | None:
    """Return how often judge and F1 agree that an answer is right or wrong."""
    judged, by_f1 = scores.get(JUDGED, {}), scores.get("f1", {})
    return estimate(
        [100.0 * ((judged[name] > 0) == (by_f1[name] >= 100 * RIGHT_F1)) for name in judged if name in by_f1]
    )


def _notes(answers: Answers) -> list[str]:
    """Return notes on what could not be scored, or may be scored against the reference of another record."""
    notes = []
    if answers.names:
        read = ", ".join(f"{theirs} as {ours}" for ours, theirs in answers.names.items())
        notes.append(f"--references: reads {read}, by the columns' names (--columns FIELD=NAME says otherwise)")
    if answers.unnamed:
        notes.append(
            f"{answers.unnamed} records of --references have no id, and are matched by their number in the file; if "
            "the ids are in another column, give --columns id=NAME"
        )
    if answers.unusable:
        notes.append(f"{len(answers.unusable)} records have unusable references ({_some(answers.unusable)})")
    if answers.without:
        notes.append(
            f"{len(answers.without)} of {len(answers.graded)} answers have no reference, and are not scored "
            f"against one ({_some(answers.without)})"
        )
    if answers.failed:
        notes.append(f"{len(answers.failed)} records failed, and are not scored ({_some(answers.failed)})")
    notes += _repeated(answers) + _invalid(answers)
    if not has_rouge():
        notes.append('rougeL needs rouge-score: pip install "ragspec[quality]"')
    return notes


def _repeated(answers: Answers) -> list[str]:
    """Return the note on answers that are not scored because later ones have their ids, if there are any."""
    count, ids = len(answers.repeated), _some(answers.repeated)
    return [f"{count} answers are replaced by later ones with the same id ({ids})"] if count else []


def _invalid(answers: Answers) -> list[str]:
    """Return the note on structured answers that were cut off or do not match their format, if there are any."""
    if not answers.invalid:
        return []
    share = f"{len(answers.invalid)} of {answers.structured} structured answers"
    return [f"{share} are cut off or invalid, and are scored as text ({_some(answers.invalid)})"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _speed(path: str) -> float | None:
    """Return the tokens per second in the statistics beside an output, None if there are none."""
    target = target_of(OutputConfig(path=path))
    try:
        value = target.statistics.read().get("tokens_per_s") if target is not None else None
    except OSError:  # the answers are readable, but nothing beside them
        return None
    return value if isinstance(value, float) else None


def cites(*runs: Answers) -> bool:
    """Return whether any answer of these runs cites a passage."""
    return any(one.cited is not None for answers in runs for one in answers.graded.values())


def scores_of(answers: Answers, *, citing: bool) -> Scores:
    """Return every score of every record that has it. citing: include the citation scores."""
    found: Scores = {}
    for name, score in SCORES.items():
        if (name == "rougeL" and not has_rouge()) or (name in CITATION_SCORES and not citing):
            continue
        values = {key: value for key, one in answers.graded.items() if (value := score(one)) is not None}
        if values:
            found[name] = values
    return found


def means(scores: Scores) -> dict[str, Estimate]:
    """Return the mean of each score."""
    found = {name: estimate(list(values.values())) for name, values in scores.items()}
    return {name: one for name, one in found.items() if one is not None}


def differences(scores: Scores, others: Scores) -> dict[str, Estimate]:
    """Return the mean difference of each score from the other run's, over records that both have."""
    found = {}
    for name, values in scores.items():
        other = others.get(name, {})
        if one := estimate([values[key] - other[key] for key in values if key in other]):
            found[name] = one
    return found
