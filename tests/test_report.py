"""The report: one file, complete, and closed to what models write."""

import copy
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from ragspec.report.page import answers, figures, render, rows, write_report
from ragspec.report.words import summary

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def run(name, method, speed, **more):
    return {
        **{
            "name": name,
            "peer": False,
            "runner": "huggingface",
            "method": method,
            "batch_size": 8,
            "num_tokens": "auto",
        },
        **{"repeat": 1, "records": 10, "failed": 0, "prompt_tokens": 5000, "output_tokens": 640, "generate_s": 10.0},
        **{"prefill_s": 6.0, "decode_s": 4.0, "load_s": 1.0, "warmup_s": 1.0, "tokens_per_s": speed},
        **{"decode_tokens_per_s": 2 * speed, "drafted": 100, "accepted": 60, "acceptance_rate": 0.6},
        **{"mean_acceptance_length": 2.0, "tokens_per_step": 1.8, "acceptance_by_position": [0.8, 0.5]},
        **{
            "latency_s": {"p50": 1.0, "p95": 2.0, "p99": 3.0},
            "time_to_first_token_s": {"p50": 0.5, "p95": 1, "p99": 1},
        },
        **{"identical": 10, "peak_memory_gib": 2.0},
        **more,
    }


def ratio(name, baseline, middle, low, high, metric="tokens_per_s"):
    return {
        **{"name": name, "baseline": baseline, "metric": metric, "median": middle, "low": low, "high": high, "pairs": 3}
    }


@pytest.fixture
def results():
    pieces = [
        {"text": "The ", "by": "target", "context": None},
        {"text": HOSTILE, "by": "draft", "context": "d1"},
        {"text": " end", "by": "draft", "context": None},
    ]
    sample = {
        **{"id": "q1", "question": HOSTILE, "pieces": pieces, "passages": [{"id": "d1", "text": HOSTILE}]},
        **{"guessed_known": True, "speculation": {"steps": 2, "drafted": 4, "accepted": 2, "acceptance_rate": 0.5}},
    }
    cost = {"points": [[1, 0.05], [8, 0.06], [64, 0.2]], "parameters": 10**8, "weight_bytes": 4 * 10**8}
    detail = {
        **{"samples": [sample], "acceptance_by_record": [0.1, 0.6], "step_cost": cost},
        "roofline": {"bytes_per_s": 2e10, "flops_per_s": 1.5e11},
    }
    return {
        "machine": {"processor": "P", "cores": 2, "memory_gib": 8.0, "gpus": [], "system": "Linux"},
        "versions": {"ragspec": "1"},
        "input": "in.jsonl",
        "runs": [run("none", "none", 20.0, acceptance_by_position=[]), run("context", "context", 30.0)],
        "ratios": [
            ratio("context", "none", 1.5, 1.4, 1.6),
            ratio("context", "none", 2.0, 1.9, 2.1, "decode_tokens_per_s"),
        ],
        "ratio_interval": "95%",
        "details": {"none": {**detail, "step_cost": None, "samples": []}, "context": detail},
        "configs": {},
        "notes": ["none: a note"],
    }


def test_the_page_has_words_figures_charts_and_answers(results):
    page = render(results)
    assert "context is 1.50 times (1.40 to 1.60) as fast as none" in page
    assert page.count("<svg") == len(figures(results)) == 5
    assert "written by the model" in page
    assert 'title="guessed by a draft, accepted; stands in passage d1"' in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/", "")  # names of XML, no links


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
    changed = copy.deepcopy(results)
    changed["ratios"] = [ratio("context", "none", 1.1, 0.9, 1.3)]
    assert summary(changed)[0].startswith("No clear winner")
    changed["ratios"] = [ratio("context", "none", 0.8, 0.75, 0.85)]
    assert summary(changed)[0].startswith("Speculation does not pay here")
    changed["ratios"] = [ratio("context", "none", 1.4, None, None)]
    assert "1.40 times (one pass)" in summary(changed)[0]
    changed["ratios"] = []
    assert "nothing to compare" in summary(changed)[0]


def test_the_summary_says_when_answers_changed(results):
    assert "Every answer is, token for token" in summary(results)[1]
    results["runs"][1]["identical"] = 8
    assert "context (2)" in summary(results)[1]


def test_rows_are_medians_over_passes(results):
    results["runs"] += [run("context", "context", 40.0, repeat=2), run("context", "context", 90.0, repeat=3)]
    assert [(row["name"], row["tokens_per_s"], row["passes"]) for row in rows(results)] == [
        ("none", 20.0, 1),
        ("context", 40.0, 3),
    ]


def test_answers_come_from_who_knows_where_tokens_came_from(results):
    assert [answer["name"] for answer in answers(results)] == ["context"]
    results["details"]["context"] = None
    assert answers(results) == []
