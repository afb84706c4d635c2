"""Push the answers of an output to a dataset on the Hugging Face Hub, in one commit.

    push("out/answers.jsonl", Destination("me/answers"))    ->    README.md, data/train-00000-of-00001.parquet

Files are uploaded first, and one commit shows them: readers see all answers or none, wherever a push ends. What is
there already is known by its hash, so pushing the same answers again commits nothing. Of a dataset's card, only the
section of these answers is written; files that no push of ragspec's wrote are never replaced. The token is the hub
client's own affair. Limit: the same answers have the same bytes only with the same version of pyarrow.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ragspec.config.io import OutputConfig
from ragspec.errors import ConfigError, flat
from ragspec.inputs.record_ids import KeySet
from ragspec.inputs.storage import advising, is_url, network_errors
from ragspec.json_text import dumps
from ragspec.models.resolve import LOGIN, PATIENCE_S, hub_answers
from ragspec.outputs.codecs import Parquet, foreign, misfit
from ragspec.outputs.reader import answer_lines, id_of, native
from ragspec.outputs.target import Target, target_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import DatasetInfo

CARD = "README.md"
DEFAULT, DATA = "default", "data"  # the configuration without a name, and the folder of its files
DATASET = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
NAME = re.compile(r"[\w-][\w.-]*")
SPLIT = re.compile(r"\w+(\.\w+)*")  # as `datasets` has it
# what the hub shows as data where a card lists none
SEEN = {".parquet", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".arrow", ".txt", ".gz", ".zst", ".zip", ".tar"}
FILE_BYTES = 64 << 20  # of a Parquet file, before compression
REFUSED = {401: f"the token is not valid; {LOGIN}", 403: "the token may not write there; give it write access"}
MOVED = (409, 412)  # another commit came in between
WAY_OUT = "; finish the run, or add --partial"
SHOWN = 200  # characters of a message of the hub's
NAMED = 8  # fields in a note


@dataclass(frozen=True, slots=True)
class Destination:
    """Where answers go: a dataset OWNER/NAME, its configuration and split, and the branch.

    private: how the dataset is made, if there is none. Raises ConfigError for names that the hub would not take.
    """

    dataset: str
    name: str = DEFAULT
    split: str = "train"
    revision: str = "main"
    private: bool = False

    def __post_init__(self) -> None:
        if not DATASET.fullmatch(self.dataset):
            raise ConfigError(f'dataset "{self.dataset}": must be OWNER/NAME, as on the hub')
        if not NAME.fullmatch(self.name) or self.name == DATA:
            raise ConfigError(f'--name: "{self.name}" must be letters, digits, _, - and ., and not "{DATA}"')
        if not SPLIT.fullmatch(self.split):
            raise ConfigError(f'--split: "{self.split}" must be letters, digits and _, such as train or test')

    @property
    def folder(self) -> str:
        """Return the folder of the configuration's files."""
        return DATA if self.name == DEFAULT else self.name

    @property
    def files(self) -> re.Pattern[str]:
        """Return what the split's files are called."""
        return re.compile(rf"{re.escape(self.folder)}/{re.escape(self.split)}-\d{{5}}-of-\d{{5}}\.parquet")


@dataclass(slots=True)
class Pushed:
    """What a push did. commit: its address, "" if the dataset had these answers already."""

    url: str
    commit: str = ""
    records: int = 0
    failed: int = 0
    files: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Totals over output lines.

    records: answered ones. repeated: lines with the id of an earlier one. foreign: fields without a column, and how
    many lines have them.
    """

    records: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    repeated: int = 0
    first_repeated: str = ""
    foreign: Counter[str] = field(default_factory=Counter)

    def notes(self) -> list[str]:
        """Return what a reader of the dataset may not expect."""
        notes = []
        if self.repeated:
            count = f"{self.repeated:,} of {self.records + self.failed:,} lines"
            notes.append(f'{count} repeat the id of an earlier one (first "{self.first_repeated:.80}"); all are pushed')
        if self.foreign:
            names = [name for name, _ in self.foreign.most_common()]
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            notes.append(f"fields that ragspec does not write are not pushed ({', '.join(names[:NAMED])}{more})")
        return notes

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line."""
        if line.get("error"):
            self.failed += 1
            return
        self.records += 1
        speculation = line.get("speculation") or {}
        self.prompt_tokens += line.get("prompt_tokens") or 0
        self.output_tokens += line.get("output_tokens") or 0
        self.drafted += speculation.get("drafted") or 0
        self.accepted += speculation.get("accepted") or 0


def push(answers: str, to: Destination, *, message: str | None = None, partial: bool = False) -> Pushed:
    """Make a dataset's split hold the answers of an output.

    Args:
        answers: The output, in any format.
        to: Where they go.
        message: Of the commit.
        partial: Push the output of a run that has not ended.

    Raises:
        ConfigError: There is nothing to push, the run has not ended, or the hub rejects it.
    """
    _check_hub()
    target = target_of(OutputConfig(path=answers))
    if target is None:
        raise ConfigError(f"{answers}: cannot push a stream; write the answers to a file first")
    statistics = target.statistics.read()
    missing = unfinished(target, statistics)
    if missing and not partial:
        raise ConfigError(f"{answers}: {missing}{WAY_OUT}")
    with TemporaryDirectory(prefix="ragspec-push-") as folder:
        counts, local = _written(answers, to, Path(folder))
        missing = missing or _uncounted(counts, statistics)
        if missing and not partial:
            raise ConfigError(f"{answers}: {missing}{WAY_OUT}")
        pushed = Pushed("", records=counts.records, failed=counts.failed, files=len(local))
        pushed.notes += [f"{answers}: {note}" for note in [missing, *counts.notes()] if note]
        with _hub_errors(to):
            _commit(to, local, _section(counts, statistics), pushed, message, Path(folder))
    return pushed


def unfinished(target: Target, statistics: Mapping[str, Any]) -> str:
    """Return why an output does not hold all answers of its run, "" if it does."""
    state, total = statistics.get("state"), statistics.get("input_records")
    if state is None and target.state.is_ours():
        return f"cannot tell whether its run has ended, because {target.statistics.name} is missing"
    if state not in (None, "finished"):
        done = sum(int(statistics.get(key) or 0) for key in ("records", "failed", "skipped"))
        how_far = f"at {done:,} of {total:,} records" if total else f"at {done:,} records"
        return f"its run was stopped {how_far}" if state == "stopped" else f"its run has not ended ({how_far})"
    waiting = [where for where in target.whereabouts() if where.endswith(")")]  # the others hold finished answers
    return f"answers of a run that has not ended are in {waiting[0]}" if waiting else ""


def _uncounted(counts: Counts, statistics: Mapping[str, Any]) -> str:
    """Return that an output holds other lines than its last finished run left, "" if it does not."""
    totals = statistics.get("totals") or {}
    left, found = totals.get("records", 0) + totals.get("failed", 0), counts.records + counts.failed
    return f"has {found:,} records, but had {left:,} after its last finished run" if totals and left != found else ""


def _check_hub() -> None:
    """Raise ConfigError if nothing can be pushed from here."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set; unset it to push")
    if get_token() is None:
        raise ConfigError(f"pushing needs a token with write access: set HF_TOKEN, or {LOGIN}")
    if not hub_answers():
        raise ConfigError(f"{constants.ENDPOINT} does not answer within {PATIENCE_S:.0f} s; check the connection")


# -- what is pushed --------------------------------------------------------------------------------


def _written(answers: str, to: Destination, folder: Path) -> tuple[Counts, dict[str, Path]]:
    """Write an output as Parquet files; return its totals, and the files by their path in the dataset."""
    codec, counts = Parquet(), Counts()
    parts: list[Path] = []
    waiting: list[bytes] = []
    ids = KeySet()

    def write() -> None:
        parts.append(folder / f"{len(parts):05}.parquet")
        parts[-1].write_bytes(codec.encode(waiting))
        waiting.clear()

    size = 0
    try:
        with advising("ANSWERS takes the output of a run", [answers]):
            for line in map(native, answer_lines(answers)):
                line["id"] = id_of(line)
                if line["id"] is None or (line.get("output") is None and line.get("error") is None):
                    raise ConfigError(f"{answers}: not an output of ragspec: its lines need id and output")
                if wrong := misfit(line, codec.schema):
                    raise ConfigError(f'{answers}: record "{line["id"]:.80}": {wrong}; correct it, or remove the field')
                if not ids.add(line["id"]):
                    counts.repeated += 1
                    counts.first_repeated = counts.first_repeated or line["id"]
                counts.foreign.update(foreign(line, codec.schema))
                counts.add(line)
                waiting.append(dumps(line))
                size += len(waiting[-1])
                if size >= FILE_BYTES:
                    write()
                    size = 0
        if waiting:
            write()
    except OSError as error:
        raise ConfigError(f"{answers}: {error.strerror or flat(error, SHOWN)}") from None
    if not parts:
        raise ConfigError(f"{answers}: contains no answers")
    name = f"{to.folder}/{to.split}-{{:05}}-of-{len(parts):05}.parquet"
    return counts, {name.format(at): path for at, path in enumerate(parts)}


def _section(counts: Counts, statistics: Mapping[str, Any]) -> str:
    """Return what the card says of the answers: figures, and of the config only what harms nobody."""
    config = statistics.get("config") or {}
    sampling = config.get("sampling") or {}
    rows = [("records", f"{counts.records:,} answered" + (f", {counts.failed:,} failed" if counts.failed else ""))]
    if model := str(config.get("model") or ""):
        is_local = model.count("/") > 1 or model.startswith((".", "/", "~")) or is_url(model)
        rows.append(("model", Path(model).name if is_local else model))
    if sampling:
        rows.append(
            ("sampling", ", ".join(f"{key} {sampling.get(key)}" for key in ("temperature", "max_new_tokens", "seed")))
        )
    rows.append(("tokens", f"{counts.prompt_tokens:,} prompt, {counts.output_tokens:,} output"))
    seconds = (statistics.get("totals") or statistics).get("generate_s")
    if seconds and counts.output_tokens:
        rows.append(("speed", f"{counts.output_tokens / seconds:,.1f} output tokens/s"))
    if method := (statistics.get("speculation") or {}).get("method"):
        rows.append(("speculation", str(method)))
    if counts.drafted:
        share = f"{counts.accepted / counts.drafted:.1%}"
        rows.append(("acceptance", f"{share} ({counts.accepted:,} of {counts.drafted:,} drafted tokens)"))
    if version := (statistics.get("versions") or {}).get("ragspec"):
        rows.append(("ragspec", str(version)))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"| | |\n|---|---|\n{table}\n\n"
        "Each row is a record: `output` is its answer, or `error` says why there is none. `metadata`, `logprobs`, "
        "`parsed` and `passages` are JSON texts."
    )


def card_with(card: str, to: Destination, section: str, others: Iterable[str] = ()) -> str:
    """Return a dataset's card, "" if it has none, with the section of these answers new or replaced.

    others: the dataset's other files. Raises ConfigError where the card would hide files that readers see now.
    """
    from huggingface_hub import DatasetCard
    from yaml import YAMLError

    title = to.dataset.rpartition("/")[2]
    try:
        found = DatasetCard(card or f"---\ntags:\n- ragspec\n---\n\n# {title}\n", ignore_metadata_errors=True)
    except (ValueError, YAMLError):
        raise ConfigError(f"{to.dataset}: its {CARD} starts with invalid YAML; fix it first") from None
    configs = getattr(found.data, "configs", None) or []
    if not configs and (data := [name for name in others if Path(name).suffix in SEEN]):
        raise ConfigError(
            f"{to.dataset}: already has data ({min(data)}), but its {CARD} lists no files under `configs`; choose "
            "another dataset"
        )
    own = next((each for each in configs if each.get("config_name") == to.name), None)
    if own is None:
        own = {"config_name": to.name, "data_files": []}
        configs = [*configs, own]
    entries = own.get("data_files")
    if not isinstance(entries, list) or not all(isinstance(each, dict) and "split" in each for each in entries):
        raise ConfigError(f'{to.dataset}: its {CARD} lists the files of "{to.name}" itself; choose another --name')
    entry = {"split": to.split, "path": f"{to.folder}/{to.split}-*.parquet"}
    same = [each for each in entries if each["split"] == to.split]
    if same and same != [entry]:
        raise ConfigError(f"{to.dataset}: its {CARD} lists other files of split {to.split}; choose another --split")
    own["data_files"] = entries if same else [*entries, entry]
    found.data["configs"] = configs
    begin, end = _marks(to)
    heading = to.split if to.name == DEFAULT else f"{to.name}, {to.split}"
    new = f"{begin}\n## {heading}\n\n{section}\n{end}"
    before, marked, rest = found.text.partition(begin)
    found.text = f"{before}{new}{rest.partition(end)[2]}" if marked else f"{before.rstrip()}\n\n{new}\n"
    return str(found)


def _marks(to: Destination) -> tuple[str, str]:
    return f"<!-- ragspec push: {to.name}/{to.split} -->", f"<!-- /ragspec push: {to.name}/{to.split} -->"


# -- the hub ---------------------------------------------------------------------------------------


def _commit(
    to: Destination, local: Mapping[str, Path], section: str, pushed: Pushed, message: str | None, folder: Path
) -> None:
    """Commit what differs between the dataset and these files."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = HfApi(library_name="ragspec")
    info = _dataset(api, to)
    there = {each.rfilename: each.lfs.sha256 if each.lfs else each.blob_id for each in info.siblings or []}
    card = ""
    if CARD in there:
        path = api.hf_hub_download(to.dataset, CARD, repo_type="dataset", revision=info.sha, local_dir=folder)
        card = Path(path).read_text(encoding="utf-8")
    before = {name for name in there if to.files.fullmatch(name)}
    if before and _marks(to)[0] not in card:
        raise ConfigError(
            f"{to.dataset}: has files of split {to.split} not written by ragspec ({min(before)}); "
            "choose another --split or --name"
        )
    files: dict[str, bytes | Path] = {**local, CARD: card_with(card, to, section, set(there) - before).encode()}
    changed = [name for name, content in files.items() if there.get(name) not in _hashes(content)]
    stale = sorted(before - set(files))
    pushed.url = f"{api.endpoint}/datasets/{to.dataset}"
    if not changed and not stale:
        return
    records = pushed.records + pushed.failed
    commit = api.create_commit(
        to.dataset,
        [
            *(CommitOperationAdd(name, files[name]) for name in changed),
            *(CommitOperationDelete(name) for name in stale),
        ],
        commit_message=message or f"Push answers of {records:,} record{'' if records == 1 else 's'}",
        repo_type="dataset",
        revision=to.revision,
        parent_commit=info.sha,
    )
    pushed.commit = str(commit.commit_url)


def _dataset(api: HfApi, to: Destination) -> DatasetInfo:
    """Return what a dataset holds at its branch; make both if there are none."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    def look() -> DatasetInfo:
        return api.dataset_info(to.dataset, revision=to.revision, files_metadata=True)

    try:
        info = look()
    except RepositoryNotFoundError:
        api.create_repo(to.dataset, repo_type="dataset", private=to.private)
        if to.revision != "main":
            api.create_branch(to.dataset, branch=to.revision, repo_type="dataset")
        return look()
    except RevisionNotFoundError:
        api.create_branch(to.dataset, branch=to.revision, repo_type="dataset")
        info = look()
    if to.private and not info.private:
        raise ConfigError(f"{to.dataset}: already exists and is public; make it private on the hub first")
    return info


def _hashes(content: bytes | Path) -> tuple[str, str]:
    """Return by which hashes the hub knows a file: SHA-256 of large files, git's of others."""
    data = content if isinstance(content, bytes) else content.read_bytes()
    blob = b"blob %d\0" % len(data) + data
    return hashlib.sha256(data).hexdigest(), hashlib.sha1(blob, usedforsecurity=False).hexdigest()


@contextmanager
def _hub_errors(to: Destination) -> Iterator[None]:
    """Convert errors of the hub and of its client to one-line ConfigErrors."""
    from huggingface_hub.errors import HfHubHTTPError

    upload_errors: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError, *network_errors())
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in MOVED:
            why = "someone else committed during the upload; nothing was changed; push again"
        else:
            why = REFUSED.get(status) or f"the hub rejected it: {flat(error, SHOWN)}"
        raise ConfigError(f"{to.dataset}: {why}") from error
    except upload_errors as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ConfigError(f"{to.dataset}: the push was not confirmed; push again ({flat(cause, SHOWN)})") from error
