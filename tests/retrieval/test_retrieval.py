import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from ragspec.config.load import build_config
from ragspec.config.sections import RetrievalConfig
from ragspec.errors import ConfigError
from ragspec.inputs.base import InputRow
from ragspec.retrieval import corpus
from ragspec.retrieval import corpus as chunks
from ragspec.retrieval.build import build
from ragspec.retrieval.index import Settings
from ragspec.retrieval.search import Retriever, evaluate
from ragspec.retrieval.stage import AHEAD, BATCH, Stage
from ragspec.run.doctor import _examine_index
from ragspec.run.generate import generate as run
from ragspec.run.retrieve import measure, query_of, stream, with_hits
from tests.cli.test_cli import start_interruptible
from tests.conftest import ROOT, SAMPLE, read_jsonl, wide, write_jsonl
from tests.retrieval.test_corpus import pdf_bytes

DOCUMENTS = ROOT / "sample_data" / "documents"
DOCS = [
    {"id": "lamp", "title": "Lighthouses", "text": "The keeper trims the lamp of the lighthouse every evening."},
    {"id": "bread", "title": "Sourdough", "text": "Feed the starter with flour and water; the bread rises overnight."},
    {"id": "pump", "title": "Pumps", "text": "A pump that runs dry is damaged; fill the housing with water first."},
    {"id": "owl", "text": "Owls hunt mice in the dark, and hear them under the snow."},
]


def config(tmp_path, **more):
    return RetrievalConfig(index=str(tmp_path / "idx"), corpus=[str(tmp_path / "docs.jsonl")], **more)


def built(tmp_path, docs=DOCS, **more):
    write_jsonl(tmp_path / "docs.jsonl", docs)
    return build(config(tmp_path, **more))


def ids(hits):
    return [hit.passage.id for hit in hits]


def test_words_find_passages_with_scores_titles_and_stems(tmp_path):
    summary = built(tmp_path)
    assert (summary.added, summary.chunks, summary.skipped) == (4, 4, 0)
    retriever = Retriever(config(tmp_path, top_k=2))
    assert retriever.mode == "bm25"
    lamp, owl, title, nothing, odd = retriever.search(
        ["trimming lamps", "owl hunting", "sourdough", "xylophone", 'what "is" AND (water OR c:\\ ~ *']
    )
    assert ids(lamp) == ["lamp"]
    assert lamp[0].passage.text == DOCS[0]["text"]  # without the title that it was indexed with
    assert lamp[0].passage.title == "Lighthouses"
    assert owl[0].passage.title is None
    assert ids(title) == ["bread"]
    assert nothing == []
    assert set(ids(odd)) == {"bread", "pump"}  # signs of query languages are but text
    assert all(hit.passage.score > 0 for hit in lamp + owl + odd)


@pytest.mark.parametrize("language", ["English", "German", "none"])
def test_words_that_are_stop_words_of_other_languages_are_found(tmp_path, language):
    words = ["cat", "sea", "war", "dog", "minutes"]  # Catalan, Romanian, German, Danish, ...
    built(tmp_path, [{"id": word, "text": f"Document {word}."} for word in words], language=language)
    retriever = Retriever(config(tmp_path))
    assert [ids(hits) for hits in retriever.search(words)] == [[word] for word in words]


@pytest.mark.parametrize(("built_as", "warns"), [(1, True), (2, False)])
def test_an_index_whose_keyword_search_misses_words_is_named(tmp_path, monkeypatch, built_as, warns):
    monkeypatch.setattr("ragspec.retrieval.build.Settings", partial(Settings, format=built_as))
    built(tmp_path)
    assert [note.split(":")[0] for note in Retriever(config(tmp_path)).notes()] == [str(config(tmp_path).index)] * warns
    write_jsonl(tmp_path / "queries.jsonl", [{"query": "lamp"}])
    counts = stream(config(tmp_path), str(tmp_path / "queries.jsonl"), str(tmp_path / "out.jsonl"))
    assert counts.searched == 1
    assert ["run `ragspec index` again" in note for note in counts.notes] == [True] * warns
    examined = [finding.text for finding in _examine_index(config(tmp_path)) if finding.level == "note"]
    assert examined == counts.notes
    known = write_jsonl(tmp_path / "known.jsonl", [{"query": "lamp", "gold_doc_ids": ["lamp"]}])
    assert measure(config(tmp_path), str(known), str(tmp_path / "figures.jsonl")) == counts.notes


def test_stop_words_of_english_are_not_searched(tmp_path):
    built(tmp_path, [{"id": "a", "text": "What is the pump?"}])
    assert Retriever(config(tmp_path)).search(["what is the"]) == [[]]


def test_an_update_redoes_only_what_changed(tmp_path):
    built(tmp_path)
    before = Retriever(config(tmp_path)).index.identity
    assert built(tmp_path).unchanged == 4
    assert Retriever(config(tmp_path)).index.identity == before  # nothing to do: nothing done
    changed = [DOCS[0] | {"text": "The lantern is electric now."}, *DOCS[2:], {"id": "new", "text": "Glaciers calve."}]
    summary = built(tmp_path, changed)
    assert (summary.added, summary.changed, summary.unchanged, summary.removed) == (1, 1, 2, 1)
    assert (summary.chunks, summary.chunks_written) == (4, 2)
    retriever = Retriever(config(tmp_path))
    found = retriever.search(["lamp evening keeper", "electric lantern", "flour starter", "glaciers", "owls"])
    assert [ids(hits) for hits in found] == [[], ["lamp"], [], ["new"], ["owl"]]
    assert retriever.index.identity != before


def test_other_settings_build_anew_and_long_documents_become_numbered_passages(tmp_path):
    built(tmp_path)
    long = {"id": "book", "title": "Book", "text": " ".join(f"Chapter {i} tells of wind {i}." for i in range(30))}
    summary = built(tmp_path, [*DOCS, long], chunk_size=32, chunk_overlap=8)
    assert summary.added == 5
    assert "different settings" in summary.notes[0]
    again = built(tmp_path, [*DOCS, long], chunk_size=32, chunk_overlap=8)
    assert again.unchanged == 5
    hits = Retriever(config(tmp_path, top_k=50)).search(["wind"])[0]
    assert {hit.document for hit in hits} == {"book"}
    assert sorted(ids(hits))[0] == "book#1"
    assert len(set(ids(hits))) == len(hits) > 5


NUMBERED = [
    {"id": "book", "text": " ".join(f"Chapter {i} tells of wind {i}." for i in range(30))},
    {"id": "book#1", "text": "A letter about the wind."},
    {"id": "book#1#1", "text": "A second letter about the wind. " * 20},
    {"id": "owl", "text": "Owls do not mind the wind."},
    {"id": "part#0", "text": "Nor does the wind mind them."},
]


def test_no_two_documents_share_a_passage_id(tmp_path):
    built(tmp_path, NUMBERED, chunk_size=32, chunk_overlap=8)
    hits = Retriever(config(tmp_path, top_k=50)).search(["wind"])[0]
    assert len(set(ids(hits))) == len(hits)
    assert {hit.document for hit in hits} == {doc["id"] for doc in NUMBERED}
    assert {"book#1", "book#1#1", "book#1#1#1", "owl", "part#0"} <= set(ids(hits))


def test_an_index_of_before_passage_ids_were_unambiguous_comes_right_with_its_next_build(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(chunks, "looks_numbered", lambda _: False)
        before.setattr(corpus, "looks_numbered", lambda _: False)
        built(tmp_path, NUMBERED, chunk_size=32, chunk_overlap=8)
    old = ids(Retriever(config(tmp_path, top_k=50)).search(["wind"])[0])
    assert len(set(old)) < len(old)
    summary = built(tmp_path, NUMBERED, chunk_size=32, chunk_overlap=8)
    assert (summary.changed, summary.unchanged, summary.added, summary.removed) == (2, 3, 0, 0)
    new = ids(Retriever(config(tmp_path, top_k=50)).search(["wind"])[0])
    assert len(set(new)) == len(new) == len(old)
    assert built(tmp_path, NUMBERED, chunk_size=32, chunk_overlap=8).unchanged == 5


def test_bad_documents_are_named_and_left_out(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("good text here")
    (folder / "b.pdf").write_bytes(b"%PDF-1.4 no")
    (folder / "c.pdf").write_bytes(pdf_bytes("x", password="p"))
    (folder / "d.txt").write_bytes(b"\0\1\2")
    (folder / "d.bin").write_bytes(b"\0\1\2")
    (folder / "e.md").write_text("  \n")
    write_jsonl(folder / "f.jsonl", [{"id": "a.txt", "text": "another of that name"}, {"id": "ok", "text": "fine"}])
    said = []
    summary = build(RetrievalConfig(index=str(tmp_path / "idx"), corpus=[str(folder)]), complain=said.append)
    assert (summary.added, summary.skipped) == (2, 5)
    reasons = {os.path.relpath(item.where, folder): item.why for item in said}
    assert list(reasons) == ["b.pdf", "c.pdf", "d.txt", "e.md", "f.jsonl:1"]
    assert summary.non_documents == {".bin": 1}
    for word, why in zip(("damaged", "encrypted", "binary", "empty", "appears twice"), reasons.values(), strict=True):
        assert word in why
        assert "\n" not in why


def test_nothing_to_index_leaves_the_index(tmp_path):
    built(tmp_path)
    with pytest.raises(ConfigError, match="contains no documents"):
        built(tmp_path, [])
    assert ids(Retriever(config(tmp_path)).search(["owl"])[0]) == ["owl"]


def test_a_missing_index_and_what_is_none(tmp_path):
    with pytest.raises(ConfigError, match="no index there; build one: ragspec index"):
        Retriever(config(tmp_path))
    (tmp_path / "idx").mkdir()
    with pytest.raises(ConfigError, match="no index there"):
        Retriever(config(tmp_path))


KILLED = """
import os, signal, sys
from ragspec.config.sections import RetrievalConfig
from ragspec.retrieval import build, index
folder, size, at = sys.argv[1], int(sys.argv[2]), sys.argv[3]
build.WRITTEN_AT_ONCE = 1000

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def patch(owner, name, after):
    real = getattr(owner, name)
    def dies(self, *args, **more):
        result = real(self, *args, **more)
        if after(self):
            die()
        return result
    setattr(owner, name, dies)

import lancedb.table
if at == "add":
    patch(index.Writer, "add", lambda self: self.rows >= 2000)
elif at == "finish":
    index.Writer.finish = die
else:  # a method of the table, called by finish
    real = index.Writer.finish
    def finish(self):
        patch(lancedb.table.LanceTable, at, lambda _: True)
        real(self)
    index.Writer.finish = finish
build.build(RetrievalConfig(index=folder + "/idx", corpus=[folder + "/docs.jsonl"], chunk_size=size))
"""
COMETS = [{"id": f"n{i}", "text": f"Number {i} of many comets."} for i in range(3000)]


def killed(tmp_path, size, at):
    return subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(size), at], cwd=ROOT).returncode


@pytest.mark.parametrize("size", [512, *wide(256)], ids=["update", "anew"])
@pytest.mark.parametrize("at", [*wide("add"), "finish", *wide("optimize")])
def test_a_killed_build_leaves_the_old_index_and_the_next_one_ends_it(tmp_path, at, size):
    built(tmp_path)
    write_jsonl(tmp_path / "docs.jsonl", COMETS)
    assert killed(tmp_path, size, at) == -signal.SIGKILL
    retriever = Retriever(config(tmp_path))
    assert retriever.index.rows == 4
    assert [ids(hits) for hits in retriever.search(["comets", "owls"])] == [[], ["owl"]]
    summary = built(tmp_path, [*DOCS, *COMETS])
    assert (summary.unchanged, summary.added) == (4, 3000)
    again = built(tmp_path, [*DOCS, *COMETS])
    assert (again.unchanged, again.chunks) == (3004, 3004)
    assert Retriever(config(tmp_path)).index.rows == 3004


@pytest.mark.parametrize("at", [*wide("add"), "create_index", *wide("optimize")])
def test_a_killed_first_build_is_no_index_and_the_next_one_begins_anew(tmp_path, at):
    write_jsonl(tmp_path / "docs.jsonl", COMETS)
    assert killed(tmp_path, 512, at) == -signal.SIGKILL
    with pytest.raises(ConfigError, match="no index there"):
        Retriever(config(tmp_path))
    assert built(tmp_path).added == 4
    assert Retriever(config(tmp_path)).index.rows == 4


def test_old_versions_go_by_when_they_were_replaced():
    from datetime import datetime, timedelta

    from ragspec.retrieval.index import KEPT, replaced_age

    now = datetime(2026, 3, 1)
    days = [now - timedelta(days=ago) for ago in (30, 10, 8, 2, 0)]
    assert timedelta(days=7) == KEPT
    age = replaced_age(days, now)  # what was made 8 days ago was the index until 2 days ago: it stays
    assert [now - stamp < age for stamp in days] == [False, False, True, True, True]
    assert replaced_age(days[2:], now) is None
    assert replaced_age([now], now) is None


def test_another_programs_table_is_left_alone(tmp_path):
    import lancedb
    import pyarrow

    table = lancedb.connect(str(tmp_path / "idx")).create_table("chunks", pyarrow.table({"mine": [1, 2]}))
    with pytest.raises(ConfigError, match="choose another folder"):
        built(tmp_path)
    with pytest.raises(ConfigError, match="no index there"):
        Retriever(config(tmp_path))
    assert table.to_arrow()["mine"].to_pylist() == [1, 2]


def test_a_damaged_index_is_not_called_missing_nor_written_over(tmp_path):
    built(tmp_path)
    for file in (tmp_path / "idx" / "chunks.lance" / "_versions").iterdir():
        file.write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"cannot be opened \(.*if it is damaged, delete it and run `ragspec index`"):
        Retriever(config(tmp_path))
    with pytest.raises(ConfigError, match="cannot be written"):
        built(tmp_path)


@pytest.mark.parametrize("file", ["metadata", "part_0_tokens", "part_0_invert", "part_0_docs"])
@pytest.mark.parametrize("damage", ["overwritten", "deleted"])
def test_a_damaged_full_text_index_is_built_again(tmp_path, file, damage):
    built(tmp_path)
    [path] = (tmp_path / "idx" / "chunks.lance" / "_indices").glob(f"*/{file}.lance")
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(os.urandom(path.stat().st_size))
    again = built(tmp_path)
    assert (again.unchanged, again.chunks, again.chunks_written) == (4, 4, 0)
    assert again.notes == [f"{tmp_path / 'idx'}: its full-text index was damaged, and is built again"]
    assert ids(Retriever(config(tmp_path)).search(["trimming lamps"])[0]) == ["lamp"]
    assert built(tmp_path).notes == []


def test_what_cannot_be_looked_at_stays_in_the_index(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha")
    (folder / "b.jsonl").write_text('{"id": "b1", "text": "beta"}\n{"id": "b2", "text": "gamma"}\n')
    settings = RetrievalConfig(index=str(tmp_path / "idx"), corpus=[str(folder)])
    assert build(settings).added == 3
    (folder / "a.txt").unlink()
    (folder / "b.jsonl").rename(tmp_path / "b.jsonl")
    (folder / "b.jsonl.gz").write_bytes(b"no archive at all")
    (folder / "c.txt").write_text("delta")
    said = []
    summary = build(settings, complain=said.append)
    assert "damaged" in said[0].why
    assert (summary.removed, summary.chunks) == (0, 4)
    assert "no documents are removed" in summary.notes[0]
    (folder / "b.jsonl.gz").unlink()
    assert build(settings).removed == 3


def test_a_parser_that_breaks_costs_its_document_only(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "deep.html").write_text("<div>" * 3000 + "x")
    (folder / "odd.html").write_text("<p>text<![foo bar]><p>more")
    (folder / "ok.txt").write_text("fine")
    os.symlink(tmp_path, folder / "linked")
    with open(os.fsencode(folder) + b"/caf\xe9.txt", "w") as file:
        file.write("name")
    os.mkfifo(folder / "pipe")
    said = []
    summary = build(RetrievalConfig(index=str(tmp_path / "idx"), corpus=[str(folder)]), complain=said.append)
    reasons = "\n".join(f"{item.where}: {item.why}" for item in said)
    assert summary.added in (1, 2)
    for words in (
        "deep.html: cannot be read (RecursionError",
        "link to a folder",
        "not UTF-8",
        "pipe: not a regular file",
    ):
        assert words in reasons


def test_the_second_of_a_name_counts_where_the_first_cannot_be_read(tmp_path):
    docs = [{"id": "d", "text": "  "}, {"id": "d", "text": "second"}, {"id": "d", "text": "third"}]
    said = []
    write_jsonl(tmp_path / "docs.jsonl", docs)
    summary = build(config(tmp_path), complain=said.append)
    assert (summary.added, summary.skipped) == (1, 2)
    assert ["empty" in said[0].why, "appears twice" in said[1].why] == [True, True]
    assert ids(Retriever(config(tmp_path)).search(["second"])[0]) == ["d"]


def test_one_build_at_a_time(tmp_path):
    from ragspec.retrieval.index import building

    with building(str(tmp_path / "idx")), pytest.raises(ConfigError, match="another build is writing it"):
        built(tmp_path)


def test_a_reader_keeps_its_version_while_a_build_goes_on(tmp_path):
    built(tmp_path)
    retriever = Retriever(config(tmp_path))
    built(tmp_path, DOCS[:1])
    assert ids(retriever.search(["owl"])[0]) == ["owl"]
    assert ids(Retriever(config(tmp_path)).search(["owl"])[0]) == []


def test_vectors_find_what_shares_no_word_and_hybrid_has_both(tmp_path):
    summary = built(tmp_path, embedding_model="demo", chunk_size=512)
    assert summary.notes == ["chunk_size: 254 instead of 512: demo reads no more"]
    question = "nocturnal birds of prey"
    dense = Retriever(config(tmp_path, mode="dense", top_k=1))
    hit = dense.search([question])[0][0]
    assert hit.passage.id == "owl"
    assert 0 < hit.passage.score <= 1
    own = dense.search([f"{DOCS[0]['title']}\n{DOCS[0]['text']}"])[0][0]
    assert own.passage.id == "lamp"
    assert own.passage.score == pytest.approx(1, abs=1e-4)  # the cosine of a text with itself
    assert Retriever(config(tmp_path, mode="bm25")).search([question])[0] == []
    hybrid = Retriever(config(tmp_path, top_k=2))
    assert hybrid.mode == "hybrid"
    assert ids(hybrid.search([question])[0])[0] == "owl"
    assert ids(hybrid.search(["runs dry"])[0])[0] == "pump"
    with pytest.raises(ConfigError, match="was built with demo"):
        Retriever(config(tmp_path, embedding_model="other/model"))
    changed = built(tmp_path, DOCS[:3], embedding_model="demo")  # the vectors of the others stay
    assert (changed.unchanged, changed.removed) == (3, 1)


def embedding_model(folder, seed, lacks="", **sizes):
    """Save a small random embedding model without the weights whose names contain `lacks`; return its folder."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = sorted({word.strip(".,;").lower() for doc in DOCS for word in doc["text"].split()})
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16} | sizes
    shape = BertConfig(vocab_size=len(words) + 5, initializer_range=0.5, **sizes)
    BertModel(shape).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not lacks or lacks not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_an_index_knows_its_embedding_model_whatever_its_name(tmp_path):
    """Vectors of two models say nothing of each other, and dimensions are often the same."""
    name = embedding_model(tmp_path / "m", 0)
    assert built(tmp_path, embedding_model=name, chunk_size=32).notes == []
    before = ids(Retriever(config(tmp_path, mode="dense")).search(["owls hunt mice"])[0])
    embedding_model(tmp_path / "m", 1)
    with pytest.raises(ConfigError, match=f'made with another model than the one that is now "{name}"; build the'):
        Retriever(config(tmp_path))
    assert ids(Retriever(config(tmp_path, mode="bm25")).search(["owls"])[0]) == ["owl"]
    again = built(tmp_path, embedding_model=name, chunk_size=32)
    assert again.chunks_written == 4
    assert again.notes == [
        f'{tmp_path / "idx"}: built with another model named "{name}"; all documents are processed again'
    ]
    Retriever(config(tmp_path))
    assert built(tmp_path, embedding_model=name, chunk_size=32).unchanged == 4
    embedding_model(tmp_path / "m", 0)
    built(tmp_path, embedding_model=name, chunk_size=32)
    assert ids(Retriever(config(tmp_path, mode="dense")).search(["owls hunt mice"])[0]) == before


@pytest.mark.parametrize("subfolder", ["", "0_Transformer"])
def test_an_embedding_model_that_lacks_weights_is_refused_unless_nothing_depends_on_them(tmp_path, subfolder):
    """What files lack, transformers fills with random numbers: others in each run."""

    def model(lacks):
        folder = tmp_path / lacks
        inner = folder / subfolder
        inner.mkdir(parents=True)
        embedding_model(inner, 0, lacks=lacks)
        if subfolder:  # as older versions of sentence-transformers wrote them
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 16}')
            kinds = {subfolder: "Transformer", "1_Pooling": "Pooling"}
            modules = [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(kinds.items())
            ]
            (folder / "modules.json").write_text(json.dumps(modules))
        return str(folder)

    with pytest.raises(ConfigError, match=r'embedding_model: ".*": its weights lack \d+ of the .*layer\.1\.'):
        built(tmp_path, embedding_model=model("layer.1"))
    assert built(tmp_path, embedding_model=model("pooler"), chunk_size=32).added == 4


@pytest.mark.parametrize(("wrong", "why"), [("shape", "do not have the shapes"), ("nan", "vectors are not numbers")])
def test_a_damaged_embedding_model_is_one_line(tmp_path, wrong, why):
    from safetensors.torch import load_file, save_file

    name = embedding_model(tmp_path / "m", 0)
    weights = load_file(f"{name}/model.safetensors")
    key = next(key for key in weights if "position_embeddings" in key)
    weights[key] = weights[key][:7].contiguous() if wrong == "shape" else weights[key] * float("nan")
    save_file(weights, f"{name}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"retrieval.embedding_model: .*{why}"):
        built(tmp_path, embedding_model=name)


def test_dense_search_needs_vectors(tmp_path):
    built(tmp_path)
    with pytest.raises(ConfigError, match="has no vectors"):
        Retriever(config(tmp_path, mode="dense"))
    with pytest.raises(ConfigError, match="built with none"):
        Retriever(config(tmp_path, embedding_model="demo"))


def test_small_passages_need_no_overlap_of_their_own(tmp_path):
    long = {"id": "book", "text": " ".join(f"Sentence {n} speaks of wind and rain." for n in range(200))}
    done = command(
        "index", "--corpus", write_jsonl(tmp_path / "d.jsonl", [long]), "--output", tmp_path / "i", "--chunk-size", 20
    )
    assert done.returncode == 0, done.stderr
    assert Retriever(RetrievalConfig(index=str(tmp_path / "i"))).index.settings.chunk_overlap == 10
    passed_on = build_config({"runner": "fake", "retrieval": {"index": "i", "chunk_size": 20}}).model_dump()
    assert build_config(passed_on).retrieval.chunk_size == 20


def test_a_reranker_orders_by_its_own_scores(tmp_path):
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = sorted({word.strip(".,;").lower() for doc in DOCS for word in doc["text"].split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), num_labels=1, **sizes))
    model.save_pretrained(tmp_path / "cross")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "cross")
    built(tmp_path)
    plain = Retriever(config(tmp_path)).search(["water lamp owls mice"])[0]
    reranked = Retriever(config(tmp_path, reranker_model=str(tmp_path / "cross"))).search(["water lamp owls mice"])[0]
    texts = [f"{hit.passage.title}\n{hit.passage.text}" if hit.passage.title else hit.passage.text for hit in plain]
    scores = CrossEncoder(str(tmp_path / "cross")).predict([("water lamp owls mice", text) for text in texts])
    expected = [hit.passage.id for _, hit in sorted(zip(scores, plain, strict=True), key=lambda pair: -pair[0])]
    assert ids(reranked) == expected
    assert len(reranked) == 4
    best = Retriever(config(tmp_path, reranker_model=str(tmp_path / "cross"), top_k=1))
    assert ids(best.search(["water lamp owls mice"])[0]) == expected[:1]  # of all candidates, not of the best one
    with pytest.raises(ConfigError, match="no such folder"):
        Retriever(config(tmp_path, reranker_model="./nowhere"))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("no head", "its weights lack 2 of the .* choose a reranker"),
        ("two labels", "gives 2 scores, not one"),
        ("damaged", "its scores are not numbers"),
        ("cut off", "cannot be loaded as a CrossEncoder"),
    ],
)
def test_what_is_no_reranker_orders_nothing(tmp_path, kind, why):
    """Without a head, every run ordered the passages by other random scores."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "water"]))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    shape = BertConfig(vocab_size=6, num_labels=2 if kind == "two labels" else 1, **sizes)
    model = BertModel(shape) if kind == "no head" else BertForSequenceClassification(shape)
    if kind == "damaged":
        model.classifier.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "cross")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "cross")
    if kind == "cut off":
        os.truncate(tmp_path / "cross" / "model.safetensors", 100)
    built(tmp_path)
    with pytest.raises(ConfigError, match=f"retrieval.reranker_model: .*{why}"):
        Retriever(config(tmp_path, reranker_model=str(tmp_path / "cross"))).search(["water"])


@pytest.mark.parametrize("mode", ["bm25", pytest.param("hybrid", marks=pytest.mark.wide)])
def test_passages_that_match_equally_are_chosen_by_id_however_the_index_was_built(tmp_path, mode):
    """LanceDB returns equal ones in the order in which its threads found them."""
    model = {} if mode == "bm25" else {"embedding_model": "demo", "chunk_size": 254}
    docs = [{"id": f"{n:03}", "text": "The ferry leaves at noon."} for n in range(360)]
    for end in range(60, 361, 60):  # one part of the index each
        built(tmp_path, docs[:end], **model)
    best = [f"{n:03}" for n in range(5)]
    for _ in range(6):
        retriever = Retriever(config(tmp_path, mode=mode, top_k=5))
        found = retriever.search(["ferry at noon", "ferry"])
        assert [ids(hits) for hits in found] == [best, best]
        assert [hit.document for hits in found for hit in hits] == [*best, *best]
        assert {hit.passage.text for hits in found for hit in hits} == {"The ferry leaves at noon."}


def test_more_passages_than_there_are_can_be_asked_for(tmp_path):
    built(tmp_path)
    retriever = Retriever(config(tmp_path, top_k=10**20))
    assert sorted(ids(retriever.search(["water lamp owls mice"])[0])) == sorted(doc["id"] for doc in DOCS)


def test_canonical_order_is_that_of_ids(tmp_path):
    built(tmp_path)
    by_score = Retriever(config(tmp_path)).search(["water water pump", "bread water flour starter"])
    canonical = Retriever(config(tmp_path, order="canonical")).search(["water water pump", "bread water flour starter"])
    assert [ids(hits) for hits in by_score] == [["pump", "bread"], ["bread", "pump"]]
    assert [ids(hits) for hits in canonical] == [["bread", "pump"], ["bread", "pump"]]


class Found:
    """Stands for a search: says what it was asked."""

    mode = "bm25"

    def __init__(self):
        self.asked = []

    def search(self, queries):
        from ragspec.records import Passage
        from ragspec.retrieval.search import Hit

        self.asked.append(list(queries))
        return [[Hit(Passage(f"for {query}", "t", None, 1.0), "d")] for query in queries]


def test_the_stage_fills_only_what_lacks_contexts(tmp_path):
    values = [
        {"query": "a"},
        {"query": "b", "contexts": ["own"]},
        {"query": "c", "contexts": []},
        {"query": " "},
        {"messages": [{"role": "user", "content": "x"}]},
        5,
        *({"query": f"q{i}"} for i in range(20)),
    ]
    lines = [InputRow(number, json.dumps(value).encode(), value) for number, value in enumerate(values, 1)]
    search = Found()
    stage = Stage(search, query_of, with_hits)
    out = list(stage.fill(lines))
    assert [line.raw for line in out] == [line.raw for line in lines]  # fingerprints hold
    assert out[0].value["contexts"] == [{"id": "for a", "text": "t", "score": 1.0}]
    assert [line.value for line in out[1:6]] == values[1:6]
    assert [query for batch in search.asked for query in batch] == ["a", *(f"q{i}" for i in range(20))]
    assert stage.queries == 21


def numbered(count):
    return [InputRow(n, b"{}", {"query": f"q{n}"}) for n in range(count)]


def test_the_search_runs_ahead_while_the_reader_works():
    search, read = Found(), []

    def lines():
        for line in numbered(1000):
            read.append(line)
            yield line

    out = Stage(search, query_of, with_hits).fill(lines())
    assert next(out).value["contexts"][0]["id"] == "for q0"
    deadline = time.monotonic() + 30
    while len(search.asked) < AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(search.asked) == AHEAD  # while nobody asked for more
    assert len(read) == AHEAD * BATCH  # and no further: memory does not grow with the input
    out.close()
    assert not any(thread.name.startswith("retrieval") for thread in threading.enumerate())


def test_errors_of_the_search_and_of_the_input_come_where_they_belong():
    class Breaks(Found):
        def search(self, queries):
            if "q40" in queries:
                raise ConfigError("the disk is gone")
            return super().search(queries)

    out = Stage(Breaks(), query_of, with_hits).fill(numbered(100))
    assert [next(out).number for _ in range(32)] == list(range(32))
    with pytest.raises(ConfigError, match="the disk is gone"):
        next(out)

    def torn():
        yield from numbered(20)
        raise ConfigError("the archive is damaged")

    out = Stage(Found(), query_of, with_hits).fill(torn())
    assert [next(out).value["contexts"][0]["id"] for _ in range(20)] == [f"for q{n}" for n in range(20)]
    with pytest.raises(ConfigError, match="damaged"):
        next(out)


def test_generate_retrieves_on_the_fly_and_goes_on_after_an_interruption(tmp_path):
    built(tmp_path)
    asked = [
        {"id": "q1", "query": "lighthouse lamp"},
        {"id": "q2", "query": "owls", "contexts": [{"id": "own", "text": "t"}]},
        {"id": "q3", "query": "pump housing water", "tag": 1},
    ]
    questions = write_jsonl(tmp_path / "q.jsonl", asked)
    raw = {
        "runner": "fake",
        "input": questions,
        "output": str(tmp_path / "out.jsonl"),
        "retrieval": {"index": str(tmp_path / "idx"), "top_k": 2},
    }
    run(build_config(raw), limit=2)
    summary = run(build_config(raw))
    assert (summary.records, summary.skipped) == (1, 2)
    assert summary.retrieval["queries"] == 1  # the finished one was not searched again
    lines = {line["id"]: line for line in read_jsonl(tmp_path / "out.jsonl")}
    assert lines["q1"]["contexts"] == ["lamp"]
    assert lines["q1"]["context_scores"][0] > 0
    assert lines["q2"]["contexts"] == ["own"]
    assert "context_scores" not in lines["q2"]
    assert lines["q3"]["contexts"] == ["pump", "bread"]
    assert lines["q3"]["metadata"] == {"tag": 1}
    assert "retrieval" in json.loads((tmp_path / "out.stats.json").read_text())
    built(tmp_path, DOCS[:2])
    with pytest.raises(ConfigError, match=r"index.*was.*is now"):  # another index would give other answers
        run(build_config(raw))


def test_recall_and_mrr_are_those_of_documents(tmp_path):
    built(tmp_path, chunk_size=16, chunk_overlap=0)
    asked = [
        {"query": "lamp lighthouse", "gold_doc_ids": ["lamp"]},
        {"query": "runs dry pump water", "gold_doc_ids": ["bread", "owl"]},
        {"query": "nothing matches zzz", "gold_doc_ids": ["owl"]},
        {"query": "no gold"},
        {"query": " ", "gold_doc_ids": ["owl"]},  # no question: nothing is searched for it
    ]
    result = evaluate([InputRow(i, b"", value) for i, value in enumerate(asked)], Retriever(config(tmp_path)))
    assert result["recall@5"] == round((1 + 0.5 + 0) / 3, 4)
    assert result["queries"] == 3
    assert result["left_out"] == 2
    assert result["mrr"] == round((1 + 1 / 2 + 0) / 3, 4)  # bread comes second, after the pump
    with pytest.raises(ConfigError, match="gold_doc_ids"):
        evaluate([], Retriever(config(tmp_path)))


def command(*args, input=None):
    return subprocess.run(
        [sys.executable, "-m", "ragspec", *map(str, args)],
        cwd=ROOT,
        input=input,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(("gold", "counts"), [([7.0], True), (7, True), ("7", True), ([None], False), (True, False)])
def test_gold_documents_are_named_as_ids_are_everywhere(tmp_path, gold, counts):
    built(tmp_path, [{"id": 7, "text": "The keeper trims the lamp."}, {"id": "owl", "text": "Owls hunt mice."}])
    given = [{"query": "lamp", "gold_doc_ids": gold}, {"query": "mice", "gold_doc_ids": ["owl"]}]
    found = evaluate([InputRow(n, b"", row) for n, row in enumerate(given, 1)], Retriever(config(tmp_path)))
    assert (found["recall@5"], found["queries"], found.get("left_out", 0)) == (1.0, 1 + counts, 1 - counts)


def test_the_commands_make_a_pipeline(tmp_path):
    (tmp_path / "a.md").write_text("# Pumps\n\nA pump that runs dry is damaged.")
    (tmp_path / "b.pdf").write_bytes(b"no pdf")
    done = command("index", "--corpus", tmp_path / "a.md", tmp_path / "b.pdf", DOCUMENTS, "--output", tmp_path / "idx")
    assert done.returncode == 1, done.stderr  # something was left out
    assert "b.pdf: damaged" in done.stderr
    assert done.stdout == ""
    lines = '{"id": "q1", "query": "What damages a pump?"}\nnot json\n{"id": "q3", "prompt": "Say hi"}\n'
    found = command("retrieve", "--index", tmp_path / "idx", "-", "--top-k", 1, input=lines)
    assert found.returncode == 1
    first, second, third = map(json.loads, found.stdout.splitlines())
    assert first["contexts"][0]["id"] == "a.md"
    assert first["contexts"][0]["title"] == "Pumps"
    assert "not valid JSON" in second["error"]["message"]
    assert third == {"id": "q3", "prompt": "Say hi"}
    assert found.stdout.splitlines()[2] == '{"id": "q3", "prompt": "Say hi"}'  # byte for byte
    answers = command("generate", "-c", "sample_configs/fake.yaml", "-i", "-", "-o", "-", input=found.stdout)
    assert answers.returncode == 1
    one, two, three = map(json.loads, answers.stdout.splitlines())
    assert one["contexts"] == ["a.md"]
    assert "failed in an earlier step" in two["error"]["message"]
    assert three["output"]


def test_beirs_corpus_and_queries_are_read(tmp_path):
    write_jsonl(tmp_path / "corpus.jsonl", [{"_id": "d1", "title": "", "text": "A pump that runs dry is damaged."}])
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q1", "text": "What damages a pump?", "metadata": {}}])
    assert command("index", tmp_path / "corpus.jsonl", "-o", tmp_path / "idx").returncode == 0
    columns = ["--columns", "query=text", "--columns", "id=_id"]
    found = command("retrieve", "--index", tmp_path / "idx", tmp_path / "queries.jsonl", *columns)
    assert found.returncode == 0, found.stderr
    line = json.loads(found.stdout)
    assert (line["_id"], line["text"]) == ("q1", "What damages a pump?")
    assert [context["id"] for context in line["contexts"]] == ["d1"]


@pytest.mark.parametrize("name", ["q.csv", "q.json", "q.jsonl.gz"])
def test_the_filter_reads_queries_in_any_format(tmp_path, name):
    built(tmp_path)
    data = {
        "q.csv": b"id,query\na,owls\n",
        "q.json": b'[{"id": "a",\n "query": "owls"}]',
        "q.jsonl.gz": gzip.compress(b'{"id": "a", "query": "owls"}'),
    }[name]
    (tmp_path / name).write_bytes(data)
    found = command("retrieve", "--index", tmp_path / "idx", tmp_path / name, "-k", 1)
    assert found.returncode == 0, found.stderr
    line = json.loads(found.stdout)
    assert (line["id"], line["query"], line["contexts"][0]["id"]) == ("a", "owls", "owl")


def test_a_photo_in_a_folder_of_notes_is_told_and_no_error(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("# Pumps\n\nA pump that runs dry is damaged.")
    (tmp_path / "notes" / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00")
    done = command("index", tmp_path / "notes", "--output", tmp_path / "idx")
    assert done.returncode == 0, done.stderr
    assert "1 files are not documents and were left out (1 .jpg)" in done.stderr
    assert "0 skipped" in done.stderr
    named = command("index", tmp_path / "notes", tmp_path / "notes" / "photo.jpg", "--output", tmp_path / "idx")
    assert named.returncode == 1
    assert "photo.jpg: a binary file, not text" in named.stderr


def test_the_filter_keeps_what_json_libraries_lose(tmp_path):
    built(tmp_path)
    deep = "[" * 400 + "]" * 400
    lines = [
        '{"id": 123456789012345678901234, "query": "owls", "a": 1, "a": 2}',
        f'{{"id": "x", "query": "owls", "deep": {deep}}}',
        ' { "query" : "lamp" , "contexts" : null } ',
        '{"query": "owls", "contexts": []}',
    ]
    done = command("retrieve", "--index", tmp_path / "idx", "-", "-k", 1, input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    one, two, three, four = done.stdout.splitlines()
    assert one.startswith(lines[0][:-1] + ',"contexts":[{"id":"owl"')
    assert two.startswith(lines[1][:-1] + ',"contexts":[{"id":"owl"')
    assert json.loads(three)["contexts"][0]["id"] == "lamp"
    assert four == lines[3]
    assert "1 lines have contexts or no query" in done.stderr
    write_jsonl(tmp_path / "gold.jsonl", [{"query": "owls", "gold_doc_ids": ["owl"]}])
    scored = command("retrieve", "--index", tmp_path / "idx", "--evaluate", tmp_path / "gold.jsonl")
    assert json.loads(scored.stdout)["recall@5"] == 1.0


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\x1e"])
def test_the_filter_takes_what_generate_takes(tmp_path, mark):
    """A mark before a line is no part of it: it is skipped on reading, and not written in the middle of the output."""
    built(tmp_path)
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for line, wanted in (
        (b'{"query": "owls"}', b'{"query": "owls","contexts":[{"id":"owl"'),
        (b'{"query": "owls", "contexts": []}', b'{"query": "owls", "contexts": []}\n'),
    ):
        path.write_bytes(mark + line + b"\n" + mark + line)
        stream(config(tmp_path, top_k=1), str(path), str(out))
        assert [written.startswith(wanted) for written in out.read_bytes().splitlines(keepends=True)] == [True, True]


def test_a_closed_pipe_and_an_interruption_end_quietly(tmp_path):
    built(tmp_path)
    many = "".join(f'{{"id": "q{i}", "query": "owls and lamps"}}\n' for i in range(3000))
    (tmp_path / "many.jsonl").write_text(many)
    raw = f"runner: fake\nrunner_args: {{delay_s: 0.2}}\nretrieval: {{index: {tmp_path / 'idx'}}}\n"
    (tmp_path / "c.yaml").write_text(raw)
    ragspec = f"{sys.executable} -m ragspec"
    for line in (
        f"{ragspec} retrieve --index {tmp_path / 'idx'} {tmp_path / 'many.jsonl'} | head -n 1",
        f"cat {tmp_path / 'many.jsonl'} | {ragspec} generate -c {tmp_path / 'c.yaml'} -i - -o - | head -n 1",
    ):
        done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert len(done.stdout.splitlines()) == 1
        assert "Error" not in done.stderr, done.stderr
    running = start_interruptible(
        [*ragspec.split(), "generate", "-c", str(tmp_path / "c.yaml"), "-i", "-", "-o", str(tmp_path / "out.jsonl")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    running.stdin.write(many[: 1 << 14].rpartition("\n")[0] + "\n")
    running.stdin.flush()  # and left open: more might come
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        (tmp_path / "out.jsonl").exists() and read_jsonl(tmp_path / "out.jsonl")
    ):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 130, said
    assert "interrupted" in said
    assert json.loads((tmp_path / "out.stats.json").read_text())["retrieval"]["queries"] > 0


def test_commands_without_an_index_or_a_corpus_say_so(tmp_path):
    for args, words in (
        (["retrieve", "--index", tmp_path / "no", SAMPLE], "no index there"),
        (["retrieve", SAMPLE], "retrieval.index: missing"),
        *(
            (
                ["retrieve", "--index", tmp_path / "no", "-o", tmp_path / name, *more, SAMPLE],
                f"{name}: the output is JSON Lines",
            )
            for name, *more in (["a.csv"], ["a.lance"], ["a.parquet"], ["a.csv", "--evaluate"])
        ),
        (["index", "--output", tmp_path / "idx"], "--corpus: missing"),
        (["index", "--corpus", tmp_path / "no", "--output", tmp_path / "idx"], "no such file or folder"),
        (
            ["index", "--corpus", SAMPLE, "--output", tmp_path / "idx", "--chunk-size", 20, "--chunk-overlap", 11],
            "chunk_overlap: 11 exceeds half",
        ),
        (
            ["index", "--corpus", DOCUMENTS, "--output", tmp_path / "idx", "--language", "Klingon"],
            'retrieval.language: "Klingon"',
        ),
        (["retrieve", "--index", tmp_path / "no", "--mode", "magic", SAMPLE], "mode"),
        (["retrieve", "--index", tmp_path / "no", "--set", "top_k=3", SAMPLE], '"top_k" is not a known key'),
        (["retrieve", "--index", tmp_path / "no", "--set", "retrieval=5", SAMPLE], "retrieval"),
        (
            ["retrieve", "--index", "s3://b/i", "--set", "retrieval.storage_options.aws_secret_access_key=x", SAMPLE],
            "set AWS_SECRET_ACCESS_KEY in the environment",
        ),
    ):
        done = command(*args)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_many_vectors_are_searched_through_an_index_and_stay_searchable_after_an_update(tmp_path, monkeypatch):
    import lancedb
    import numpy

    from ragspec.retrieval import index as store
    from ragspec.retrieval import index as writer

    monkeypatch.setattr(writer, "VECTORS_INDEXED_FROM", 2000)
    rng = numpy.random.default_rng(0)
    settings = store.Settings(512, 64, "words", "English", "random", 16)
    uri = str(tmp_path / "idx")

    def add(names):
        vectors = rng.standard_normal((len(names), 16)).astype(numpy.float32)
        vectors /= numpy.linalg.norm(vectors, axis=1, keepdims=True)
        build = writer.Writer(uri, None, settings)
        build.add([writer.Chunk(name, name, name, None, f"text {name}") for name in names], vectors)
        build.finish()
        return dict(zip(names, vectors, strict=True))

    vectors = add([f"a{i}" for i in range(3000)]) | add([f"b{i}" for i in range(10)])
    index = store.Index(uri)
    table = lancedb.connect(uri).open_table(store.TABLE)
    assert {name for entry in table.list_indices() for name in entry.columns} == {"text", "vector"}
    for name in ("a0", "a2999", "b9"):
        best = index.near(vectors[name], 1)[0]
        assert best["id"] == name
        assert best["score"] == pytest.approx(1, abs=1e-4)
        assert index.match(name, 1)[0]["id"] == name
        assert index.fused(name, vectors[name], 5)[0]["id"] == name


@pytest.mark.slow
def test_a_hundred_thousand_passages_take_little_more_disk_than_their_texts(tmp_path):
    from ragspec.retrieval.index import Chunk, Index, Settings, Writer

    uri = str(tmp_path / "idx")
    build = Writer(uri, None, Settings(512, 64, "words", "English"))
    size = 0
    for begin in range(0, 100_000, 20_000):
        texts = [f"Passage {n} of shelf {n % 977} speaks of topic {n % 31}." for n in range(begin, begin + 20_000)]
        size += sum(map(len, texts))
        build.add([Chunk(f"d{n}", f"d{n}", f"{n:024x}", None, text) for n, text in enumerate(texts, begin)])
    build.finish()
    index = Index(uri)
    assert index.rows == 100_000
    found = index.match("passage 54321 shelf", 3)
    assert found[0]["id"] == "d54321"
    on_disk = sum(file.stat().st_size for file in (tmp_path / "idx").rglob("*") if file.is_file())
    assert on_disk < 4 * size  # texts, ids, digests and postings, and no second copy of them
