"""One small tokenizer of each kind that models come with, trained on a few pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.worker.tiny_model import CORPUS

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and similar models divide a text into words."""
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]")
VOCABULARY = 2000


def texts() -> list[str]:
    return [CORPUS.read_text(encoding="utf-8")]


def added() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL]


def byte_level(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, special_tokens=added(), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


@cache
def _gpt_2_json() -> str:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str()


def gpt_2() -> Tokenizer:
    return Tokenizer.from_str(_gpt_2_json())


def roberta() -> Tokenizer:
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return tokenizer


def llama_3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer = byte_level(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    )
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def _sentencepiece_json() -> str:
    """Trained on words but used on whole texts, as tokenizers converted from SentencePiece's BPE are."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    singles = [AddedToken(f"<0x{byte:02X}>", special=False, normalized=False) for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, special_tokens=[*added(), *singles], initial_alphabet=["\u2581"]
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer.to_str()


def llama_2() -> Tokenizer:
    tokenizer = Tokenizer.from_str(_sentencepiece_json())
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def mistral() -> Tokenizer:
    tokenizer = Tokenizer.from_str(_sentencepiece_json())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=800, show_progress=False, special_tokens=added(), unk_token="<unk>")
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, show_progress=False, special_tokens=added())
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def odd_tokens() -> Tokenizer:
    """With every kind of added token that changes how the text beside it is tokenized."""
    tokenizer = gpt_2()
    tokenizer.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<word>", single_word=True, normalized=False),
            AddedToken("<normal>", normalized=True),
            AddedToken("<|im_start|><|im", normalized=False),
            AddedToken("x</s", normalized=False),
            AddedToken("  ", normalized=False),
        ]
    )
    return tokenizer


def joining() -> Tokenizer:
    """A vocabulary with words that have a space in them."""
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.add_tokens([AddedToken("and then", normalized=False), AddedToken("right", rstrip=True, normalized=False)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made for made in (gpt_2, roberta, llama_3, llama_2, mistral, unigram, wordpiece, odd_tokens, joining)
}


@cache
def kind(name: str) -> str:
    """The tokenizer.json of a kind."""
    return KINDS[name]().to_str()
