"""Tokenizers of five families, trained on a few texts, and small models that learn a text by heart."""

from tests.conftest import train_tokenizer

END = "<|end|>"


def _fast(inner, **special):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END, **special)


def _byte_bpe(texts, size):
    return train_tokenizer(size, texts)


def _unigram(texts, size):
    """T5, XLNet, Gemma 1: spaces are part of the words behind them, one is put in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return _fast(inner, unk_token="<unk>")


def _byte_fallback(texts, size):
    """Llama 2, Mistral: pairs over words with metaspace; what it does not know is written byte by byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

    learnt = Tokenizer(models.BPE())
    learnt.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>"], show_progress=False)
    words = [word for text in texts for word in text.replace(" ", " ▁").split(" ")]
    learnt.train_from_iterator(words, trainer)
    import json

    state = json.loads(learnt.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(merge) for merge in state["model"]["merges"]]
    inner = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = learnt.normalizer
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken(END, special=True)])
    return _fast(inner, unk_token="<unk>", bos_token="<s>")


def _word_piece(texts, size):
    """BERT: lower case, no accents, spaces guessed when it is decoded."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]", END], show_progress=False)
    inner.train_from_iterator(texts, trainer)
    return _fast(inner, unk_token="[UNK]")


def _bytes(texts, size):
    """ByT5: a token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(END, special=True)])
    return _fast(inner)


FAMILIES = {
    "byte_bpe": _byte_bpe,
    "unigram": _unigram,
    "byte_fallback": _byte_fallback,
    "word_piece": _word_piece,
    "bytes": _bytes,
}
LOSSY = ("word_piece", "unigram")  # cannot write all that they read


def tokenizer_of(family, texts, size=330):
    return FAMILIES[family](texts, size)


def learn_by_heart(model, tokenizer, texts, steps=120):
    """Train a small model until it goes on with each of `texts` wherever it begins; return the last loss."""
    import torch

    torch.manual_seed(0)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (length - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return float(loss.detach())
