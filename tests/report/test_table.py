"""`--format`: tables for papers, pages and programs."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.errors import ConfigError
from ragspec.quality.evaluate import evaluate
from ragspec.report.side_by_side import pairs_of, write_pairs
from ragspec.report.table import check_format, written
from tests.conftest import read_jsonl, write_jsonl

ROWS = [{"method": "a|b_c", "speed": 41.2345678, "low": None}, {"method": "50%", "speed": 12345.6, "low": 1}]
HOSTILE = "<script>document.title='owned'</script>"


def test_markdown_has_a_head_and_escapes_its_bars():
    assert (
        written(ROWS, "md") == "| method | speed | low |\n|---|---|---|\n| a\\|b_c | 41.23 |  |\n| 50% | 12346 | 1 |\n"
    )


def test_latex_escapes_what_is_special_there():
    shown = written(ROWS, "latex")
    assert r"a\textbar{}b\_c & 41.23 &  \\" in shown
    assert r"50\% & 12346 & 1 \\" in shown
    assert shown.startswith(r"\begin{tabular}{lrr}")


def test_csv_and_json_keep_every_digit():
    assert json.loads(written(ROWS, "json")) == ROWS
    found = list(csv.DictReader(io.StringIO(written(ROWS, "csv"))))
    assert found[0] == {"method": "a|b_c", "speed": "41.2345678", "low": ""}


TEXTS = [{"id": "[1]\\", "answer": 'a < b\n\n50% of {x}_1 | ~\u2028"#&$^', "f1": 1.5, "same": True}]


def test_a_cell_is_one_line_and_means_itself(tmp_path):
    shown = written(TEXTS, "md")
    assert shown.splitlines()[2] == '| [1]\\\\ | a &lt; b<br><br>50% of {x}\\_1 \\| \\~<br>"#&$^ | 1.5 | True |'
    latex = written(TEXTS, "latex")
    assert latex.startswith(r"\begin{tabular}{llrr}")
    row = latex.splitlines()[4]
    assert row.startswith(r"{[}1{]}\textbackslash{} & a \textless{} b  50\% of \{x\}\_1 \textbar{} \textasciitilde{} ")
    assert row.endswith(r'"\#\&\$\textasciicircum{} & 1.5 & True \\')
    assert next(csv.DictReader(io.StringIO(written(TEXTS, "csv"), newline="")))["answer"] == TEXTS[0]["answer"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2 * 3 * 4", r"2 \* 3 \* 4"),
        ("**no**, _no_, ~~no~~", r"\*\*no\*\*, \_no\_, \~\~no\~\~"),
        ("`x`", r"\`x\`"),
        ("output_tokens", "output_tokens"),
        ("a\\|b", r"a\\\|b"),  # a bar behind a backslash ends no cell
    ],
)
def test_markdown_shows_what_it_would_take_for_markup(text, shown):
    assert written([{"answer": text}], "md").splitlines()[2] == f"| {shown} |"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_an_empty_cell(value):
    rows = [{"method": "none", "speed": value}]
    assert json.loads(written(rows, "json")) == [{"method": "none", "speed": None}]
    assert written(rows, "csv") == "method,speed\nnone,\n"
    assert written(rows, "md").endswith("| none |  |\n")
    assert r"none &  \\" in written(rows, "latex")


def test_a_format_that_is_none_is_one_line():
    with pytest.raises(ConfigError, match=r'--format: "latx" is not known; did you mean "latex"\?; give md, csv'):
        check_format("latx")


@pytest.fixture
def answers(tmp_path):
    texts = {"a": ("Ann built it.", "Ann Smith built it."), "b": ("Yes.", "Yes."), "c": (HOSTILE, "no")}
    return [
        write_jsonl(
            tmp_path / f"{side}.jsonl",
            [
                {"id": name, "output": pair[side], "query": f"{name}?", "metadata": {"reference": "Ann Smith built it"}}
                for name, pair in texts.items()
            ]
            + [{"id": "d", "error": {"type": "RecordError", "message": "no"}}],
        )
        for side in (0, 1)
    ]


def test_what_differs_is_marked_on_its_side(answers):
    found = pairs_of(*answers)
    assert found.verdict.startswith("1 of 3 answers are the same; F1 ")
    first, second = found.pairs[0].sides
    assert [text for text, marked in first.pieces if marked] == []
    assert "".join(text for text, marked in second.pieces if marked).strip() == "Smith"
    assert (round(first.f1), second.f1) == (86, 100.0)


def test_the_page_shows_both_and_escapes_them(answers, tmp_path):
    write_pairs(*answers, tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert "<ins>" in page
    assert "<script" not in page
    assert page.index("a?") < page.index("b?")
    assert "Both answers are the same" in page


def test_answers_of_one_run_alone_are_counted(answers, tmp_path):
    other = write_jsonl(tmp_path / "part.jsonl", [*read_jsonl(answers[1])[1:], {"id": "e", "output": "x"}])
    verdict = pairs_of(answers[0], other).verdict
    assert verdict.startswith("1 of 2 answers are the same (2 more in only one of the runs); F1 ")
    assert "in only one" not in pairs_of(*answers).verdict


def test_answers_that_a_later_line_replaces_are_counted(answers, tmp_path):
    twice = write_jsonl(tmp_path / "twice.jsonl", [*read_jsonl(answers[1]), *read_jsonl(answers[1])[:1]])
    assert "(1 are replaced by later ones with the same id)" in pairs_of(twice, answers[0]).verdict
    assert "replaced" not in pairs_of(*answers).verdict


@pytest.mark.parametrize("metadata", [5, ["a"], "a text"])
def test_metadata_of_another_kind_holds_no_reference(tmp_path, metadata):
    one = write_jsonl(tmp_path / "one.jsonl", [{"id": "a", "output": "salt", "metadata": metadata}])
    (pair,) = pairs_of(one, one).pairs
    assert (pair.reference, pair.question, pair.same) == ("", "", True)


@pytest.mark.parametrize(
    ("parsed", "reference"),
    [({"answer": "Ann Smith", "sources": ["d1"]}, "Ann Smith"), (["Ann", "Bob"], '["Ann", "Bob"]')],
)
def test_a_structured_answer_has_the_f1_that_evaluate_computes(tmp_path, parsed, reference):
    text = json.dumps(parsed)
    line = {"id": "a", "output": text, "valid": True, "parsed": parsed, "metadata": {"reference": reference}}
    one = write_jsonl(tmp_path / "one.jsonl", [line])
    (pair,) = pairs_of(one, one).pairs
    assert [side.f1 for side in pair.sides] == [evaluate(one).scores["f1"].mean] * 2 == [100.0] * 2
    assert pair.sides[0].text == text


def test_east_asian_text_is_compared_by_character(tmp_path):
    sides = [
        write_jsonl(tmp_path / f"{n}.jsonl", [{"id": "a", "output": text}])
        for n, text in enumerate(["灯台は1871年に建つ。", "灯台は1867年に焼けた。"])
    ]
    (pair,) = pairs_of(*sides).pairs
    assert [text for text, marked in pair.sides[0].pieces if not marked] == ["灯台は", "年に", "。"]
    write_pairs(sides[0], write_jsonl(tmp_path / "e.jsonl", [{"id": "a", "output": ""}]), tmp_path / "p.html")
    assert "(empty)" in (tmp_path / "p.html").read_text()


def test_openai_lines_are_outputs_too(answers, tmp_path):
    lines = read_jsonl(answers[1])
    batch = [
        {"id": f"batch_{line['id']}", "custom_id": line["id"], "error": line.get("error")}
        | {
            "response": {
                "body": {"choices": [{"message": {"content": line["output"]}}], "usage": {"completion_tokens": 7}}
            }
        }
        if "output" in line
        else {"id": "batch_d", "custom_id": "d", "response": {"body": {"error": {}}}, "error": line["error"]}
        for line in lines
    ]
    other = write_jsonl(tmp_path / "batch.jsonl", batch)
    found, mixed = pairs_of(*answers), pairs_of(answers[0], other)
    assert [pair.sides[1].text for pair in mixed.pairs] == [pair.sides[1].text for pair in found.pairs]
    assert [(pair.id, pair.question) for pair in mixed.pairs] == [(pair.id, pair.question) for pair in found.pairs]
    assert {pair.sides[1].tokens for pair in mixed.pairs} == {7}
    assert pairs_of(other, answers[0]).pairs[0].reference == "Ann Smith built it", "from either output"
    alone = write_pairs(other, other, tmp_path / "p.html")
    assert alone.verdict == "3 of 3 answers are the same"


def test_the_command_writes_the_page_and_the_table(answers, tmp_path):
    done = CliRunner().invoke(app, ["report", *answers, "-o", str(tmp_path / "p.html"), "--format", "csv"])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["same"] for row in rows] == ["False", "True", "False"]
    assert "1 of 3 answers are the same" in done.stderr
    assert (tmp_path / "p.html").exists()


def test_scores_are_printed_as_a_table(answers):
    done = CliRunner().invoke(app, ["evaluate", answers[0], "--against", answers[1], "--format", "md"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("| score | mean | low | high | records | difference |")
    assert "| f1 |" in done.stdout


def test_outputs_of_other_records_are_one_line(answers, tmp_path):
    other = write_jsonl(tmp_path / "x.jsonl", [{"id": "z", "output": "x"}])
    with pytest.raises(ConfigError, match="none of its records are in"):
        pairs_of(answers[0], other)
