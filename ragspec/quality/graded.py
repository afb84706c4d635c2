"""Read answers with what they are measured by: from an output and, if given, a file of references."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ragspec.config.io import InputConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.guessing import first_rows, guessed_references
from ragspec.inputs.passages import LISTED, listed, passage_ids
from ragspec.inputs.record import REFERENCES, reference_texts
from ragspec.inputs.record_ids import RecordIds
from ragspec.inputs.sources import open_source, size_of
from ragspec.inputs.storage import advising
from ragspec.inputs.values import is_text
from ragspec.json_text import JSONDecodeError, loads
from ragspec.outputs.reader import answers_in, id_given, id_of, json_object, tokens_of
from ragspec.quality.metrics import cited, numbered

GOLD = ("gold_ids", "gold_doc_ids")
NAMED = 5  # ids listed in a message
EMPTY = re.compile(r"\s*\[\s*\]\s*")  # a list of nothing, in a cell of a table
# how instruction-tuned models say, in English, that they have no answer
REFUSAL = (
    r"\b(I (do not|don't) know|I('m| am) (not sure|unable|sorry)|(cannot|can't|could not|couldn't) (be )?"
    r"(answer|determine|find)|(does not|do not|doesn't|don't) (mention|contain|provide|specify|state|say)|"
    r"not (mentioned|specified|provided|stated) in|no (information|answer)|not enough information|unanswerable)"
)


@dataclass(frozen=True, slots=True)
class Graded:
    """One answer.

    cited: passage ids, None if it has neither citations nor a field for them. gold: ids to cite. valid: whether it
    matches its format, None without one. problem: why references are unusable.
    """

    text: str
    references: tuple[str, ...]
    refuses: bool
    output_tokens: int | None = None
    cited: set[str] | None = None
    gold: set[str] = field(default_factory=set)
    valid: bool | None = None
    problem: str = ""


@dataclass(slots=True)
class Answers:
    """A run's answers by record id.

    failed: ids that only error lines have. repeated: ids of answers that a later line with the same id replaced.
    unnamed: records of the references that have no id, so that their numbers stand for it. names: of the fields of
    these records, where they are others than ragspec's, by ragspec's.
    """

    graded: dict[str, Graded] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    unnamed: int = 0
    names: dict[str, str] = field(default_factory=dict)

    @property
    def without(self) -> list[str]:
        """Return the ids of answers without reference."""
        return [name for name, one in self.graded.items() if not one.references]

    @property
    def unusable(self) -> list[str]:
        """Return the ids of answers whose references are unusable, with why."""
        return [f"{name}: {one.problem}" for name, one in self.graded.items() if one.problem]

    @property
    def structured(self) -> int:
        """Return how many answers have a format."""
        return sum(one.valid is not None for one in self.graded.values())

    @property
    def invalid(self) -> list[str]:
        """Return the ids of answers that do not match their format; the text as it is counts as theirs."""
        return [name for name, one in self.graded.items() if one.valid is False]

    @property
    def ids(self) -> set[str]:
        """Return the ids of all records, answered or not."""
        return {*self.graded, *self.failed}


def read_graded(path: str, references: InputConfig | str | None = None, refusal: str = REFUSAL) -> Answers:
    """Return the answers of an output.

    Args:
        path: The output.
        references: Records with references; by default the metadata of the output's lines.
        refusal: Regular expression of answers that refuse.

    Raises:
        ConfigError: If a file cannot be read or is not an output, or references are of other records.
    """
    paths = references.path if isinstance(references, InputConfig) else [references] if references else []
    with advising("--references takes a file of records that have a reference", paths):
        names = _names_in(references, path) if references else {}
        given, unnamed = _by_id(references, names) if references else (None, 0)
    if given == {}:
        raise ConfigError(f"--references {references}: contains no records")
    try:
        pattern = re.compile(refusal, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--refusal: not a regular expression: {error}") from None
    answers, failed = Answers(unnamed=unnamed, names=names), dict[str, None]()
    for name, text, line in answers_in(path):
        if text is None:
            failed[name] = None
            continue
        if name in answers.graded:
            answers.repeated.append(name)
        source = metadata_of(line) if given is None else given.get(name, {})
        answers.graded[name] = _graded(text, line, source, pattern)
    answers.failed = [name for name in failed if name not in answers.graded]
    if not answers.graded and not answers.failed:
        raise ConfigError(f"{path}: contains no answers")
    if given and answers.graded and answers.graded.keys().isdisjoint(given):
        raise ConfigError(
            f'--references {references}: none of its ids is one of {path} (it has "{next(iter(given))}", the answers '
            f'"{next(iter(answers.graded))}"); if the ids are in another column, give --columns id=NAME'
        )
    return answers


def read_questions(references: InputConfig | str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the questions of records by id. names: of Answers."""
    found = ((name, row.get("query", row.get("question"))) for name, row in _by_id(references, names)[0].items())
    return {name: question for name, question in found if isinstance(question, str)}


def references_of(source: Mapping[str, Any], *, as_text: bool = False) -> tuple[tuple[str, ...], str]:
    """Return a record's references, and why they are unusable if they are.

    A text that is a JSON list of texts, as in a cell of a table, is read as that list, unless `as_text`.
    """
    key = next((key for key in REFERENCES if source.get(key) is not None), None)
    if key is None:
        return (), ""
    value = source[key]
    if not as_text and is_text(value) and EMPTY.fullmatch(value):
        return (), ""
    if not as_text and is_text(value) and LISTED.fullmatch(value):
        try:
            given = reference_texts(loads(value))
        except JSONDecodeError:
            return (), _no_list(key, value)
        if given is not None:
            return given, ""
    texts = reference_texts(value)
    return ((), f'"{key}" must be a text or a list of texts') if texts is None else (texts, "")


def _graded(text: str, line: Any, source: Mapping[str, Any], refusal: re.Pattern[str]) -> Graded:
    references, problem = references_of(source, as_text=is_itself_json(text, line))
    named = line.get("contexts")
    contexts = [str(each) for each in named] if isinstance(named, list) else []
    gold, unread = _gold_of(source)
    formatted = {name for reference in references for name in numbered(reference, _by_rank(source, contexts))}
    said = said_in(text, line)
    return Graded(
        said,
        references,
        refuses=refusal.search(said) is not None,
        output_tokens=tokens_of(line),
        cited=cited(text, _parsed(line), contexts),
        gold=formatted if gold is None else gold,
        valid=line.get("valid"),
        problem=problem or unread,
    )


def said_in(text: str, line: Mapping[str, Any]) -> str:
    """Return what is scored of an answer: the `answer` of a structured one that has it, else its text."""
    parsed = _parsed(line)
    return parsed["answer"] if isinstance(parsed, dict) and isinstance(parsed.get("answer"), str) else text


def is_itself_json(text: str, line: Mapping[str, Any]) -> bool:
    """Return whether a structured answer is scored as a whole, so that a reference in JSON is one text."""
    return line.get("valid") is not None and said_in(text, line) == text


def _parsed(line: Mapping[str, Any]) -> Any:
    """Return the parsed value of a line's `output`: of several answers, the first."""
    parsed = line.get("parsed")
    return parsed[0] if "outputs" in line and isinstance(parsed, list) and parsed else parsed


def _gold_of(source: Mapping[str, Any]) -> tuple[set[str] | None, str]:
    """Return the ids of the passages to cite, None if the record has none, and why they are unusable if they are.

    A single id needs no list. A table with types, such as Parquet, may hold the list as a text.
    """
    key = next((key for key in GOLD if source.get(key) not in (None, "")), None)
    if key is None:
        return None, ""
    given = source[key]
    if is_text(given) and LISTED.fullmatch(given):
        try:
            given = loads(given)
        except JSONDecodeError:
            return None, _no_list(key, given)
    ids = given if isinstance(given, list) else [given]
    return {id_given(each) or str(each) for each in ids}, ""


def _no_list(key: str, value: str) -> str:
    return f'"{key}" is a text that looks like a list ({value.strip()[:20]}...); write it as a JSON list'


def _by_rank(source: Mapping[str, Any], contexts: list[str]) -> list[str]:
    """Return the ids of a record's passages in its own order, by which references number them.

    The prompt's order, `contexts`, may differ; it is used if the record's own order is unknown.
    """
    try:
        own = passage_ids(listed(source.get("contexts")))
    except RecordError:  # no passages that a reference could number
        own = []
    if own:
        return own
    places = [str(place) for place in range(1, len(contexts) + 1)]
    return places if sorted(places) == sorted(contexts) else contexts


def _names_in(references: InputConfig | str, answers: str) -> dict[str, str]:
    """Return by ragspec's names what the fields of a file of references are called, judged by their usual names.

    Without `--columns`, and without what is called as ragspec calls it. A column is their id only if it has ids of the
    answers, and the numbers of the records, which are otherwise their ids, are none.
    """
    config = InputConfig(path=[references]) if isinstance(references, str) else references
    if config.columns.given or size_of(config) is None:
        return {}
    with open_source(config) as source:
        values = first_rows(row.value for row in source)
    records = [{**metadata_of(value), **value} for value in values if isinstance(value, dict)]
    names = guessed_references(records)
    if "id" in names:
        known = {name for name, _, _ in answers_in(answers)}
        theirs = {id_given(record.get(names["id"])) for record in records}
        if theirs.isdisjoint(known) or not known.isdisjoint(str(number) for number in range(1, len(values) + 1)):
            del names["id"]
    return names


def _by_id(given: InputConfig | str, names: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the records of a file of references, those of one id merged, and how many have no id.

    names: of Answers. Raises ConfigError if they differ in what answers are measured by, or if a reference is a printed
    Python list.
    """
    found: dict[str, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    unnamed = 0
    with open_source(given) as source:
        ids = RecordIds(source)
        for row in source:
            where = source.where(row.number)
            value = json_object(row.value, where)
            value = {**metadata_of(value), **value}
            value |= {ours: value.get(theirs) for ours, theirs in names.items()}
            if any(is_text(value.get(key)) for key in REFERENCES) and (problem := references_of(value)[1]):
                raise ConfigError(f"{where}: {problem}")  # a printed list: all records of the file have one
            unnamed += id_of(value) is None
            name = ids.of(replace(row, value=value) if "id" in names else row)
            before = found.get(name, {})
            if name in found and (what := _conflict(before, value)):
                raise ConfigError(
                    f'{where}: id "{name}" has other {what} than at {source.where(numbers[name])}; give each id one '
                    "record, with a list if there are several"
                )
            found[name] = before | {key: each for key, each in value.items() if each is not None}
            numbers.setdefault(name, row.number)
    return found, unnamed


def _conflict(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return what two records both have and differ in, an empty text if it is nothing."""
    measures: dict[str, Callable[[Mapping[str, Any]], set[str] | None]] = {
        "references": lambda row: set(references_of(row)[0]),
        "gold ids": lambda row: _gold_of(row)[0],
    }
    pairs = ((what, of(one), of(other)) for what, of in measures.items())
    return next((what for what, mine, others in pairs if mine and others and mine != others), "")


def metadata_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's metadata, {} where another program made something else of it."""
    found = line.get("metadata")
    return found if isinstance(found, dict) else {}
