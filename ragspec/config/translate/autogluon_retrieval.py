"""AutoGluon-RAG's retrieval sections -> ours. Source: AutoGluon-RAG 0.1, agrag/modules/*/README.md, and its code.

Limit: where ragspec has no counterpart (how vectors are pooled, FAISS, Milvus), a note names the key.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from ragspec.config.translate.autogluon_sections import Reading, Section, quoted

RETRIEVAL = ("data", "embedding", "vector_db", "retriever")
DEFAULT_INDEX = "ragspec_index"
CHARACTERS = 4  # per token, roughly: AutoGluon-RAG counts characters
SHORTEST = 16  # tokens of a passage
CHUNK_SIZE, CHUNK_OVERLAP, TOP_K, RERANKER_TOP_K = 512, 64, 50, 10  # AutoGluon-RAG's defaults
RERANKER = "BAAI/bge-reranker-large"  # likewise
NO_RERANKER = "BAAI/bge-large-en"  # an embedding model, but AutoGluon-RAG's own configs have it as the reranker
NO_PAGES = (
    "data.web_urls: ragspec fetches no web pages; save them as .html files in data_dir, and if file_extns is set, add "
    "html to it"
)
NO_MODEL = (
    "set it to huggingface, and embedding_model to a sentence-transformers model, or give one to ragspec index with "
    "--embedding-model"
)


def translate_retrieval(sections: Mapping[str, Section], reading: Reading) -> dict[str, Any]:
    """Return the `retrieval` section that the retrieval sections mean; empty if they name no documents.

    Raises ConfigError for what cannot be searched, or, if the index is to be built, what cannot be indexed.
    """
    wanted = reading.only_retrieval or any(key.startswith("retrieval.") for key in reading.given)
    corpus = _corpus(sections["data"], reading)
    if corpus is None and not wanted:
        note_unused(sections, RETRIEVAL, "without data.data_dir, contexts come with the input records", reading)
        return {}
    search = _search(sections["retriever"], reading)
    if search is None and not wanted:
        note_unused(sections, RETRIEVAL, "", reading)
        return {}
    out: dict[str, Any] = {"index": DEFAULT_INDEX} | ({"corpus": corpus} if corpus else {})
    out |= _passages(sections["data"], reading) | (search or {})
    if model := _embedding_model(sections["embedding"], reading):
        out["embedding_model"] = model
    for name in RETRIEVAL:
        if ignored := sections[name].rest():
            reading.note(f"section {name}: {', '.join(ignored)}: ignored{_instead(name)}")
    if not reading.only_retrieval and "retrieval.index" not in reading.given:
        build = f"ragspec index --config {reading.source}{'' if corpus else ' --corpus FOLDER'}"
        reading.note(f"contexts come from the LanceDB index {DEFAULT_INDEX}; build it with {build}")
    return out


def note_unused(sections: Mapping[str, Section], names: Collection[str], why: str, reading: Reading) -> None:
    """Add a note for each of the sections `names` that has settings left: all of it is ignored."""
    for name in names:
        if ignored := sections[name].rest():
            reason = f"; {why}" if why else ""
            reading.note(f"section {name}: ignored ({', '.join(ignored)}){_instead(name)}{reason}")


def _instead(section: str) -> str:
    return "; ragspec reads no FAISS or Milvus: ragspec index builds a LanceDB index" if section == "vector_db" else ""


def _corpus(data: Section, reading: Reading) -> Any:
    """Return where the documents are: None if the file names no files, "" if they are on S3."""
    folder = data.take("data_dir") or None
    problems = {}
    if isinstance(folder, str) and (folder.startswith("s3://") or data.get("s3_bucket")):
        folder = ""
        problems["s3_bucket"] = (
            "data.data_dir: ragspec reads no documents from S3; download them (aws s3 sync) and name the folder: "
            f"ragspec index --config {reading.source} --corpus FOLDER"
        )
    if data.get("web_urls"):
        problems["web_urls"] = NO_PAGES
    if problems and "retrieval.corpus" not in reading.given:
        data.drop(problems)
        if reading.only_retrieval and not folder:
            raise reading.error(next(iter(problems.values())))
        for problem in problems.values():
            reading.note(problem)
    return folder


def _search(retriever: Section, reading: Reading) -> dict[str, Any] | None:
    """Return how passages are searched; None if none are."""
    found, reranks = retriever.take("retriever_top_k"), retriever.take("use_reranker")
    kept = retriever.take("reranker_top_k", RERANKER_TOP_K) if reranks else None
    if 0 in (found, kept):
        reading.note(f"retriever.{'retriever' if found == 0 else 'reranker'}_top_k: 0: no contexts are retrieved")
        return None
    if found is None:
        found = TOP_K
        reading.note(f"retriever.retriever_top_k: not set; read as AutoGluon-RAG's default, {TOP_K}")
    if not reranks:
        return {"top_k": found}
    model = _reranker(retriever, kept, reading)
    # there, the retriever hands that many to the reranker, which keeps reranker_top_k
    return {"candidates": found, "top_k": kept} | ({"reranker_model": model} if model else {})


def _reranker(retriever: Section, kept: Any, reading: Reading) -> Any:
    """Return the reranker; None if the file names none that could be one, or another is given."""
    platform, model = retriever.take("reranker_model_platform", "huggingface"), retriever.take("reranker_model_name")
    if "retrieval.reranker_model" in reading.given:
        return None
    if platform != "huggingface":
        raise reading.error(
            f"retriever.reranker_model_platform: {quoted(platform)} is not supported; set it to huggingface, and "
            "reranker_model_name to a sentence-transformers cross-encoder"
        )
    if model is None:
        reading.note(f"retriever.reranker_model_name: not set; read as AutoGluon-RAG's default, {RERANKER}")
        return RERANKER
    if model == NO_RERANKER:
        reading.note(
            f"retriever.reranker_model_name: {model} is an embedding model and cannot rerank: the first {kept} "
            f"passages are kept as found; name a cross-encoder, for instance {RERANKER}"
        )
        return None
    return model


def _passages(data: Section, reading: Reading) -> dict[str, Any]:
    """Return which files are read, and how they are cut into passages."""
    types = data.take("file_extns")
    if not types:
        reading.note("data.file_extns: not set; files of all types are read")
    size = _tokens(data, "chunk_size", CHUNK_SIZE, range(SHORTEST, sys.maxsize), reading)
    longest = size // 2 if isinstance(size, int) else sys.maxsize
    overlap = _tokens(data, "chunk_overlap", CHUNK_OVERLAP, range(longest + 1), reading)
    return ({"file_types": types} if types else {}) | {"chunk_size": size, "chunk_overlap": overlap}


def _tokens(data: Section, key: str, default: int, allowed: range, reading: Reading) -> Any:
    """Return a number of characters in tokens, or the nearest that is allowed; any other value as it is."""
    value = data.take(key)
    characters = default if value is None else value
    if type(characters) is not int:
        return value
    tokens = min(max(characters // CHARACTERS, allowed.start), allowed.stop - 1)
    whose = "not set; AutoGluon-RAG's default, " if value is None else ""
    reading.note(f"data.{key}: {whose}{characters} characters, read as {tokens} tokens")
    return tokens


def _embedding_model(embedding: Section, reading: Reading) -> str | None:
    """Return the embedding model; None if passages are searched by words, or the model is given."""
    written, platform = "embedding_model_platform", embedding.take("embedding_model_platform")
    if platform is None and embedding.take("use_bedrock"):
        written, platform = "use_bedrock", "bedrock"
    model: str | None = embedding.take("embedding_model")
    if "retrieval.embedding_model" in reading.given:
        return None
    if platform in (None, "huggingface"):
        if model is None:
            reading.note("no embedding_model: passages are searched by words")
        return model
    problem = f"embedding.{written}: {quoted(platform)} is not supported; {NO_MODEL}"
    if reading.only_retrieval:
        raise reading.error(problem)
    reading.note(problem)
    return None
