"""AutoGluon-RAG's retrieval sections -> ours. Source: AutoGluon-RAG 0.1, agrag/modules/*/README.md.

Limit: the keys in `RETRIEVAL_KEYS` count; others are named in a note.
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import ConfigError

SECTIONS = ("shared", "data", "embedding", "vector_db", "retriever")
RETRIEVAL_KEYS = {  # section -> its key -> the retrieval section's; all others have no counterpart
    "data": {
        "data_dir": "corpus",
        "file_extns": "file_types",
        "chunk_size": "chunk_size",
        "chunk_overlap": "chunk_overlap",
    },
    "embedding": {"embedding_model": "embedding_model"},
    "vector_db": {},
    "retriever": {"retriever_top_k": "top_k", "reranker_model_name": "reranker_model"},
}
DEFAULT_INDEX = "ragspec_index"
CHARACTERS = 4  # per token, roughly: AutoGluon-RAG counts characters


def translate_retrieval(sections: dict[str, dict[str, Any]], source: str, notes: list[str]) -> dict[str, Any]:
    """Return the `retrieval` section that the retrieval sections mean; empty if they name no documents."""
    if sections["shared"]:
        notes.append(f"{source}: section shared: ignored")
    if not sections["data"].get("data_dir"):
        notes += [
            f"{source}: section {name}: ignored; without data.data_dir, contexts come with the input records"
            for name, section in sections.items()
            if section and name in RETRIEVAL_KEYS
        ]
        return {}
    if sections["retriever"].get("retriever_top_k") == 0:
        notes.append(f"{source}: retriever.retriever_top_k: 0: no contexts are retrieved")
        return {}
    out: dict[str, Any] = {"index": DEFAULT_INDEX}
    reranks = sections["retriever"].pop("use_reranker", False)
    depth = sections["retriever"].pop("reranker_top_k", None)
    for name, keys in RETRIEVAL_KEYS.items():
        for key, value in sections[name].items():
            if key in keys and value is not None:
                out[keys[key]] = value
        if ignored := [key for key in sections[name] if key not in keys]:
            notes.append(f"{source}: section {name}: {', '.join(ignored)}: ignored")
    for key in ("chunk_size", "chunk_overlap"):
        if isinstance(out.get(key), int):
            notes.append(f"{source}: data.{key}: {out[key]} characters, read as {out[key] // CHARACTERS} tokens")
            out[key] //= CHARACTERS
    if "embedding_model" not in out:
        notes.append(f"{source}: no embedding_model: passages are searched by words")
    if not reranks:
        out.pop("reranker_model", None)
    elif "reranker_model" not in out:
        raise ConfigError(f"{source}: retriever.use_reranker: needs reranker_model_name as well")
    else:  # there, the retriever hands that many to the reranker, which keeps reranker_top_k
        out["candidates"] = out.pop("top_k", 50)
        out["top_k"] = depth or 10
    notes.append(
        f"{source}: contexts come from the LanceDB index {out['index']}; build it with ragspec index --config {source}"
    )
    return out
