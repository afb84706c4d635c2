"""`runner: vllm` without drafts beside vLLM's own LLM class: the same prompts, engines of equal settings, in turn.

    python benchmarks/vllm_none.py tiny --at-once 8 64 256 --pairs 5

Both engines are loaded at once and answer the same token ids, each first in every other pair. Prints one JSON line for
each number at once: tokens/s of both, and the ratio of each pair. `tiny` is a random Llama of two layers, whose steps
cost little beside what drives them. --own-process gives ours a process of its own, as on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.models.resolve import resolve
from ragspec.records import Generation, Request
from ragspec.runners.vllm.config import prepare
from ragspec.runners.vllm.runner import Runner

LENGTH = 1024  # tokens of a record, at most


def save_tiny(folder: Path) -> str:
    """Write a random Llama of two layers with the demo model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(resolve("demo").path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def ours(args: argparse.Namespace, model: str, at_once: int) -> tuple[Runner, Callable[[list[list[int]]], int]]:
    """Return ragspec's runner, entered, and what answers prompts with it."""
    engine = {"enforce_eager": True, "max_model_len": LENGTH, "batch_size": at_once}
    if args.own_process:
        engine["own_process"] = True
    sampling = {"max_new_tokens": args.tokens, "ignore_eos": True}
    config = build_config({"model": model, "runner": "vllm", "runner_args": engine, "sampling": sampling})
    runner, settings = Runner(config), to_sampling(config.sampling)
    runner.check()
    runner.__enter__()

    def answer(prompts: list[list[int]]) -> int:
        requests = [Request(i, str(i), ids, settings) for i, ids in enumerate(prompts)]
        done = list(runner.generate(requests))
        assert all(isinstance(each, Generation) for each in done), done
        return sum(len(each.token_ids) for each in done if isinstance(each, Generation))

    return runner, answer


def theirs(args: argparse.Namespace, runner: Runner, at_once: int) -> tuple[Any, Callable[[list[list[int]]], int]]:
    """Return vLLM's LLM with the arguments that ours has, and what answers prompts with it."""
    from vllm import LLM, SamplingParams

    chosen = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = args.theirs
    same = {key: value for key, value in runner.engine_args.items() if key not in ("disable_log_stats",)}
    llm = LLM(**same)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = chosen or "0"
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)

    def answer(prompts: list[list[int]]) -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return llm, answer


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has started, which other work changes less."""
    parents, spent = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], spent[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    here = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in here} - here:
        here |= more
    return sum(spent[pid] for pid in here) / os.sysconf("SC_CLK_TCK")


def timed(answer: Callable[[list[list[int]]], int], prompts: list[list[int]]) -> tuple[float, float]:
    """Return tokens/s, and per second of CPU time."""
    started, cpu = time.perf_counter(), cpu_seconds()
    tokens = answer(prompts)
    return tokens / (time.perf_counter() - started), tokens / max(0.01, cpu_seconds() - cpu)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", help="tiny, or a model's name")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rounds", type=int, default=1, help="records for each that is answered at once")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--own-process", action="store_true")
    parser.add_argument("--theirs", default="1", help="0: the LLM class with its engine in this process")
    args = parser.parse_args()
    if len(args.at_once) > 1:  # a process each, as an engine leaves groups of vLLM's behind
        for at_once in args.at_once:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--at-once", str(at_once)], check=True)
        return
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(Path(folder)) if args.model == "tiny" else resolve(args.model).path
        print(json.dumps(compare(args, model, *args.at_once)), flush=True)


def compare(args: argparse.Namespace, model: str, at_once: int) -> dict[str, Any]:
    """Return the speeds of both with so many records at once."""
    draw = random.Random(at_once)
    count = at_once * args.rounds
    prompts = [[draw.randrange(1000, 40000) for _ in range(args.prompt)] for _ in range(count)]
    begun = time.perf_counter()
    runner, our_answer = ours(args, model, at_once)
    ours_s = time.perf_counter() - begun
    llm, their_answer = theirs(args, runner, at_once)
    theirs_s = time.perf_counter() - begun - ours_s
    our_answer(prompts), their_answer(prompts)
    speeds: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for pair in range(args.pairs):
        both = [("ours", our_answer), ("theirs", their_answer)]
        for name, answer in both if pair % 2 else both[::-1]:
            speeds[name].append(timed(answer, prompts))
    both_speeds = list(zip(speeds["ours"], speeds["theirs"], strict=True))
    ratios = [mine[0] / other[0] for mine, other in both_speeds]
    runner.__exit__(None, None, None)
    del llm
    return {
        "model": args.model,
        "at_once": at_once,
        "ours": round(statistics.median(speed for speed, _ in speeds["ours"]), 1),
        "theirs": round(statistics.median(speed for speed, _ in speeds["theirs"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_cpu": round(statistics.median(mine[1] / other[1] for mine, other in both_speeds), 3),
        "ratios": [round(each, 3) for each in ratios],
        "load_s": [round(ours_s, 1), round(theirs_s, 1)],
    }


if __name__ == "__main__":
    main()
