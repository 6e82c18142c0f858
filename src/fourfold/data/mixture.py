"""Mixes several sources into one stream of samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.data.manifest import Split
from fourfold.data.order import Order
from fourfold.data.samples import Sample, Samples

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mixture:
    """The samples of a run by their global index.

    ``identity`` is what the stream depends on: save it with a checkpoint, and compare with `check_identity`.
    """

    sources: tuple[Samples, ...]
    order: Order
    identity: dict[str, Any]

    def samples(self, first: int, stop: int) -> list[Sample]:
        """The samples with global indices [first, stop)."""
        sources, samples = self.order.at(np.arange(first, stop))
        return [self.sources[s][i] for s, i in zip(sources.tolist(), samples.tolist(), strict=True)]

    def __len__(self) -> int:
        """The number of samples of all sources, each counted once."""
        return sum(self.order.sizes)


def open_mixture(
    folders: Sequence[tuple[str | Path, float]], *, length: int, seed: int, split: Split = "train"
) -> Mixture:
    """Open prepared datasets with their weights as one stream of samples of ``length`` tokens.

    Example:
        >>> mixture = open_mixture([("web", 0.7), ("books", 0.3)], length=1024, seed=0)  # doctest: +SKIP
    """
    opened = [(Samples(folder, split, length), weight) for folder, weight in folders]
    for other, _ in opened:
        first = opened[0][0]
        if first.manifest.tokenizer != other.manifest.tokenizer:
            raise ValueError(
                f"{first.folder} was prepared with tokenizer {first.manifest.tokenizer.fingerprint} of "
                f"{first.manifest.tokenizer.vocab_size} tokens, {other.folder} with "
                f"{other.manifest.tokenizer.fingerprint} of {other.manifest.tokenizer.vocab_size}; prepare both with "
                f"--tokenizer {first.folder}/tokenizer"
            )
        # A small source may have no validation text; one without training text is a mistake.
        if split == "train" and not len(other):
            raise ValueError(_nothing_in(other, split))
        if other.too_long:
            logger.warning(
                "%s: %d of %d chats are longer than %d tokens and left out; use a larger data.sequence_length to learn them",
                *(other.folder, other.too_long, other.manifest.documents(split), length),
            )
    opened = [(samples, weight) for samples, weight in opened if len(samples)]
    if not opened:
        raise ValueError(
            f"no source has {length} tokens of {split} text, which one sample takes; prepare with a larger "
            "--validation and --overwrite, use a shorter data.sequence_length, or train without evaluation (evaluation.sequences=0)"
        )
    order = Order(seed, tuple(len(samples) for samples, _ in opened), tuple(weight for _, weight in opened))
    identity = {
        "seed": seed,
        "sequence_length": length,
        "weights": list(order.weights),
        "sources": [samples.manifest.fingerprint for samples, _ in opened],
    }
    return Mixture(tuple(samples for samples, _ in opened), order, identity)


def _nothing_in(samples: Samples, split: Split) -> str:
    if samples.manifest.has_chats:
        return (
            f"{samples.folder}: all {samples.too_long} chats are longer than a sample of {samples.length} tokens; use a larger "
            "data.sequence_length"
        )
    tokens = samples.manifest.tokens(split)
    return (
        f"{samples.folder} has {tokens} tokens, less than one sample of {samples.length}; use a sequence_length of at most "
        f"{tokens}, or more text"
    )


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise an error if the stream of samples differs from the one that a checkpoint was trained on."""
    for name in saved | now:
        if saved.get(name) != now.get(name):
            raise ValueError(
                f"the checkpoint was trained on data with {name}={saved.get(name)}, this run has {name}="
                f"{now.get(name)}: samples would be repeated or skipped; use the old value, or start a new run from "
                "the weights"
            )
