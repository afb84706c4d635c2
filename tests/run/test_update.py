import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.outputs.update import Stamp
from ragspec.run.generate import dry_update, generate
from tests.conftest import ROOT, read_jsonl, write_jsonl

NAMES = {
    "out.jsonl": "json",
    "out.csv": "csv",
    "out.jsonl.zst": "zstandard",
    "out.parquet": "pyarrow",
    "out.lance": "lancedb",
}


def lines_of(path):
    from ragspec.outputs.reader import answer_lines

    return list(answer_lines(str(path)))


@pytest.fixture(params=NAMES)
def out(request, tmp_path):
    pytest.importorskip(NAMES[request.param])  # what the format needs
    return tmp_path / request.param


def questions(n, **more):
    return [{"id": f"q{i}", "query": f"question {i}", **more} for i in range(n)]


def config_of(out, records, **more):
    source = write_jsonl(out.parent / "in.jsonl", records)
    raw = {"runner": "fake", "input": source, "output": {"path": str(out), "part_records": 4}, **more}
    return build_config(raw)


def update(config, **more):
    said = []
    return generate(config, update=True, say=said.append, **more), " ".join(said)


def shown(out):
    return {line["id"]: line.get("output", "failed") for line in lines_of(out)}


def whole(out, records, **more):
    """Return what a run from scratch writes."""
    other = out.with_name(f"whole-{out.name}")
    generate(config_of(other, records, **more), resume=False)
    return shown(other)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_an_output_to_which_an_editor_added_a_mark_is_continued(tmp_path, name):
    out = tmp_path / name
    generate(config_of(out, questions(3)))
    out.write_bytes(b"\xef\xbb\xbf" + out.read_bytes())
    assert generate(config_of(out, questions(3))).skipped == 3
    summary, _ = update(config_of(out, questions(3, topic="birds")))
    assert summary.skipped == 3
    assert [line["id"] for line in lines_of(out)] == ["q0", "q1", "q2"]
    assert all(line["metadata"] == {"topic": "birds"} for line in lines_of(out))


def test_lines_that_had_no_metadata_get_it(out):
    generate(config_of(out, questions(3)))
    summary, _ = update(config_of(out, questions(3, topic="birds")))
    assert summary.skipped == 3
    assert [line["metadata"] for line in lines_of(out)] == [{"topic": "birds"}] * 3


def test_only_changed_records_are_answered_and_the_output_is_as_from_scratch(out):
    generate(config_of(out, questions(10)))
    before = {line["id"]: line for line in lines_of(out)}
    records = questions(12)
    records[3]["query"] = "another question"
    summary, said = update(config_of(out, records))
    assert "3 of 12 records to answer (2 new, 1 changed in the input), 9 stay as they are" in said
    assert (summary.records, summary.skipped) == (3, 9)
    after = lines_of(out)
    assert [line["id"] for line in after] == [record["id"] for record in records]  # in the place of the old line
    assert all(line == before[line["id"]] for line in after if line["id"] not in ("q3", "q10", "q11"))
    assert shown(out) == whole(out, records)
    assert generate(config_of(out, records)).skipped == 12  # an ordinary run goes on from here


def test_nothing_changed_is_nothing_done(out):
    config = config_of(out, questions(6))
    generate(config)
    before = lines_of(out)
    summary, said = update(config)
    assert "0 of 6 records" in said
    assert summary.records == 0
    assert lines_of(out) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt": {"template": "Say: {{ query }}"}}, "with another prompt"),
        ({"sampling": {"max_new_tokens": 5}}, "with other sampling"),
        ({"runner_args": {"future": 1}}, "with another model or dtype"),
    ],
)
def test_a_changed_config_answers_what_it_changes(tmp_path, change, why, monkeypatch):
    from ragspec.runners import fake

    monkeypatch.setattr(fake, "Args", type("Args", (fake.Args,), {"__annotations__": {"future": int}, "future": 0}))
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(3)))
    _, said = update(config_of(out, questions(3), **change))
    assert f"3 of 3 records to answer (3 {why})" in said
    assert shown(out) == whole(out, questions(3), **change)
    _, said = update(config_of(out, questions(3), **change))
    assert "0 of 3 records" in said


@pytest.mark.parametrize(
    "change",
    [{"speculation": {"method": "prompt_lookup"}}, {"sampling": {"seed": 5}}, {"runner_args": {"batch_size": 2}}],
)
def test_what_cannot_change_an_answer_answers_nothing(tmp_path, change):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(3)))
    summary, _ = update(config_of(out, questions(3), **change))
    assert summary.records == 0
    assert generate(config_of(out, questions(3), **change)).skipped == 3


def test_metadata_and_ids_are_the_inputs_while_answers_stay(out):
    generate(config_of(out, questions(4, tag=1)))
    records = [{"id": "renamed", "query": "question 0"}, *questions(4, tag=2)[1:]]
    summary, _ = update(config_of(out, records))
    assert summary.records == 0
    found = {line["id"]: line.get("metadata", {}) for line in lines_of(out)}
    assert found == {"renamed": {}, "q1": {"tag": 2}, "q2": {"tag": 2}, "q3": {"tag": 2}}
    assert generate(config_of(out, records)).skipped == 4


def test_lines_that_stay_show_the_questions_and_passages_of_the_input(out):
    more = {"prompt": {"template": "Say: {{ contexts[0].text }}"}, "output": {"path": str(out), "part_records": 4}}
    more["output"]["include"] = ["query", "contexts"]

    def asked(query, **passage):
        return [{"id": f"q{i}", "query": query, "contexts": [{"text": f"text {i}", **passage}]} for i in range(3)]

    seen = ("id", "query", "contexts", "passages", "context_scores", "output", "fingerprint")
    for query, passage in (
        ("old", {"id": "d1", "score": 0.5}),
        ("new", {"id": "d2"}),
        ("new", {"id": "d3", "score": 2}),
    ):
        config = config_of(out, asked(query, **passage), **more)
        assert update(config)[0].records == (3 if query == "old" else 0)
        other = config_of(out.with_name(f"whole-{out.name}"), asked(query, **passage), **more)
        other = other.model_copy(
            update={"output": other.output.model_copy(update={"path": f"{out.parent}/w-{out.name}"})}
        )
        generate(other, resume=False)
        found, expected = lines_of(out), lines_of(f"{out.parent}/w-{out.name}")
        assert [[each.get(name) for name in seen] for each in found] == [
            [each.get(name) for name in seen] for each in expected
        ]


def test_a_new_line_that_waits_shows_the_metadata_of_a_record_that_is_changed_back(tmp_path):
    out, other = tmp_path / "out.jsonl", {"sampling": {"max_new_tokens": 3}}
    generate(config_of(out, questions(9, tag=1)))

    class Fifth:
        def answered(self, result):
            if result.id == "q4":
                raise KeyboardInterrupt

        failed = answered

    with pytest.raises(KeyboardInterrupt):
        update(config_of(out, questions(9, tag=2), **other), observers=[Fifth()])
    assert update(config_of(out, questions(9, tag=1), **other))[0].records == 4
    assert [each["metadata"] for each in read_jsonl(out)] == [{"tag": 1}] * 9


def test_spans_of_lines_that_stay_name_the_passages_of_the_input():
    line = {"id": "a", "output": "text", "contexts": ["d1", "d2"], "copied": [{"start": 0, "end": 4, "context": "d2"}]}
    found = json.loads(Stamp("key", "b", b'{"contexts": ["e1", "e2"]}').on(json.dumps(line).encode()))
    assert (found["contexts"], found["copied"]) == (["e1", "e2"], [{"start": 0, "end": 4, "context": "e2"}])


def test_a_line_inserted_in_a_file_without_ids_answers_one_record(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, [{"query": f"question {i}"} for i in range(5)]))
    records = [{"query": "first of all"}, *({"query": f"question {i}"} for i in range(5))]
    summary, _ = update(config_of(out, records))
    assert summary.records == 1
    assert shown(out) == whole(out, records)


def test_a_question_that_is_asked_once_more_has_an_answer_of_its_own(out):
    generate(config_of(out, [{"query": "why?"}]))
    for count in (2, 3):
        summary, _ = update(config_of(out, [{"query": "why?"}] * count))
        assert (summary.records, summary.skipped) == (1, count - 1)
        assert [line["id"] for line in lines_of(out)] == [str(i + 1) for i in range(count)]


def test_a_second_record_of_an_id_leaves_the_answer_of_the_first(out):
    generate(config_of(out, questions(2)))
    update(config_of(out, [*questions(2), {"id": "q0", "query": "again"}]))
    assert [(line["id"], "error" in line) for line in lines_of(out)] == [("q0", False), ("q1", False), ("q0", True)]


def test_new_records_of_several_runs_come_in_the_order_of_the_input(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(3)))

    class Sixth:
        def answered(self, result):
            if result.id == "q5":
                raise KeyboardInterrupt

        failed = answered

    with pytest.raises(KeyboardInterrupt):
        update(config_of(out, questions(9)), observers=[Sixth()])
    assert update(config_of(out, questions(9)))[0].records == 3
    assert [line["id"] for line in lines_of(out)] == [f"q{i}" for i in range(9)]


def test_a_limited_update_takes_no_answer_of_a_record_beyond_the_limit(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, [{"query": "one"}, {"query": "two"}]))
    assert update(config_of(out, [{"query": "two"}, {"query": "two"}]), limit=1)[0].records == 1
    assert [(line["id"], line["output"][:3]) for line in lines_of(out)] == [("1", "two"), ("2", "two")]


def test_new_lines_wait_through_an_update_that_fails_before_it_begins(tmp_path, monkeypatch):
    out, other = tmp_path / "out.jsonl", {"sampling": {"max_new_tokens": 3}}
    generate(config_of(out, questions(6)))

    class Third:
        def answered(self, result):
            if result.id == "q2":
                raise KeyboardInterrupt

        failed = answered

    with pytest.raises(KeyboardInterrupt):
        update(config_of(out, questions(6), **other), observers=[Third()])
    with monkeypatch.context() as patch:
        patch.setattr("ragspec.run.generate._matched", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            update(config_of(out, questions(6), **other))
    assert update(config_of(out, questions(6), **other))[0].records == 3


def test_older_answers_to_a_record_are_removed_and_have_not_left_the_input(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(2)))
    records = [{"id": f"q{i}", "query": f"changed {i}"} for i in range(2)]
    generate(config_of(out, records))  # new lines below the old ones
    assert len(lines_of(out)) == 4
    _, said = update(config_of(out, records))
    assert "left the input" not in said
    assert [(line["id"], "changed" in line["output"]) for line in lines_of(out)] == [("q0", True), ("q1", True)]


def test_answers_whose_records_left_stay_until_they_are_pruned(out):
    generate(config_of(out, questions(6)))
    config = config_of(out, questions(4))
    summary, said = update(config)
    assert "2 answers of records that left the input stay too" in said
    assert (len(lines_of(out)), summary.totals.records) == (6, 6)
    assert dry_update(config, limit=None, retry_failed=False, prune=False).left == ["q4", "q5"]
    update(config, prune=True)
    assert list(shown(out)) == ["q0", "q1", "q2", "q3"]


def test_lines_name_the_config_that_answered_them_and_others_are_forgotten(tmp_path):
    out = tmp_path / "out.jsonl"
    state = tmp_path / "out.run.json"
    generate(config_of(out, questions(3)))
    for length in (9, 8, 7):
        records = questions(3)
        update(config_of(out, records, sampling={"max_new_tokens": length}))
        content = json.loads(state.read_text())
        lengths = {
            line["id"]: content["configs"][line["config"]]["sampling"]["max_new_tokens"] for line in read_jsonl(out)
        }
        assert set(lengths.values()) == {length}
    assert list(content["configs"].values()) == [content["config"]]
    assert generate(config_of(out, questions(3), sampling={"max_new_tokens": 7})).skipped == 3


def test_failed_records_are_tried_again_if_they_ask_something_else_or_on_request(out):
    records = questions(4)
    failing = {"runner_args": {"fail_ids": ["q1"]}}
    generate(config_of(out, records, **failing))
    assert update(config_of(out, records, **failing))[0].records == 0
    summary, _ = update(config_of(out, records), retry_failed=True)
    assert (summary.records, shown(out)["q1"]) == (1, "question 1\nAnswer:")
    summary, _ = update(config_of(out, records, sampling={"max_new_tokens": 3}, **failing))
    assert (summary.records, summary.failed) == (3, 1)
    assert shown(out) == whole(out, records, sampling={"max_new_tokens": 3}, **failing)


def test_rows_that_are_no_records_stay_error_lines(out):
    records = [*questions(2), {"id": "q1", "query": "twice"}, {"id": "none"}]
    generate(config_of(out, records))
    assert len(lines_of(out)) == 4
    assert update(config_of(out, records))[0].failed == 0
    update(config_of(out, records, sampling={"max_new_tokens": 3}))
    found = lines_of(out)
    assert ["error" in line for line in found] == [False, False, True, True]


def test_an_output_of_an_older_version_keeps_what_its_config_answered(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(4)))
    old = [{key: value for key, value in line.items() if key != "request"} for line in read_jsonl(out)]
    write_jsonl(out, old)
    records = questions(4)
    records[2]["query"] = "another"
    assert update(config_of(out, records))[0].records == 1
    assert update(config_of(out, records, sampling={"max_new_tokens": 3}))[0].records == 4


def test_a_limited_update_leaves_the_rest_alone(out):
    generate(config_of(out, questions(6)))
    config = config_of(out, questions(6), sampling={"max_new_tokens": 3})
    summary, said = update(config, limit=2)
    assert summary.records == 2
    assert "left the input" not in said
    assert [len(text) for text in shown(out).values()] == [3, 3, 18, 18, 18, 18]
    assert update(config)[0].records == 4
    assert shown(out) == whole(out, questions(6), sampling={"max_new_tokens": 3})


def test_old_lines_can_be_kept(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(3)))
    before = out.read_bytes()
    update(config_of(out, questions(3), sampling={"max_new_tokens": 3}), keep_old=True)
    assert (tmp_path / "out.jsonl.1").read_bytes() == before


def test_old_lines_are_kept_whole_if_a_run_was_killed_before(tmp_path, monkeypatch):
    from ragspec.outputs import update as module

    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(3)))
    before = out.read_bytes()

    def killed(source, to):
        to.write_bytes(source.read_bytes()[:10])
        raise KeyboardInterrupt

    changed = config_of(out, questions(3), sampling={"max_new_tokens": 3})
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "copy2", killed)
        with pytest.raises(KeyboardInterrupt) as stopped:
            update(changed, keep_old=True)
    assert stopped.tb is not None  # holds all objects of that run: what it opened is closed nevertheless
    (tmp_path / "out.update.jsonl").touch()  # as a kill leaves it
    update(changed, keep_old=True)
    assert [each.read_bytes() for each in tmp_path.glob("out.jsonl.*")] == [before]


def test_waiting_lines_of_an_interrupted_run_are_answers_too(tmp_path):
    out = tmp_path / "out.jsonl"
    config = config_of(out, questions(3))
    generate(config)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0])
    (tmp_path / "out.pending.jsonl").write_bytes(lines[2])
    assert dry_update(config, limit=None, retry_failed=False, prune=False).again == [("q1", "new")]
    assert update(config)[0].records == 1
    assert shown(out) == whole(out, questions(3))
    assert not (tmp_path / "out.pending.jsonl").exists()


def test_a_dry_run_writes_nothing(out):
    records = questions(3)
    generate(config_of(out, records))
    files = {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}
    records[1]["query"] = "another"
    config = config_of(out, records)
    files[out.parent / "in.jsonl"] = (out.parent / "in.jsonl").read_bytes()
    plan = dry_update(config, limit=None, retry_failed=False, prune=False)
    assert (plan.again, plan.kept) == ([("q1", "record")], 2)
    assert {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()} == files


def test_a_changed_document_answers_exactly_the_questions_that_retrieve_it(tmp_path):
    pytest.importorskip("lancedb")
    from ragspec.config.sections import RetrievalConfig
    from ragspec.retrieval.build import build

    texts = {"lamp": "The keeper trims the lamp.", "bread": "The bread rises overnight.", "owl": "Owls hunt mice."}

    def index():
        documents = [{"id": name, "text": text} for name, text in texts.items()]
        corpus = write_jsonl(tmp_path / "docs.jsonl", documents)
        build(RetrievalConfig(index=str(tmp_path / "index"), corpus=[corpus]))

    out = tmp_path / "out.jsonl"
    asked = [{"id": "a", "query": "trims lamp"}, {"id": "b", "query": "bread"}, {"id": "c", "query": "owls mice"}]
    more = {"retrieval": {"index": str(tmp_path / "index"), "top_k": 1}}
    index()
    generate(config_of(out, asked, **more))
    texts["new"] = "Glaciers calve."  # another version of the index, with the same passages for all questions
    index()
    config = config_of(out, asked, **more)
    assert dry_update(config, limit=None, retry_failed=False, prune=False).again == []
    texts["bread"] = "The bread is baked at dawn."
    index()
    config = config_of(out, asked, **more)
    assert dry_update(config, limit=None, retry_failed=False, prune=False).again == [("b", "passages")]
    assert update(config)[0].records == 1
    assert shown(out) == whole(out, asked, **more)


def test_a_prompt_that_depends_on_other_records_is_answered_again_when_those_change(tmp_path):
    out = tmp_path / "out.jsonl"
    passages = {name: {"id": name, "text": name * 50} for name in "xyz"}

    def record(number, names):
        return {"id": f"q{number}", "query": f"question {number}", "contexts": [passages[name] for name in names]}

    more = {"prompt": {"order": "shared"}, "sampling": {"max_new_tokens": 100}}
    generate(config_of(out, [record(0, "xy"), record(1, "z")], **more))
    records = [record(0, "xy"), record(1, "yz"), record(2, "yz")]
    update(config_of(out, records, **more))
    assert shown(out) == whole(out, records, **more)


def test_a_model_whose_files_changed_is_another_model(tmp_path):
    from ragspec.models.resolve import ModelSource, weights_state

    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = weights_state(ModelSource("m", str(tmp_path)))
    assert first == weights_state(ModelSource("m", str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"another")
    second = weights_state(ModelSource("m", str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text("another prompt")
    assert len({first, second, weights_state(ModelSource("m", str(tmp_path)))}) == 3


def test_outputs_of_another_kind_are_refused(tmp_path):
    batch = tmp_path / "batch.jsonl"
    config = config_of(batch, questions(2))
    openai = config.model_copy(update={"output": config.output.model_copy(update={"format": "openai"})})
    generate(openai)
    for each in (openai, config):
        with pytest.raises(ConfigError, match="OpenAI's batch lines"):
            generate(each, update=True)
    (tmp_path / "results.jsonl").write_text('{"results": []}\n')
    with pytest.raises(ConfigError, match=r"results\.jsonl is not an output of `ragspec generate`"):
        generate(config_of(tmp_path / "results.jsonl", questions(2)), update=True)
    with pytest.raises(ConfigError, match="cannot be updated"):
        generate(build_config({"runner": "fake", "input": config.input.path[0], "output": "-"}), update=True)
    with pytest.raises(ConfigError, match="--prune"):
        generate(config, update=True, prune=True, limit=1)
    with pytest.raises(ConfigError, match="--no-resume"):
        generate(config, update=True, resume=False)


def test_an_update_that_fails_before_it_begins_leaves_nothing_behind(tmp_path, monkeypatch):
    from ragspec.run import generate as command

    def fails(*args, **_):
        raise ConfigError("the index is gone")

    out = tmp_path / "out.jsonl"
    config = config_of(out, questions(3))
    generate(config)
    monkeypatch.setattr(command, "requests_of", fails)
    with pytest.raises(ConfigError, match="the index is gone"):
        generate(config, update=True)
    assert generate(config).skipped == 3


def test_the_first_update_is_an_ordinary_run(out):
    config = config_of(out, questions(3))
    assert [why for _, why in dry_update(config, limit=None, retry_failed=False, prune=False).again] == ["new"] * 3
    assert generate(config, update=True).records == 3


DIES = """
import os, signal, sys
from pathlib import Path
from ragspec.outputs import line_file
from ragspec.outputs.folder import LocalFolder
from ragspec.cli import main

left = int(sys.argv.pop(1))

def dying(owner, name):
    real = getattr(owner, name)
    def step(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(owner, name, step)

for owner, name in ((line_file, "write_all"), (os, "fsync"), (os, "ftruncate"), (Path, "replace"), (Path, "unlink"),
                    (Path, "rename"), (LocalFolder, "put"), (line_file, "sync_folder")):
    dying(owner, name)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.long)])
def test_kills_at_random_moments_lose_double_and_spoil_nothing(out, tmp_path, kills):
    chance = random.Random(f"{out.name} {kills}")
    records = questions(12)
    generate(config_of(out, records))
    names = list(shown(out))
    killed, number, texts = 0, 0, {each: {text} for each, text in shown(out).items()}
    while killed < kills:
        number += 1
        changed = chance.choice(["record", "config", "both", "nothing"])
        length = chance.choice([3, 5, 18]) if changed in ("config", "both") else 18
        if changed in ("record", "both"):
            records = [each for each in records if chance.random() < 0.9]
            records += [{"id": f"new{number}", "query": f"new {number}"}]
            records[0] = records[0] | {"query": f"changed {number}", "tag": number}
        config = config_of(out, records, sampling={"max_new_tokens": length})
        right = whole(out, records, sampling={"max_new_tokens": length})
        for name, text in right.items():
            texts.setdefault(name, set()).add(text)
        path = tmp_path / "c.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json", exclude={"retrieval", "structured", "scale"})))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(1, 50)
            command = [sys.executable, "-c", DIES, str(at), "generate", "--update", "-c", str(path)]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
            killed += ended.returncode == -signal.SIGKILL
            assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
            there = [(line["id"], line["output"]) for line in lines_of(out)]
            assert len(there) == len(dict(there)), "doubled"
            assert all(text in texts[name] for name, text in there), "wrong"
        prune = chance.random() < 0.5
        update(config, prune=prune)
        there = shown(out)
        assert [name for name in there if name in names] == [name for name in names if name in there], "out of place"
        names = list(there)
        assert {name: there[name] for name in right} == right
        assert not prune or list(there.keys() - right.keys()) == []
        assert not list(tmp_path.rglob("*update.jsonl"))
        assert generate(config).records == 0


COMMAND = [sys.executable, "-m", "ragspec", "generate", "--update"]


def started(config, tmp_path, delay_s=0.01):
    path = tmp_path / "c.yaml"
    given = config.model_dump(mode="json", exclude={"retrieval", "structured", "scale"})
    given["runner_args"] |= {"delay_s": delay_s, "batch_size": 1}
    path.write_text(json.dumps(given))
    return subprocess.Popen([*COMMAND, "-c", str(path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_an_interrupted_update_leaves_the_output_whole_and_goes_on(out, tmp_path):
    generate(config_of(out, questions(40)))
    before = lines_of(out)
    config = config_of(out, questions(40), sampling={"max_new_tokens": 5})
    process = started(config, tmp_path, delay_s=0.1)
    news = next(iter(tmp_path.rglob("*update.jsonl")), None)
    while process.poll() is None and (news is None or news.read_bytes().count(b"\n") < 5):
        time.sleep(0.02)
        news = next(iter(tmp_path.rglob("*update.jsonl")), None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert lines_of(out) == before
    with pytest.raises(ConfigError, match="its update was interrupted"):
        generate(config)
    summary, _ = update(config)
    assert summary.records <= 35
    assert shown(out) == whole(out, questions(40), sampling={"max_new_tokens": 5})


# -- a damaged input -------------------------------------------------------------------------------


def damaged(config, *, line=3):
    """Cut a line of the input off in the middle, as a copy that broke does."""
    path = Path(str(config.input))
    lines = path.read_text().splitlines()
    lines[line] = lines[line][:-4]
    path.write_text("\n".join(lines) + "\n")


def everything(out):
    return {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}


def test_an_empty_input_prunes_nothing(out):
    generate(config_of(out, questions(6)))
    config = config_of(out, [])
    before = everything(out)
    for keep_old in (False, True) if out.suffix in (".jsonl", ".csv") else (False,):
        with pytest.raises(ConfigError, match=r"^--prune: .*in\.jsonl has no records, so all answers would be removed"):
            update(config, prune=True, keep_old=keep_old)
    with pytest.raises(ConfigError, match="has no records"):
        dry_update(config, limit=None, retry_failed=False, prune=True)
    assert everything(out) == before


@pytest.mark.parametrize("after", ["nothing", "an update without --prune"])
def test_a_line_that_is_cut_off_prunes_nothing(out, after):
    config = config_of(out, questions(6))
    generate(config)
    damaged(config)
    if after != "nothing":
        update(config)
    before = everything(out)
    with pytest.raises(ConfigError, match=r"in\.jsonl:4: this row cannot be read, so --prune does not know"):
        update(config, prune=True)
    assert everything(out) == before
    damaged(config, line=1)
    with pytest.raises(ConfigError, match=r"in\.jsonl:2: this row and 1 more cannot be read"):
        update(config, prune=True)
    update(config_of(out, questions(6)), prune=True)
    assert shown(out) == whole(out, questions(6))


@pytest.mark.parametrize("ids", [True, False])
def test_a_line_that_is_cut_off_removes_no_answer(out, ids):
    records = questions(6) if ids else [{"query": f"question {i}"} for i in range(6)]
    config = config_of(out, records)
    generate(config)
    before = [line for line in lines_of(out) if "output" in line]
    damaged(config)
    for _ in range(2):
        update(config)
        assert [line for line in lines_of(out) if "output" in line] == before
    update(config_of(out, records))
    assert [line for line in lines_of(out) if "output" in line] == before


def test_an_output_that_loses_most_of_its_answers_is_kept(out):
    generate(config_of(out, questions(8)))
    update(config_of(out, questions(4)), prune=True)
    assert not list(out.parent.glob(f"{out.name}.[0-9]"))  # half of it
    before = everything(out).get(out)  # None of a folder
    _, said = update(config_of(out, questions(1)), prune=True)
    assert "3 answers of records that left the input are removed: more than half of all" in said
    assert list(shown(out)) == ["q0"]
    copies = [path.read_bytes() for path in out.parent.glob(f"{out.name}.[0-9]")]
    assert (f"kept as {out.name}.1" in said, copies) == ((True, [before]) if before else (False, []))


def test_one_answer_that_left_is_told_as_one(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(3)))
    config = config_of(out, [*questions(2), {"id": "none"}])
    assert "(1 unreadable, too long or without a question)" in update(config)[1]
    assert "1 answer of a record that left the input stays too (--prune removes it)" in update(config)[1]
    assert "1 answer of a record that left the input is removed" in update(config, prune=True)[1]


def test_a_run_with_a_changed_config_names_the_update(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, questions(3)))
    with pytest.raises(
        ConfigError, match=r"different config: sampling.* what changed, add --update; .* --retry-failed"
    ):
        generate(config_of(out, questions(3), sampling={"max_new_tokens": 3}))


def renamed(config, **names):
    """Rename fields of an input's records."""
    path = Path(config.input.path[0])
    write_jsonl(path, [{names.get(name, name): value for name, value in each.items()} for each in read_jsonl(path)])


@pytest.mark.parametrize("change", [{"query": "ask"}, {"query": "ask", "id": "number"}])
def test_an_input_of_which_no_row_is_a_record_any_more_is_refused(out, change):
    config = config_of(out, questions(4))
    generate(config)
    before = lines_of(out)
    renamed(config, **change)
    why = r"in.jsonl:1: no prompt.* No row of the input is a record any more"
    with pytest.raises(ConfigError, match=why):
        dry_update(config, limit=None, retry_failed=False, prune=False)
    with pytest.raises(ConfigError, match=why):
        update(config)
    assert lines_of(out) == before


def test_one_row_that_is_no_record_does_not_stop_an_update(out):
    generate(config_of(out, questions(2)))
    config = config_of(out, [*questions(2), {"id": "bad"}])
    _, said = update(config)
    assert "1 of 3 records to answer" in said


def test_columns_that_can_no_longer_be_read_by_name_are_read_as_before(tmp_path):
    out = tmp_path / "out.jsonl"
    records = [{"id": f"q{i}", "title": f"question {i}"} for i in range(3)]
    generate(config_of(out, records, input={"path": str(tmp_path / "in.jsonl"), "columns": {"query": "title"}}))
    config = config_of(out, records)
    summary = generate(config)
    assert summary.skipped == 3
    assert any("reads title as query, as the output's other records were" in note for note in summary.notes)
    renamed(config, title="ask")
    for more in ({}, {"update": True}):
        with pytest.raises(ConfigError, match=r'input.columns.query: .*none of the first 3 records has "title"'):
            generate(config, **more)


def test_a_mapping_that_is_gone_is_not_updated_to(tmp_path):
    out = tmp_path / "out.jsonl"
    generate(config_of(out, [{"id": "a", "question": "Why?"}]))
    with pytest.raises(ConfigError, match="was started with a different config: columns: ") as refused:
        generate(config_of(out, [{"id": "a", "query": "Why?"}]))
    assert "--update" not in str(refused.value)


def test_a_dry_update_reads_columns_by_their_names(tmp_path):
    out = tmp_path / "out.jsonl"
    config = config_of(out, [{"id": "a", "question": "Why?"}])
    generate(config)
    assert dry_update(config, limit=None, retry_failed=False, prune=False).again == []
