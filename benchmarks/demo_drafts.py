"""Makes the demo model two drafts from the answers that it gave to some records: one of its own tokens, one of others.

    ragspec train-draft --config benchmarks/rag.yaml --input RECORDS.jsonl --output DIR   # of its own tokens: DIR/draft
    python benchmarks/demo_drafts.py DIR [--words 2048] [--epochs 6]                      # of others: DIR/other

The second is a small Llama with a tokenizer of its own, both learnt from the answers and prompts in DIR/answers.jsonl:
a draft as one finds it on a hub, whose tokens have nothing to do with the target's (`speculation: {method: draft_model,
draft_model: DIR/other, draft_tokenizer: DIR/other}`). Always the same for one input.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragspec.benchmark.passes import read_answers
from ragspec.models.resolve import resolve
from ragspec.models.tokenizer import load_tokenizer
from ragspec.training.examples import Example, split_examples
from ragspec.training.student import Student, distill

END = "<|end|>"
PIECE = 320  # tokens of a lesson


def tokenizer_of(texts: list[str], words: int) -> Any:
    """Return a byte-level BPE tokenizer of `words` tokens, learnt from `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)


def small_llama(words: int) -> Any:
    """Return a Llama of three million weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=0,
        )
    )


def lessons_of(tokenizer: Any, texts: list[str]) -> list[Example]:
    """Return the texts in pieces, all of each to be learnt."""
    lessons = []
    for number, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        for at in range(0, len(ids), PIECE):
            if len(ids[at : at + PIECE]) > 1:
                lessons.append(Example(f"{number}-{at}", ids[at : at + PIECE], 1))
    return lessons


def main() -> None:
    """Make the draft of other tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="what --output of train-draft was")
    parser.add_argument("--words", type=int, default=2048, help="tokens of the draft's tokenizer")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    target = load_tokenizer(resolve("demo"))
    answers = read_answers(args.folder / "answers.jsonl").answered.values()
    lessons = split_examples([Example(each.id, each.prompt_token_ids + each.token_ids, 1) for each in answers])
    texts = [target.decode(each.token_ids, skip_special_tokens=True) for each in lessons.taught]
    held_out = [target.decode(each.token_ids, skip_special_tokens=True) for each in lessons.held_out]
    tokenizer = tokenizer_of(texts, args.words)
    draft, out = Student(small_llama(args.words), tokenizer), args.folder / "other"
    out.mkdir(exist_ok=True)
    distill(draft, lessons_of(tokenizer, texts), args.epochs, out, _say)
    draft.save(out)
    print(f"held-out tokens guessed: {draft.agreement(lessons_of(tokenizer, held_out)):.1%}; the draft is in {out}")


def _say(done: int, steps: int, loss: float) -> None:
    if done % 25 == 0 or done == steps:
        print(f"step {done} of {steps}, loss {loss:.2f}", flush=True)


if __name__ == "__main__":
    main()
