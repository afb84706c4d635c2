"""The files beside an output: `answers.run.json`, which names the config that started it, and the others' paths.

    {"config": {...}, "output": "answers.jsonl", "spent": {"runs": 2, "load_s": 4.1, ...}, "configs": {"3f2a": {...}}}

`config` is the latest config. `configs` exists if several configs answered records (retries, updates), and lists them,
the first one first; a line names its config unless that is the first. `weights` in a config tells a model's weights
from others of the same name. `spent`: the time of all runs.

>>> sibling("out/answers.jsonl", ".stats.json")
PosixPath('out/answers.stats.json')
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ragspec.errors import ConfigError
from ragspec.json_text import dumps, loads
from ragspec.outputs.base import Document
from ragspec.outputs.folder import LocalDocument
from ragspec.stats import RunSummary, Spent

STATE, STATISTICS, PENDING, UPDATES = ".run.json", ".stats.json", ".pending.jsonl", ".update.jsonl"
# keys that may change when failed records are retried: prompts and limits, which existing answers do not depend on
RETRIED = (
    *("prompt", "sampling.max_new_tokens", "retrieval", "index"),
    *(f"runner_args.{key}" for key in ("max_model_len", "max_num_batched_tokens", "context_length", "fail_ids")),
)
WEIGHTS = "weights"  # key of a config: what tells its weights from others of the same name
# runner_args that are about speed, memory and what is read, not about what the model computes
NOT_MODEL = {
    *("batch_size", "lookahead", "compile", "attention", "graphs", "engine", "exact", "device", "num_gpus", "guard"),
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enforce_eager", "block_size", "own_process"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size", "pipeline_parallel_size"),
    *("trust_remote_code", "tokenizer_args", "encode_args"),
    *("context_length", "delay_s", "fail_ids", "exit_ids", "reverse"),
}
UPDATE = "; to answer what changed, add --update"
RETRY = "; to try only the failed records under the new one, add --retry-failed"
WAY_OUT = "; use the config it was started with, choose another --output, or use --no-resume (which keeps it as a copy)"


def sibling(output: str, suffix: str) -> Path:
    """Return the path beside `output` with another suffix: out/answers.jsonl -> out/answers.stats.json."""
    path = Path(output)
    return path.with_name(path.name.removesuffix(".jsonl") + suffix)


def check_writable(path: Path, key: str) -> None:
    """Raise ConfigError that begins with `key` if `path` is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if Path(os.path.realpath(path)).is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError
    except OSError:
        raise ConfigError(f"{key}: {path} cannot be written; choose another file") from None


class RunState:
    """The content of `run.json`: the config that started the output `output`."""

    def __init__(self, output: str, document: Document) -> None:
        self._name = output
        self._document = document
        self._content: dict[str, Any] = {}
        self._spent = Spent()
        self.signature = ""  # digest of the current config, "" if it began the output
        self.lacking: list[str] = []  # of `output.include`, what earlier lines do not have

    def check_names(self) -> None:
        """Raise ConfigError if a file beside the output belongs to another output."""

    def is_ours(self) -> bool:
        """Return whether ragspec wrote the file."""
        return isinstance(self.read().get("config"), dict)

    def began_by(self) -> str | None:
        """Return the runner that began the output, None if unknown."""
        config = self.read().get("config")
        runner = config.get("runner") if isinstance(config, dict) else None
        return runner if isinstance(runner, str) else None

    def columns(self) -> dict[str, Any]:
        """Return the mapping of the input's columns under which the output was started, {} without one."""
        config = self.read().get("config")
        found = config.get("columns") if isinstance(config, dict) else None
        return found if isinstance(found, dict) else {}

    def check_config(self, identity: dict[str, Any], *, retrying: bool = False) -> None:
        """Raise ConfigError that names the key if another config started the output.

        retrying: only failed records are answered, so prompts and limits may differ.
        """
        content = self.read()
        began = content.get("config")
        if any(same_config(identity, each) for each in (content.get("configs") or {}).values()):
            return
        if not isinstance(began, dict):
            name = self._document.name.rpartition("/")[2]
            raise ConfigError(f"{self._name}: has lines, but {name} does not say which config wrote them{WAY_OUT}")
        changed = list(differences(began, identity))
        kept = [each for each in changed if not each.path.startswith(RETRIED)]
        if kept or (changed and not retrying):
            first, retry = (kept or changed)[0], "" if kept or retrying else RETRY
            openai = began.get("output_format") or identity.get("output_format")  # which --update refuses
            lost = began.get("columns") and not identity.get("columns")  # rows may be no records without them
            hint = f"{'' if openai or lost else UPDATE}{retry}{WAY_OUT}"
            raise ConfigError(f"{self._name}: was started with a different config: {first}{hint}")

    def begin(self, identity: dict[str, Any], spent: Spent, *, kept: bool, include: Sequence[str] = ()) -> None:
        """Record the config that answers from now on.

        kept: earlier answers stay. include: `output.include`; what all lines have of it is recorded, too.

        Raises ConfigError.
        """
        before = self.read() if kept else {}
        included = [each for each in include if not kept or each in before.get("include", [])]
        self.lacking = [each for each in include if each not in included]
        self._spent = spent
        configs = _configs(before)
        digest = next((each for each, old in configs.items() if same_run(identity, old)), _digest(identity))
        configs[digest] = identity
        self.signature = "" if next(iter(configs)) == digest else digest
        self._content = {"config": identity, "output": self._name.rstrip("/").rpartition("/")[2]}
        self._content |= {"spent": spent.to_json(), **({"configs": configs} if len(configs) > 1 else {})}
        self._content |= {"include": included} if included else {}
        try:
            self._document.write(self._content)
        except OSError as error:
            where = error.filename or self._document.name
            raise ConfigError(f"{where}: cannot be written ({error.strerror}); choose another --output") from None

    def configs(self) -> dict[str, dict[str, Any]]:
        """Return the configs that answered records by the digest that lines name them by; the first one is "" as well.

        Raises ConfigError.
        """
        found = _configs(self.read())
        return {"": next(iter(found.values())), **found} if found else {}

    def keep_configs(self, named: Container[str]) -> None:
        """Forget the configs that no line names, except the latest. named: those of the lines. Raises OSError."""
        configs = self._content.get("configs", {})
        first = next(iter(configs), "")
        kept = {
            digest: config
            for digest, config in configs.items()
            if digest in named or (digest == first and "" in named) or config is self._content["config"]
        }
        if len(kept) < len(configs):
            self._content["configs"] = kept
            self._document.write(self._content)

    @property
    def spent(self) -> Spent:
        """Return the time of earlier runs."""
        return self._spent

    def spent_with(self, summary: RunSummary) -> Spent:
        """Return the time of earlier runs and this one."""
        return summary.add_to(self._spent)

    def keep_spent(self, summary: RunSummary) -> None:
        """Write the time of all runs so far. Raises OSError."""
        self._document.write(self._content | {"spent": self.spent_with(summary).to_json()})

    def read(self) -> dict[str, Any]:
        """Return the file's content, {} without a file. Raises ConfigError if it cannot be read."""
        try:
            return self._document.read()
        except OSError as error:
            where = error.filename or self._document.name
            raise ConfigError(f"{where}: cannot be read ({error.strerror}); choose another --output") from None


class FileState(RunState):
    """The state of an output in one file, in `answers.run.json` beside it."""

    def __init__(self, output: str) -> None:
        self.path = sibling(output, STATE)
        super().__init__(output, LocalDocument(self.path))
        self._output = Path(output)

    def check_names(self) -> None:
        """Raise ConfigError if a file beside the output belongs to another output."""
        twin = self._twin()
        if twin is not None and self._is_state_of(twin):
            raise ConfigError(
                f"{self._output}: its state file would be {self.path.name}, which belongs to {twin.name}; "
                "choose another --output"
            )
        for suffix in (PENDING, UPDATES):
            waiting = sibling(str(self._output), suffix)
            if sibling(str(waiting), STATE).exists():
                raise ConfigError(
                    f"{self._output}: pending answers would go to {waiting.name}, which is another run's output; "
                    "choose another --output"
                )

    def _twin(self) -> Path | None:
        """Return the other output that would have the same files beside it, as `a` and `a.jsonl` have."""
        name = self._output.name
        other = name.removesuffix(".jsonl") if name.endswith(".jsonl") else f"{name}.jsonl"
        if not other or sibling(other, STATE) != sibling(name, STATE):
            return None
        return self._output.with_name(other)

    def _is_state_of(self, twin: Path) -> bool:
        owner = self.read().get("output")
        if owner is not None:
            return bool(owner == twin.name) and twin.is_file()
        # a file without an owner, from an older version, belongs to the output that has lines
        return self.path.exists() and _has_lines(twin) and not _has_lines(self._output)


def _has_lines(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


class _Difference(NamedTuple):
    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: was {_shown(self.old)}, is now {_shown(self.new)}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[_Difference]:
    """Yield the differences between two configs, apart from their weights."""
    left, right = ({key: value for key, value in _plain(each).items() if key != WEIGHTS} for each in (old, new))
    yield from _differences(left, right)


def same_config(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two configs are equal, whatever their weights are."""
    return not any(True for _ in differences(one, other))


def same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two configs are equal, and their weights too, as far as both are known."""
    weights = {each.get(WEIGHTS) for each in (one, other)} - {None, ""}
    return len(weights) < 2 and same_config(one, other)


def same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two configs have the same model: its weights, and the arguments that change what they compute."""
    models = [each.get("model") for each in (one, other)]
    args = [
        {key: value for key, value in _plain(each.get("runner_args") or {}).items() if key not in NOT_MODEL}
        for each in (one, other)
    ]
    weights = {each.get(WEIGHTS) for each in (one, other)} - {None, ""}
    return models[0] == models[1] and args[0] == args[1] and len(weights) < 2


def _configs(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the configs in a state file by digest, the first one first."""
    latest = content.get("config")
    return dict(content.get("configs") or ({_digest(latest): latest} if isinstance(latest, dict) else {}))


def _differences(old: Any, new: Any, path: str = "") -> Iterator[_Difference]:
    """Yield the differences between two values by dotted path."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield _Difference(path, old, new)


def _plain(identity: dict[str, Any]) -> Any:
    return loads(dumps(identity))


def _digest(identity: dict[str, Any]) -> str:
    """Return the digest of a config, by which lines name it."""
    return hashlib.blake2b(dumps(identity, option=orjson.OPT_SORT_KEYS), digest_size=6).hexdigest()


def _shown(value: Any) -> str:
    text = dumps(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."
