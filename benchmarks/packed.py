"""Are packed documents apart in every family, and equal to documents in rows of their own?

For each family of transformers with a tensor-parallel plan: does its attention go by the bounds of documents, by FlexAttention on GPUs, or
does it need a mask? Without a mask, logits and gradients of packed rows are compared with those of each document by itself. On this machine
FlexAttention is its formulas, without its kernel.

python -m benchmarks.packed
python -m benchmarks.packed --only llama gemma3
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from benchmarks.tiny_models import Family, families, find_family, tiny_model
from fourfold.hf import packed_attention
from fourfold.hf.packed_attention import FLEX, NAME, set_attention, use_packed_attention

LENGTHS = ((5, 1, 9, 3), (18,), (2, 16))  # of the documents in each row
WINDOW = 4
TOLERANCE = 1e-4  # of the largest entry


def check(family: Family) -> tuple[str, str]:
    """(the kind of attention, or "wrong", or "not tried"; why)."""
    model = windowed_model(family)
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(
        8, vocabulary, (len(LENGTHS), sum(LENGTHS[0])), generator=torch.Generator().manual_seed(3)
    )
    note = use_packed_attention(windowed_model(family).to("meta"), "auto", "cpu", "fp32")
    kind, name, why = "bounds", NAME, note.rpartition("(")[2].removesuffix(")")
    if "by the bounds" not in note:
        note = use_packed_attention(windowed_model(family).to("meta"), "auto", "cuda", "bf16")
        if "FlexAttention inside" not in note:
            return "mask", why
        kind, name = "flex", FLEX
    alone = _values(
        model, torch.cat([_alone(model, row, lengths) for row, lengths in zip(ids, LENGTHS, strict=True)])
    )
    set_attention(model, name)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    packed = _values(
        model, model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)
    )
    # Relative to the largest entry, or to a thousandth of the largest gradient: that of a key's bias is 0 but for rounding.
    floor = 1e-3 * max(float(b.abs().max()) for b in alone)
    error = max(
        float((a - b).abs().max()) / max(float(b.abs().max()), floor)
        for a, b in zip(packed, alone, strict=True)
    )
    return (kind if error <= TOLERANCE else "wrong"), f"{error:.1e}"


def windowed_model(family: Family) -> Any:
    model = tiny_model(family)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        # Not by getattr, which raises where the layers of a configuration have windows of their own.
        if getattr(config, "__dict__", {}).get("sliding_window"):
            config.sliding_window = WINDOW
        if isinstance(getattr(module, "sliding_window", None), int):
            module.sliding_window = WINDOW
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _alone(model: nn.Module, row: Tensor, lengths: tuple[int, ...]) -> Tensor:
    documents = row.split(list(lengths))
    return torch.cat([model(input_ids=d.unsqueeze(0), use_cache=False).logits[0] for d in documents])


def _values(model: nn.Module, logits: Tensor) -> list[Tensor]:
    """The logits, and the gradients of a function of them."""
    model.zero_grad()
    logits.float().square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of families (default: all)")
    options = parser.parse_args(arguments)
    # Its formulas have gradients on CPUs, unlike its kernel there.
    flex._validate_device = lambda *_: None
    packed_attention.SMALLEST_HEAD = 1  # of the kernel, and these models are smaller
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for family in [find_family(name) for name in options.only] if options.only else families():
        try:
            kind, why = check(family)
        except Exception as error:  # what a tiny model of a family cannot do
            kind, why = "not tried", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        counts[kind] += 1
        print(f"{family.name:32} {kind:9} {why}", flush=True)
    print(
        f"packed: {counts['bounds']} families by the bounds of documents and {counts['flex']} by FlexAttention on GPUs, equal to documents one "
        f"by one; {counts['mask']} with a mask; {counts['wrong']} wrong; {counts['not tried']} not tried"
    )
    # Of all families some attend by bounds; else the check found none.
    return int(counts["wrong"] > 0 or not (options.only or counts["bounds"]))


if __name__ == "__main__":
    sys.exit(main())
