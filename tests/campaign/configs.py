"""Mutated configs: a run as ever, or exit code 2 and one line that says why."""

import random
from collections import Counter
from pathlib import Path

import yaml

from tests.campaign.damage import change_value, cut, flip
from tests.campaign.forked import ragspec

BASES = [
    "runner: fake\ninput: in.jsonl\noutput: out.jsonl\n",
    """\
runner: fake
input: in.jsonl
output: out.jsonl
order: finish
prompt: {source: query, system: S., template: "{{ query }}", chat: auto, query_prefix: "Q: ", max_prompt_tokens: 900}
sampling: {max_new_tokens: 16, temperature: 0.5, top_p: 0.9, top_k: 5, min_p: 0.1, repetition_penalty: 1.1, stop: [.]}
speculation: {method: prompt_lookup, num_tokens: auto, ngram_max: 3, ngram_min: 1, isolate: false}
runner_args: {batch_size: auto, context_length: 2000, fail_ids: [q1], reverse: true}
""",
    """\
# every section, one value a line
runner: fake
input: in.jsonl
output: out.jsonl
prompt:
  template: citations
  system: |
    Two
    lines.
sampling: &sampling
  max_new_tokens: 1e2
  stop: ["\\n\\n", é]
retrieval:
  index: nowhere
  top_k: 5
  mode: hybrid
  corpus: [docs, faq.jsonl]
  storage_options: {region: eu-west-1}
runner_args:
  batch_size: 4
""",
    "model: no/such-model\nrunner: huggingface\ninput: in.jsonl\noutput: out.jsonl\nspeculation: {method: auto}\n",
    """\
generator:
  generator_model_name: no/such-model
  generator_model_platform: huggingface
  generator_model_platform_args: {hf_generate_params: {max_new_tokens: 16, assistant_early_exit: 4}}
  generator_query_prefix: "Answer: "
  num_gpus: 0
data: {chunk_size: 512, chunk_overlap: 8}
""",
    """\
model: no/such-model
runner: vllm
runner_args: {max_model_len: 512, num_speculative_tokens: 5, speculative_model: "[ngram]", ngram_prompt_lookup_max: 4}
""",
    """\
# AutoGluon-RAG's, with a runner that needs no model
runner: fake
shared: {pipeline_batch_size: 20}
data: {chunk_size: 128, chunk_overlap: 16, file_extns: [pdf, .txt], web_urls: ["https://example.org/"]}
embedding: {embedding_model: a/b, embedding_model_platform: bedrock, normalization_params: {p: 2, eps: 1e-12}}
vector_db: {db_type: faiss, use_existing_vector_db: true, vector_db_index_load_path: i.idx, num_gpus: 0}
retriever: {retriever_top_k: 20, use_reranker: true, reranker_model_name: BAAI/bge-large-en, reranker_top_k: 10}
generator:
  generator_model_name: anthropic.claude
  generator_model_platform: bedrock
  generator_query_prefix: "Answer: "
  generator_model_platform_args: {bedrock_aws_region: us-west-2, hf_generate_params: {max_new_tokens: 16}}
""",
    """\
# the same in mid-2024, and without sections
runner: fake
misc: {num_gpus: null}
data_file_extns: [txt]
top_k_embeddings: 4
use_bedrock: true
openai_key_file: key.txt
generator_hf_generate_params: {max_new_tokens: 16, do_sample: true, temperature: 0.7}
generator:
""",
]
VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        3,
        10**30,
        0.5,
        -1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        " ",
        "auto",
        "none",
        "x" * 500,
    ),
    *(
        "\0",
        "é\u2028",
        "~",
        "{{",
        "{% for %}",
        "in.jsonl",
        "/dev/null/x",
        "..",
        [],
        {},
        [None],
        [[]],
        {"a": {}},
        {1: 2},
        {None: 1},
    ),
    *(["auto"], [1, "x"], b"bytes", yaml.safe_load("2024-01-01"), {"method": "context"}, {"index": ""}),
]
WORDS = [
    "!!python/object:os.system",
    "!!binary",
    "!!set {a}",
    "*x",
    "&x",
    "<<: *sampling",
    "---",
    "...",
    "? ",
    "|",
    ">",
    "%",
    "@",
    "`",
]
KEYS = [
    "model",
    "runner",
    "order",
    "prompt",
    "sampling",
    "speculation",
    "retrieval",
    "runner_args",
    "temperature",
    "method",
    "data",
    "data_dir",
    "retriever",
    "generator",
    "use_vllm",
    "5",
    "",
]


def campaign(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Run `count` configs; return how they ended."""
    (folder / "in.jsonl").write_text(
        '{"id": "q1", "query": "Why?"}\n{"id": "q2", "query": "How?", "contexts": ["x"]}\n'
    )
    ends: Counter[str] = Counter(configs=count)
    for number in range(count):
        chance = random.Random(f"{seed} configs {number}")
        text = mutated(chance)
        (folder / "c.yaml").write_bytes(text)
        for old in folder.glob("out*"):
            old.unlink()
        done = ragspec(folder, "generate", "-c", "c.yaml", "-i", "in.jsonl", "-o", "out.jsonl")
        where = f"config {number} of seed {seed}, exit code {done.code}:\n{text!r}\n{done.stderr}"
        assert done.code in (0, 1, 2), where
        assert "Traceback" not in done.stderr, where
        assert "(a bug?" not in done.stderr, where
        if done.code == 2:
            assert len(done.lines()) == 1, where
            assert done.lines()[0].startswith("error: "), where
        else:
            assert (folder / "out.jsonl").read_bytes().count(b"\n") == 2, where
        ends["refused" if done.code == 2 else "ran"] += 1
    return dict(ends)


def mutated(chance: random.Random) -> bytes:
    """Return a config's bytes, its values or its text damaged."""
    text = chance.choices(BASES, weights=[4, 14, 5, 0.5, 0.5, 0.5, 4, 2])[0]
    if chance.random() < 0.5:
        value = yaml.safe_load(text)
        for _ in range(chance.choice([0, 1, 1, 2, 4])):
            change_value(chance, value, VALUES, KEYS, 0.75)
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=chance.random() < 0.5)
    raw = text.encode()
    for _ in range(chance.choice([0, 0, 1, 1, 2, 6])):
        raw = chance.choice(DAMAGES)(chance, raw)
    return raw


def _drop(chance, raw):
    lines = raw.splitlines(keepends=True)
    return b"".join(line for line in lines if chance.random() < 0.8)


def _repeat(chance, raw):
    lines = raw.splitlines(keepends=True) or [b""]
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    return b"".join(lines)


def _indent(chance, raw):
    lines = raw.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    lines[at] = chance.choice([b" ", b"  ", b"\t"]) + lines[at]
    return b"".join(lines)


def _insert(chance, raw):
    at = chance.randrange(len(raw) + 1)
    word = (
        chance.choice(WORDS).encode()
        if chance.random() < 0.7
        else chance.choice([b"\0", b"\xff", b"\xef\xbb\xbf", b"[" * 2000])
    )
    return raw[:at] + word + raw[at:]


DAMAGES = [flip, flip, cut, _drop, _repeat, _indent, _insert]
