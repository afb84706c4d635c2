"""prompt.order through a run: the same prompts whole, resumed, limited and searched, and fewer tokens to compute."""

import io
import json
import random
import re
import sys

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.prompts.builder import canonical
from ragspec.prompts.passage_order import computed
from ragspec.records import Passage
from ragspec.run.generate import generate
from ragspec.run.local import Pipeline
from tests.conftest import read_jsonl, write_jsonl

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "glade", "heath", "islet"]
PASSAGES = [
    {"id": f"d{i}", "title": f"Title {i}", "text": f"{word} " + "so " * (5 + i * 3)} for i, word in enumerate(WORDS)
]


def records(count=60, seed=1, **more):
    chance = random.Random(seed)
    return [
        {"id": f"q{i}", "query": f"question {i}", "contexts": chance.sample(PASSAGES, chance.randint(0, 4)), **more}
        for i in range(count)
    ]


def run(tmp_path, source, name="out", limit=None, said=None, **prompt):
    config = build_config(
        {
            "runner": "fake",
            "input": str(source),
            "output": str(tmp_path / f"{name}.jsonl"),
            "prompt": {"order": "shared", **prompt},
        }
    )
    summary = generate(config, limit=limit, **({"say": said.append} if said is not None else {}))
    return {line["id"]: line.get("contexts") for line in read_jsonl(tmp_path / f"{name}.jsonl")}, summary


def cost(orders):
    weights = {passage["id"]: len(passage["text"]) for passage in PASSAGES}
    return computed(orders.values(), weights)


def test_every_prompt_has_its_own_passages_and_all_together_compute_fewer(tmp_path):
    given = records()
    source = write_jsonl(tmp_path / "in.jsonl", given)
    orders = {name: run(tmp_path, source, name, order=name)[0] for name in ("rank", "canonical", "shared")}
    ranked = {record["id"]: [passage["id"] for passage in record["contexts"]] for record in given}
    assert orders["rank"] == ranked
    for found in orders.values():
        assert {key: sorted(own) for key, own in found.items()} == {key: sorted(own) for key, own in ranked.items()}
    assert all(own == sorted(own) for own in orders["canonical"].values())
    assert cost(orders["shared"]) < cost(orders["canonical"]) < cost(orders["rank"])


@pytest.mark.parametrize("ids", [("d1", "d1"), ("1", "2"), ("a", "b")])
def test_the_canonical_order_is_one_whatever_the_ids_are(ids):
    """Chunks of one document share its id; and ids may be no more than small numbers."""
    one, other = Passage(ids[0], "y"), Passage(ids[1], "x")
    texts = [[given[i].text for i in canonical(given)] for given in [(one, other), (other, one)]]
    assert texts[0] == texts[1]


def test_lines_stand_in_the_order_of_the_input(tmp_path):
    orders, _ = run(tmp_path, write_jsonl(tmp_path / "in.jsonl", records()))
    assert list(orders) == [f"q{i}" for i in range(60)]


def test_the_first_of_a_record_stay_where_they_are(tmp_path):
    given = records()
    orders, _ = run(tmp_path, write_jsonl(tmp_path / "in.jsonl", given), keep_first=2)
    assert all(orders[r["id"]][:2] == [passage["id"] for passage in r["contexts"][:2]] for r in given)


def test_what_is_saved_is_said_before_and_after(tmp_path):
    said = []
    _, summary = run(tmp_path, write_jsonl(tmp_path / "in.jsonl", records()), said=said)
    assert len(said) == 1
    assert "tokens fewer" in said[0]
    assert any(note.startswith("prompt.order shared:") for note in summary.notes)


@pytest.mark.parametrize("window", [4096, 7, 20])
def test_a_resumed_run_makes_the_same_prompts(tmp_path, window):
    given = [*records(), {"id": "nothing", "to": "ask"}, {"id": 7, "query": "late", "contexts": [PASSAGES[2]]}]
    source = write_jsonl(tmp_path / "in.jsonl", given)
    whole, _ = run(tmp_path, source, "whole", order_window=window)
    for limit in (10, 11, 40, None):
        pieces, _ = run(tmp_path, source, "pieces", limit=limit, order_window=window)
        assert pieces == {key: whole[key] for key in pieces}
    assert (tmp_path / "pieces.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_windows_are_planned_by_themselves(tmp_path):
    given = records(40)
    both, _ = run(tmp_path, write_jsonl(tmp_path / "in.jsonl", given), order_window=20)
    first, _ = run(tmp_path, write_jsonl(tmp_path / "half.jsonl", given[:20]), "first")
    assert {key: both[key] for key in first} == first


def test_searched_passages_are_ordered_too(tmp_path):
    pytest.importorskip("lancedb")
    from ragspec.config.sections import RetrievalConfig
    from ragspec.retrieval.build import build

    corpus = write_jsonl(tmp_path / "corpus.jsonl", PASSAGES)
    index = tmp_path / "index"
    build(RetrievalConfig(index=str(index), corpus=[corpus], chunk_size=64))
    asked = [{"id": f"q{i}", "query": f"{WORDS[i % 9]} {WORDS[i * 5 % 7]} {WORDS[i * 2 % 5]}"} for i in range(30)]
    source = write_jsonl(tmp_path / "in.jsonl", asked)
    found = {}
    for order in ("rank", "shared"):
        config = build_config(
            {
                "runner": "fake",
                "input": source,
                "output": str(tmp_path / f"{order}.jsonl"),
                "prompt": {"order": order},
                "retrieval": {"index": str(index), "top_k": 3},
            }
        )
        summary = generate(config, limit=20)
        assert summary.retrieval["queries"] == (20 if order == "rank" else 30)
        summary = generate(config)
        found[order] = {line["id"]: line["contexts"] for line in read_jsonl(tmp_path / f"{order}.jsonl")}
    assert {key: sorted(own) for key, own in found["rank"].items()} == {
        key: sorted(own) for key, own in found["shared"].items()
    }
    assert cost(found["shared"]) < cost(found["rank"])


def test_a_stream_is_read_in_windows_and_what_came_before_a_break_is_answered(tmp_path, monkeypatch):
    text = "".join(json.dumps(record) + "\n" for record in records(30))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    piped, _ = run(tmp_path, "-", "piped", order_window=8)
    filed, _ = run(tmp_path, write_jsonl(tmp_path / "in.jsonl", records(30)), "filed", order_window=8)
    assert piped == filed


def test_a_pipeline_answers_in_windows():
    config = build_config({"runner": "fake", "prompt": {"order": "shared"}})
    with Pipeline(config) as pipeline:
        lines = list(pipeline.answers(records(12)))
    assert [line["id"] for line in lines] == [f"q{i}" for i in range(12)]


def test_ranks_are_told_where_asked_for(tmp_path):
    template = "{% for c in contexts %}{{ c.id }} {% endfor %}best first: {{ best_first | join(' ') }} {{ query }}"
    config = build_config(
        {"runner": "fake", "prompt": {"order": "canonical", "show_ranks": True, "template": template}}
    )
    contexts = [{"id": key, "text": "t", "score": score} for key, score in (("b", 0.1), ("c", 0.9), ("a", 0.5))]
    from ragspec.inputs.record import parse_record
    from ragspec.run.session import prepare

    session = prepare(config)
    prompt = session.prompts.build(parse_record({"query": "q", "contexts": contexts}, 1), 8)
    assert "a b c best first: 3 1 2 q" in session.runner.tokenizer.decode(prompt.token_ids)


def test_ranks_that_a_template_does_not_tell_are_an_error():
    from ragspec.run.session import prepare

    with pytest.raises(ConfigError, match="best_first"):
        prepare(build_config({"runner": "fake", "prompt": {"show_ranks": True, "template": "{{ query }}"}}))
    with pytest.raises(ConfigError, match="keep_first"):
        build_config({"runner": "fake", "prompt": {"keep_first": 1}})


def test_the_least_relevant_passages_are_dropped_whatever_the_order(tmp_path):
    given = [{"id": f"q{i}", "query": "q", "contexts": [PASSAGES[i], PASSAGES[3], PASSAGES[8]]} for i in (0, 1, 2)]
    source = write_jsonl(tmp_path / "in.jsonl", given)
    kept, _ = run(tmp_path, source, max_prompt_tokens=160)
    ranked, _ = run(tmp_path, source, "ranked", order="rank", max_prompt_tokens=160)
    assert {key: set(own) for key, own in kept.items()} == {key: set(own) for key, own in ranked.items()}
    assert any(len(own) < 3 for own in kept.values())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_engine_computes_what_was_planned(tmp_path, tiny, batch_size):
    """Passages that stand alike are computed once, by a real model."""
    source, cached = write_jsonl(tmp_path / "in.jsonl", records(24, seed=5)), {}
    for order in ("rank", "shared"):
        config = {
            "runner": "huggingface",
            "model": str(tiny),
            "runner_args": {"batch_size": batch_size},
            "input": source,
            "output": str(tmp_path / f"{order}.jsonl"),
            "prompt": {"order": order},
            "sampling": {"max_new_tokens": 2},
        }
        summary = generate(build_config(config))
        assert summary.records == 24
        cached[order] = summary.cached_prompt_tokens / summary.prompt_tokens
    told = next(note for note in summary.notes if note.startswith("prompt.order"))
    planned, by_rank = (int(part) / 100 for part in re.findall(r"(\d+)%", told))
    assert cached["shared"] - cached["rank"] > (by_rank - planned) / 2 > 0
