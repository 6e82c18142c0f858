"""Loads or trains a tokenizer, and identifies it by a fingerprint."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field
from pydantic.dataclasses import dataclass

from fourfold.untrusted_input import Natural

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"


@dataclass(frozen=True)
class TokenizerInfo:
    """The properties of a tokenizer that prepared tokens depend on."""

    fingerprint: str
    vocab_size: Annotated[Natural, Field(lt=1 << 32)]
    eos_id: Annotated[Natural, Field(lt=1 << 32)]


def load_tokenizer(name: str | Path) -> Any:
    """Load a Hugging Face tokenizer from a folder or a hub id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer {name} has no {FILE} (it is written in Python); save a fast one with save_pretrained and use that"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name} has no eos_token, which ends each document; set tokenizer.eos_token and save it again"
        )
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer of ``vocab_size`` tokens; it can encode any text.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 9, vocab_size=270)
        >>> tokenizer.decode(tokenizer("to bee").input_ids)
        'to bee'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 1
    if vocab_size < least:
        raise ValueError(
            f"a vocabulary of {vocab_size} cannot hold {least}: the 256 bytes and {END_OF_TEXT}; use at least {least}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def save_tokenizer(tokenizer: Any, folder: Path) -> TokenizerInfo:
    """Save the tokenizer with its tokens; `AutoTokenizer.from_pretrained` loads the folder."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return tokenizer_info(tokenizer)


def tokenizer_info(tokenizer: Any) -> TokenizerInfo:
    content = plain_backend(tokenizer.backend_tokenizer.to_str()).to_str()
    return TokenizerInfo(
        xxhash.xxh3_128_hexdigest(content.encode()), len(tokenizer), int(tokenizer.eos_token_id)
    )


def plain_backend(content: str) -> Any:
    """The tokenizer of a `tokenizer.json`, without truncation and padding."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    return backend
