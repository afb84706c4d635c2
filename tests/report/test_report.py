"""The report: one file, complete, and closed to what models write."""

import io
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from ragspec.benchmark.details import print_results, table_of
from ragspec.benchmark.results import (
    Details,
    Percentiles,
    Piece,
    Quote,
    Ratio,
    Results,
    Roofline,
    Run,
    Sample,
    StepCost,
)
from ragspec.errors import ConfigError
from ragspec.report.charts import PALETTE, figures, rows
from ragspec.report.page import render, shown_answers, summary, write_report

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def run(name, method, speed, **more):
    more = {"decode_tokens_per_s": 2 * speed if speed else None} | more
    given = {
        **{"name": name, "peer": False, "runner": "huggingface", "method": method, "batch_size": 8},
        **{"num_tokens": "auto", "repeat": 1, "records": 10, "failed": 0, "prompt_tokens": 5000},
        **{"output_tokens": 640, "generate_s": 10.0, "prefill_s": 6.0, "decode_s": 4.0, "load_s": 1.0},
        **{"warmup_s": 1.0, "tokens_per_s": speed, "drafted": 100},
        **{"accepted": 60, "acceptance_rate": 0.6, "mean_acceptance_length": 2.0, "tokens_per_step": 1.8},
        **{"acceptance_by_position": (0.8, 0.5), "latency_s": Percentiles(1.0, 2.0, 3.0)},
        **{"time_to_first_token_s": Percentiles(0.5, 1.0, 1.0), "identical": 10, "peak_memory_gib": 2.0},
    }
    return Run(**given | more)


def ratio(name, baseline, middle, low, high, metric="tokens_per_s"):
    return Ratio(name, baseline, metric, middle, low, high, pairs=3)


@pytest.fixture
def results():
    pieces = (Piece("The ", "target", None), Piece(HOSTILE, "draft", "d1"), Piece(" end", "draft", None))
    speculation = {"steps": 2, "drafted": 4, "accepted": 2, "acceptance_rate": 0.5}
    sample = Sample("q1", HOSTILE, pieces, (Quote("d1", HOSTILE),), True, speculation)
    cost = StepCost(((1, 0.05), (8, 0.06), (64, 0.2)), 10**8, 4 * 10**8)
    detail = Details((sample,), (0.1, 0.6), cost, Roofline(2e10, 1.5e11))
    return Results(
        machine={"processor": "P", "cores": 2, "memory_gib": 8.0, "gpus": [], "system": "Linux"},
        versions={"ragspec": "1"},
        input="in.jsonl",
        runs=(run("none", "none", 20.0, acceptance_by_position=()), run("context", "context", 30.0)),
        ratios=(
            ratio("context", "none", 1.5, 1.4, 1.6),
            ratio("context", "none", 2.0, 1.9, 2.1, "decode_tokens_per_s"),
        ),
        ratio_interval="95%",
        details={"none": replace(detail, step_cost=None, samples=()), "context": detail},
        configs={},
        notes=("none: a note",),
    )


def test_the_page_has_words_figures_charts_and_answers(results):
    page = render(results)
    assert "context is 1.50 times (1.40 to 1.60) as fast as none" in page
    assert page.count("<svg") == len(figures(results)) == 5
    assert "written by the model" in page
    assert 'title="guessed by a draft, accepted; found in passage d1"' in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/", "")  # names of XML, no links


def test_joules_are_shown_where_the_machine_tells_them(results):
    assert "J/token" not in render(results)
    assert all("energy_j" not in run for run in results.to_json()["runs"])
    told = replace(results, runs=tuple(replace(run, energy_j=320.0) for run in results.runs))
    assert '<td data-label="J/token">0.50</td>' in render(told)
    assert [run["energy_j"] for run in told.to_json()["runs"]] == [320.0, 320.0]
    assert "j_per_output_token" not in table_of(results)[0]
    assert [row["j_per_output_token"] for row in table_of(told)] == [0.5, 0.5]


def test_a_report_without_its_extra_says_in_one_line_what_to_install(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r'report.html: its charts need vl-convert: pip install "ragspec\[report\]"'):
        render(results)


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.handlers = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]


def test_what_a_model_wrote_cannot_become_an_element(results):
    elements = Elements()
    elements.feed(render(results))
    assert not {"script", "img", "iframe", "object", "link"} & set(elements.tags)
    assert not elements.handlers


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("policy", [True, False], ids=["as it is", "without its content policy"])
def test_a_hostile_answer_does_nothing_in_a_browser(results, tmp_path, policy):
    path = write_report(results, tmp_path)
    if not policy:  # escaping alone has to do
        page = path.read_text()
        assert "Content-Security-Policy" in page
        path.write_text(page.replace("Content-Security-Policy", "x-nothing"))
    dom = browse(path, tmp_path)
    assert "<title>ragspec benchmark</title>" in dom
    assert "as fast as none" in dom
    assert dom.count("<svg") == 5


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_browser_test_would_notice(tmp_path):
    path = tmp_path / "p.html"
    path.write_text(f"<title>ragspec benchmark</title>{HOSTILE}")
    assert "<title>owned</title>" in browse(path, tmp_path)


def browse(path, tmp_path):
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [CHROMIUM, *flags.split(), "--disable-component-update", "--disable-sync"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


def test_a_report_can_leave_the_records_texts_out(results):
    page = render(results, quote=False)
    assert "Answers, token by token" not in page
    assert "onerror" not in page
    assert page.count("<svg") == 5


def test_the_summary_says_no_clear_winner_where_chance_would_do(results):
    def verdict(*ratios):
        return summary(replace(results, ratios=ratios))[0]

    assert verdict(ratio("context", "none", 1.1, 0.9, 1.3)).startswith("No clear winner")
    assert verdict(ratio("context", "none", 0.8, 0.75, 0.85)).startswith("Speculation does not pay here")
    one = verdict(ratio("context", "none", 1.4, None, None))
    assert one.startswith("No clear winner: context came to 1.40 times (one pass) the speed of none")
    assert "nothing to compare" in verdict()


def several(results, *ratios):
    """Return the summary's first sentences, for candidates of these names, medians and intervals."""
    runs = (results.runs[0], *(run(name, "context", 20.0) for name, *_ in ratios))
    details = dict.fromkeys([each.name for each in runs])
    given = tuple(ratio(name, "none", *numbers) for name, *numbers in ratios)
    return summary(replace(results, runs=runs, ratios=given, details=details))


def test_the_lead_names_every_sure_loss_and_calls_nothing_a_win_that_may_be_chance(results):
    gain, loss, open_ = ("auto", 1.5, 1.4, 1.6), ("lookup", 0.56, 0.24, 0.97), ("suffix", 1.9, 0.8, 4.0)
    lead, chance, *_ = several(results, open_, gain, loss)
    assert lead == (
        "auto is 1.50 times (1.40 to 1.60) as fast as none, end to end. "
        "Slower than plain decoding: lookup at 0.56 times (0.24 to 0.97)."
    )
    assert chance == "May be chance: suffix at 1.90 times (0.80 to 4.00); more passes (--repeat) would tell."
    assert "Slower than plain decoding: lookup" in several(results, loss, open_)[0]
    assert several(results, loss, open_)[0].startswith("No clear winner: suffix came to")
    assert several(results, loss)[0].startswith("Speculation does not pay here: the best, lookup is 0.56")
    assert several(results, ("auto", 1.01, 1.005, 1.015))[0].endswith("end to end, which is little.")


def test_a_peer_is_beaten_only_where_the_interval_says_so(results):
    peer = run("peer-hf", "none", 20.0, peer=True)
    for numbers, said in [
        ((1.2, 1.1, 1.3), "context is 1.20 times (1.10 to 1.30) as fast as hf."),
        ((1.2, 0.9, 1.6), "context came to 1.20 times (0.90 to 1.60) the speed of hf, which may be chance."),
    ]:
        given = replace(results, runs=(*results.runs, peer), ratios=(ratio("context", "peer-hf", *numbers),))
        assert summary(given)[-1] == said


def test_a_ratio_in_the_table_has_its_interval(results):
    assert ">1.50x (1.40 to 1.60)</td>" in render(results)


def test_the_summary_says_when_answers_changed(results):
    assert "Every answer is, token for token" in summary(results)[1]
    changed = replace(results.runs[1], identical=8)
    assert "context (2)" in summary(replace(results, runs=(results.runs[0], changed)))[1]


def test_rows_are_medians_over_passes(results):
    more = (run("context", "context", 40.0, repeat=2), run("context", "context", 90.0, repeat=3))
    table = rows(replace(results, runs=results.runs + more))
    assert [(row.run.name, row.run.tokens_per_s, row.passes) for row in table] == [
        ("none", 20.0, 1),
        ("context", 40.0, 3),
    ]


def test_times_of_records_are_medians_over_passes_too(results):
    slow, typical = Percentiles(2.0, 9.0, 9.0), Percentiles(1.5, 1.8, 1.9)
    passes = [run("context", "context", 30.0, repeat=i, latency_s=each) for i, each in enumerate([slow, typical] * 2)]
    passes.append(run("context", "context", 30.0, repeat=5, latency_s=Percentiles(1.0, 1.9, 2.0), prefill_s=1.0))
    row = replace(results, runs=(results.runs[0], *passes)).typical("context")
    assert row.latency_s == Percentiles(1.5, 1.9, 2.0)
    assert row.time_to_first_token_s == results.runs[0].time_to_first_token_s
    assert row.prefill_s == 6.0


def test_a_method_that_drafted_nothing_has_won_nothing(results):
    idle = run("mine", "mine", 25.0, drafted=3, accepted=0)
    given = replace(results, runs=(*results.runs, idle), ratios=(*results.ratios, ratio("mine", "none", 1.3, 1.2, 1.4)))
    lead, said, *_ = summary(given)
    assert lead.startswith("context is 1.50 times")
    assert "mine" not in lead
    assert said == "mine drafted less than a token per record, so any difference in speed is chance."
    alone = replace(given, ratios=given.ratios[-1:])
    assert summary(alone)[0] == said


def test_a_speed_that_is_not_known_is_no_figure(results):
    """A pass whose answers are all empty has none."""
    unknown = run(
        "none", "none", 0.0, tokens_per_s=None, decode_tokens_per_s=None, latency_s=None, time_to_first_token_s=None
    )
    page = re.sub(r">\s+<", "><", render(replace(results, runs=(unknown, results.runs[1]))))
    page = re.sub(r' (data-label|class)="[^"]*"', "", page)
    assert '<th scope="row">none</th><td>\u2013</td>' in page
    assert '<th scope="row">context</th><td>30.0</td><td>1.50x (1.40 to 1.60)</td><td>10 of 10</td><td>60%</td>' in page


def test_tokens_per_step_that_are_not_known_are_no_figure(results):
    """As of another tool, whose steps are not counted."""
    unknown = replace(results, runs=(replace(results.runs[0], tokens_per_step=None), results.runs[1]))
    assert '<td data-label="tokens/step">\u2013</td>' in render(unknown)
    with Console(file=io.StringIO(), width=200) as console:
        print_results(console, unknown, Path("out"))
        assert "0.00" not in console.file.getvalue()


def test_answers_come_from_who_knows_where_tokens_came_from(results):
    assert [answer.name for answer in shown_answers(results)] == ["context"]
    assert shown_answers(replace(results, details=results.details | {"context": None})) == []


def test_a_table_has_scopes_and_each_value_its_label(results):
    page = render(results)
    headings = re.findall(r'<th scope="col">([^<]*)</th>', page)
    labels = re.findall(r'data-label="([^"]*)"', page)
    assert headings[0] == "candidate"
    assert labels[: len(headings) - 1] == headings[1:]
    assert headings.index("identical") <= 3  # in sight without scrolling
    assert "<th>" not in page


def test_every_chart_has_its_figures_in_words(results):
    page = render(results)
    assert page.count('<svg role="img" aria-label="') == page.count("<svg")
    assert "context vs. none: 1.50x (1.40 to 1.60)" in page


def test_a_speed_that_is_not_known_is_in_no_chart(results):
    runs = (*results.runs, run("none-b1", "none", None, batch_size=1), run("context-b1", "context", 9.0, batch_size=1))
    (words,) = [each.words for each in figures(replace(results, runs=runs)) if each.title == "Speed against batch size"]
    assert "huggingface context at 1: 9.0 tokens per second" in words
    assert "none at 1" not in words


def test_ratios_are_on_a_logarithmic_axis_around_one():
    from ragspec.report.charts import speed_ups

    spec = speed_ups(
        [{"name": "a", "median": 0.5, "low": 0.4, "high": 0.6}, {"name": "b", "median": 2, "low": None, "high": None}]
    )
    axes = [layer["encoding"]["x"] for layer in spec["layer"]]
    assert {axis["scale"]["type"] for axis in axes} == {"log"}
    low, high = axes[0]["scale"]["domain"]
    assert low < 0.4 < 2 < high
    assert 1 in axes[0]["axis"]["values"]


def test_several_methods_are_small_multiples(results):
    other = run("lookup", "prompt_lookup", 25.0)
    given = replace(results, runs=(*results.runs, other), details=results.details | {"lookup": results.details["none"]})
    by_title = {figure.title: figure.spec for figure in figures(given)}
    assert by_title["Acceptance by position"]["columns"] == 2
    assert "facet" in by_title["Acceptance by record"]
    assert render(given).count("<svg") == len(figures(given))


def test_answers_come_before_the_charts(results):
    page = render(results)
    assert page.index("summary") < page.index("Answers, token by token") < page.index("<h2>Charts")


def test_the_page_knows_the_dark_phones_and_paper(results):
    page = render(results)
    for medium in ("(prefers-color-scheme: dark)", "(max-width: 700px)", "@media print"):
        assert medium in page
    colours = set(re.findall(r"#[0-9a-f]{6}", " ".join(PALETTE)))
    dark = page[page.index("prefers-color-scheme: dark") :]
    assert all(f'svg [fill="{colour}"]' in dark for colour in colours)
