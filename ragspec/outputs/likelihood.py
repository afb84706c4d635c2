"""How likely the tokens of an answer were, as OpenAI's API tells it.

Source: OpenAI's API reference; vLLM 0.32 has the same forms. Logarithms are natural, of the model's own distribution.
"""

from __future__ import annotations

from typing import Any

from ragspec.records import Generation, Tokenizer

LEAST = -9999.0  # a token that was impossible; JSON has no infinity


def told(answer: Generation, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the `content` of a chat completion's logprobs: one object per token."""
    tokens = zip(answer.token_ids, answer.logprobs, strict=True)
    return [
        _token(token, found.logprob, tokenizer)
        | {"top_logprobs": [_token(other, logprob, tokenizer) for other, logprob in found.likeliest]}
        for token, found in tokens
    ]


def told_of_completion(answer: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the logprobs of a text completion: lists, one item per token."""
    pieces = [tokenizer.piece(token) for token in answer.token_ids]
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return {
        "text_offset": ends[:-1],
        "token_logprobs": [_finite(found.logprob) for found in answer.logprobs],
        "tokens": pieces,
        "top_logprobs": [
            {tokenizer.piece(other): _finite(logprob) for other, logprob in found.likeliest}
            for found in answer.logprobs
        ],
    }


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    return {"token": piece, "logprob": _finite(logprob), "bytes": list(piece.encode(errors="replace"))}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
