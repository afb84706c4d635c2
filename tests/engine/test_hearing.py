"""An answer as it grows: what is heard is what is written in the end."""

import pytest

import ragspec
from ragspec.speculation.copied_spans import LEAST, CopiedSpans
from ragspec.speculation.drafters.base import Draft
from tests.conftest import SAMPLE, read_jsonl


@pytest.mark.parametrize("method", ["none", "context"])
def test_what_is_heard_grows_into_the_answer(tiny, method):
    heard = {}
    raw = {
        "model": tiny,
        "runner": "huggingface",
        "speculation": {"method": method},
        "sampling": {"max_new_tokens": 40},
    }
    records = read_jsonl(SAMPLE)[:3]
    with ragspec.Pipeline(ragspec.load_config(raw)) as pipeline:
        plain = [line["output"] for line in pipeline.answers(records)]
        lines = list(pipeline.answers(records, hear=lambda partial: heard.setdefault(partial.id, []).append(partial)))
    assert [line["output"] for line in lines] == plain
    for line in lines:
        texts = [partial.text for partial in heard[line["id"]]]
        assert len(set(texts)) > 3
        assert all(
            later.startswith(earlier) for earlier, later in zip(texts, [*texts[1:], line["output"]], strict=True)
        )
        spans = [(span["start"], span["end"]) for span in line.get("copied", [])]
        for partial in heard[line["id"]]:
            for span in partial.copied:
                assert any(start <= span["start"] and span["end"] <= end for start, end in spans)


def test_nothing_of_a_stop_string_is_heard(tiny):
    raw = {"model": tiny, "runner": "huggingface", "sampling": {"max_new_tokens": 40}}
    question = read_jsonl(SAMPLE)[0]["query"]
    with ragspec.Pipeline(raw) as pipeline:
        plain = pipeline.ask(question)["output"]
    for size in (2, 9, 17):
        heard = []
        raw["sampling"]["stop"] = [plain[20 : 20 + size]]
        with ragspec.Pipeline(raw) as pipeline:
            line = pipeline.ask(question, hear=heard.append)
        assert line["finish_reason"] == "stop"
        assert all(line["output"].startswith(partial.text) for partial in heard)
        assert heard


def test_tokens_of_a_run_that_may_be_a_citation_wait():
    prompt = list(range(100, 120))
    copies = CopiedSpans(prompt, [(0, 20)])
    drafted = Draft(prompt[5:12], sources=list(range(5, 12)))
    copies.note(3, drafted, prompt[5 : 5 + LEAST - 1])
    assert copies.settled(3 + LEAST - 1) == 2  # the token before may belong to it
    copies.note(3 + LEAST - 1, Draft(), [prompt[5 + LEAST - 1]])
    assert copies.settled(3 + LEAST) == 3 + LEAST - 1
    assert CopiedSpans(prompt, []).settled(7) == 7
