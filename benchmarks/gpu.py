"""Tokens per second on a GPU: ragspec, vLLM as its users run it, ragspec inside vLLM, and stock generate().

    python benchmarks/inflate.py demo out/8b --shape 8b
    python benchmarks/gpu.py out/8b RECORDS.jsonl [MORE.jsonl] --at-once 1 16 64 --ways none context vllm vllm-ngram

Each way runs in a process of its own, which loads once and answers every set at every number at once: one pass to warm
up, then --passes timed ones, prompts included. vLLM's own ways are given the token ids of ragspec's prompts. Prints a
table, and with --output the figures as JSON lines. A way that is not installed or fails has a dash, and its reason
below. `none` and `context` are ragspec's engine, `vllm-none` and `vllm-context` ragspec's vLLM runner, `vllm`,
`vllm-ngram` and `vllm-ngram-gpu` vLLM's own LLM class, `generate` transformers' generate() in padded batches.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import ragspec
from ragspec.inputs.record import parse_record
from ragspec.models.resolve import resolve
from ragspec.run.request_builder import RequestBuilder
from ragspec.run.session import prepare

WAYS = (
    "none", "context", "exact-none", "exact-context",
    "vllm", "vllm-ngram", "vllm-ngram-gpu", "vllm-none", "vllm-context", "generate",
)  # fmt: skip
NGRAM = {"num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
CONTEXT = 4096  # tokens, of vLLM's engines
SHARE = 0.85  # of the GPU's memory, of vLLM's engines

Answer = Callable[[Sequence[int], int], dict[str, Any]]  # numbers of the records, at once -> tokens, drafted, ...


def config_of(args: argparse.Namespace, method: str, runner: str, runner_args: dict[str, Any]) -> Any:
    """Return the configuration of a run."""
    return ragspec.load_config(
        {
            "model": args.model,
            "runner": runner,
            "prompt": {"source": "query"},
            "sampling": {"max_new_tokens": args.tokens, "temperature": 0.0},
            "speculation": {"method": method},
            "runner_args": runner_args,
        }
    )


def read(path: str, most: int) -> list[dict[str, Any]]:
    """Return a file's first records."""
    with open(path, encoding="utf-8") as lines:
        records = [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]
    return [{key: record[key] for key in ("id", "query", "contexts")} for record in records]


def prompts_of(args: argparse.Namespace, records: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of ragspec's prompts."""
    session = prepare(config_of(args, "none", "huggingface", {}))
    builder = RequestBuilder(session)
    parsed = [parse_record(record, number, "query") for number, record in enumerate(records)]
    return [list(builder.in_flight(number, each, "").prompts[0].token_ids) for number, each in enumerate(parsed)]


# -- ways ------------------------------------------------------------------------------------------


def ragspec_way(
    args: argparse.Namespace, way: str, at_once: int
) -> tuple[ragspec.Pipeline, Callable[[Sequence[dict[str, Any]]], Any]]:
    """Return ragspec with its model loaded, and what answers records with it."""
    exact, method, runner = way.startswith("exact-"), way.split("-")[-1], "huggingface"
    runner_args: dict[str, Any] = {"batch_size": at_once, "dtype": args.dtype, "compile": args.compile, "exact": exact}
    if way.startswith("vllm-"):
        share = {"max_model_len": CONTEXT, "gpu_memory_utilization": SHARE}
        runner, runner_args = "vllm", {"batch_size": at_once, "dtype": args.dtype, **share}
    pipeline = ragspec.Pipeline(config_of(args, method, runner, runner_args)).__enter__()

    def answer(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found = {"tokens": 0, "drafted": 0, "accepted": 0, "row_steps": 0}
        for line in pipeline.answers(records):
            if "error" in line:
                raise RuntimeError(line["error"])
            found["tokens"] += line["output_tokens"]
            spoken = line.get("speculation") or {}
            found["drafted"] += spoken.get("drafted", 0)
            found["accepted"] += spoken.get("accepted", 0)
            found["row_steps"] += spoken.get("steps", 0)
        return found | {"notes": pipeline.summary.notes}

    return pipeline, answer


def vllm_way(args: argparse.Namespace, way: str) -> tuple[Any, Callable[[Sequence[list[int]]], dict[str, Any]]]:
    """Return vLLM's engine, and what answers prompts with it."""
    from vllm import LLM, SamplingParams

    speculation = {}
    if way != "vllm":
        speculation = {"speculative_config": {"method": way.removeprefix("vllm-").replace("-", "_"), **NGRAM}}
    llm = LLM(args.model, dtype=args.dtype, max_model_len=CONTEXT, gpu_memory_utilization=SHARE, **speculation)
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens)

    def answer(prompts: Sequence[list[int]]) -> dict[str, Any]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    return llm, answer


def generate_way(args: argparse.Namespace) -> Callable[[Sequence[list[int]]], dict[str, Any]]:
    """Return what answers prompts with transformers' generate()."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype), device_map="cuda").eval()
    own = model.generation_config.eos_token_id
    ends = set(own if isinstance(own, list) else [own])

    def answer(prompts: Sequence[list[int]]) -> dict[str, Any]:
        batch = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to("cuda")
        output = model.generate(
            **batch, max_new_tokens=args.tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        tokens = 0
        for row in output[:, batch["input_ids"].shape[1] :].tolist():
            end = next((at for at, token in enumerate(row, 1) if token in ends), len(row))
            tokens += end
        return {"tokens": tokens}

    return answer


# -- measuring -------------------------------------------------------------------------------------


def passes(args: argparse.Namespace, way: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of each pass of a way."""
    sets = {Path(path).stem: read(path, args.records) for path in args.input}
    ours = way.split("-")[-1] in ("none", "context")
    started = time.perf_counter()
    llm, whole = (None, None) if ours else (None, generate_way(args)) if way == "generate" else vllm_way(args, way)
    for at_once in args.at_once:
        pipeline, answer = ragspec_way(args, way, at_once) if ours else (None, whole)
        loaded = time.perf_counter() - started
        for name, records in sets.items():
            asked = records if ours else prompts_of(args, records)
            asked = asked[: max(at_once, min(len(asked), args.fewest * at_once))]
            for number in range(args.passes + 1):
                if llm is not None:
                    llm.reset_prefix_cache()
                started = time.perf_counter()
                found: dict[str, Any] = {}
                # ragspec is given all of them, and keeps `at_once` under way; so does vLLM, by its limit, but in groups
                groups = [asked] if ours else [asked[at : at + at_once] for at in range(0, len(asked), at_once)]
                for group in groups:
                    for key, value in answer(group).items():
                        found[key] = found[key] + value if key in found else value
                seconds = time.perf_counter() - started
                figures = {"way": way, "set": name, "at_once": at_once, "records": len(asked), "pass": number}
                yield figures | {"seconds": seconds, "loaded_s": loaded, "rate": found["tokens"] / seconds, **found}
        started = time.perf_counter()
        if pipeline is not None:
            pipeline.__exit__(None, None, None)
            del pipeline, answer
            gc.collect()
            torch.cuda.empty_cache()


def table(found: Sequence[dict[str, Any]], ways: Sequence[str]) -> str:
    """Return the medians of the timed passes as a table."""
    timed = [each for each in found if each["pass"]]
    lines = ["| set, at once | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for key in dict.fromkeys((each["set"], each["at_once"]) for each in found):
        cells = []
        for way in ways:
            rates = [each["rate"] for each in timed if (each["way"], each["set"], each["at_once"]) == (way, *key)]
            cells.append(f"{statistics.median(rates):,.0f}" if rates else "-")
        lines.append(f"| {key[0]} {key[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure the ways that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("input", nargs="+", help="records with query and contexts")
    parser.add_argument("--ways", nargs="+", default=["none", "context", "vllm", "vllm-ngram"], choices=WAYS)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--records", type=int, default=150, help="most records of a set")
    parser.add_argument("--fewest", type=int, default=6, help="records by those at once, at most")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens of an answer")
    parser.add_argument("--passes", type=int, default=2, help="timed passes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", default="on", help="runner_args.compile of ragspec's engine")
    parser.add_argument("--patience", type=float, default=600, help="seconds that a way may take")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON lines")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = str(resolve(args.model).path)
    if args.worker:
        for figures in passes(args, args.worker):
            print("\n" + json.dumps(figures), flush=True)
        return
    found: list[dict[str, Any]] = []
    reasons: list[str] = []
    for way in args.ways:
        try:
            lines = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--worker", way],
                capture_output=True,
                text=True,
                timeout=args.patience,
            )
            printed, failed = lines.stdout, lines.stderr.strip().splitlines()[-1:] if lines.returncode else []
        except subprocess.TimeoutExpired as error:
            printed, failed = error.stdout or "", [f"took more than {args.patience:.0f} s"]
            printed = printed.decode() if isinstance(printed, bytes) else printed
        mine = [json.loads(line) for line in printed.splitlines() if line.startswith('{"way"')]
        for each in mine:
            print({key: value for key, value in each.items() if key != "notes"}, flush=True)
        found += mine
        reasons += [f"{way}: {reason}" for reason in failed]
    print(table(found, args.ways), *reasons, sep="\n")
    if args.output:
        args.output.write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")


if __name__ == "__main__":
    main()
