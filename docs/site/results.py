"""The pages that are made from benchmarks/results: what is checked, and which models are tested. write.py writes them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.record import FOLDER, file_of

GENERATED = "<!-- Written by docs/site/write.py from benchmarks/results. -->"


@dataclass(frozen=True)
class Check:
    """A claim, the benchmark that checks it, and the threshold that the benchmark applies."""

    claim: str
    benchmark: str
    threshold: str
    tier: str = "by hand"
    # How the line of the output that has the result begins; by default it is the last one.
    result: str = ""
    exit_code: int = 0
    # The page that has its results, if its output is not in benchmarks/results.
    page: str = ""


PARITY = "all grids; loss 1e-5, gradients and weights 1e-4"


def _parity(ranks: int, claim: str) -> Iterator[Check]:
    """A claim with both kinds of weights and of activations."""
    both = f"parity --ranks {ranks} --weights"
    yield Check(claim, f"{both} streamed", PARITY)
    yield Check("with FSDP2", f"{both} fsdp2", PARITY)
    yield Check("with replicated activations", f"{both} streamed --activations replicated", PARITY)
    yield Check("with both", f"{both} fsdp2 --activations replicated", PARITY)
    selective, sharded = "--activation-checkpointing selective", "--accumulation sharded"
    yield Check("with selective recomputation", f"parity --ranks {ranks} {selective}", PARITY)
    yield Check(
        "with gradients of two micro-batches accumulated in shards",
        f"parity --ranks {ranks} {sharded}",
        PARITY,
    )
    yield Check(
        "with both, FSDP2 and compiled blocks", f"{both} fsdp2 --compile {selective} {sharded}", PARITY
    )


CHECKS = {
    "Exactness": (
        *_parity(
            8,
            "every grid of 8 ranks gives the loss, gradients and weights of one process, for five kinds of model",
        ),
        Check("the same on some grids", "parity --ranks 8 --quick", PARITY, "nightly"),
        *_parity(16, "five grids of 16 ranks"),
        Check("the check can fail", "parity --ranks 8 --quick --break norm", "exit code 1", exit_code=1),
        Check(
            "every model family is exact, or rejected by name",
            "families",
            "127 exact, 122 of them with sequence-parallel activations, 0 failed",
            "nightly",
            "families:",
        ),
        Check(
            "the same with compiled blocks, one graph for each kind, selective recomputation and gradients in shards, on (1, 2, 2, 2)",
            "families --compile",
            "as many exact, 0 failed",
            result="families:",
        ),
        Check(
            "experts sharded or owned over z, x or both, with odd routing, in 50 steps, across restarts from one to another, with auxiliary loss and correction bias; bytes by axis and purpose; 14 planted faults are found",
            "experts",
            "losses 1e-5, gradients 1e-4, biases and bytes equal",
            "nightly",
            "experts:",
        ),
        Check(
            "packed documents attend by their bounds, or on GPUs by FlexAttention, in every family whose attention allows it, equal to documents one by one",
            "packed",
            "none wrong; logits and gradients 1e-4",
            "nightly",
        ),
        Check(
            "ranks that share sequences: every family whose attention uses transformers' interface, and packed documents on up to 8 ranks a sequence, equal to documents one by one; bytes of keys and values",
            "long",
            "60 families; loss 1e-5, gradients 1e-4; bytes equal",
            "nightly",
            "long:",
        ),
        Check(
            "safetensors to a grid, through training, and back",
            "export",
            "weights bit-equal, logits 1e-5",
            "nightly",
        ),
        Check(
            "`Trainer`, TRL's `SFTTrainer` and `DPOTrainer`, Lightning's trainer and Fabric, with evaluation, chats, packing and resuming on another grid, as in one process",
            "trainers",
            "losses, gradient norms and weights 1e-5",
            "nightly",
            "trainers:",
        ),
        Check(
            "a checkpoint of each of 12 grids loads on each of them",
            "reshard",
            "weights and optimizer bit-equal",
            "nightly",
        ),
    ),
    "Communication and memory": (
        Check("each rank sends exactly the bytes of the formulas", "traffic", "equal", "nightly"),
        Check("loading holds no more than a rank's own part", "memory", "the formula", "nightly"),
        Check(
            "a vocabulary of 128,256: memory of a step, by chunks of tokens / with all logits; dry runs of 8B at 8,192 and "
            "131,072 tokens a rank ([why three are missed](performance.md#memory-of-a-wide-vocabulary))",
            "memory --loss",
            "0.5; 17 GiB; 12 GiB",
        ),
        Check(
            "a dry run has the collectives and the memory of a real step, also at 16,384 and 131,072 ranks",
            "dryrun",
            "collectives equal, memory 3 %, 60 s, 4 GB",
        ),
        Check(
            "memory, FLOPs and bytes of sequence-parallel activations are those of the formulas",
            "tokens",
            "equal; a step is shorter",
            page="[Performance](performance.md#sequence-parallel-activations)",
        ),
    ),
    "Speed": (
        Check(
            "host time of one block: (1,1,1,1) / stock; z = 2 / FSDP2; z = 2, x = 2 / FSDP2 with TP; y = 2 / without; compiled / not, on two grids; "
            "a step of AdamW on shards / on plain tensors ([why three are missed](performance.md#host-time-of-compiled-blocks))",
            "host",
            "1.05; 1.05; 0.8; 1.25; 0.65 twice; 1.2",
        ),
        Check(
            "compiled blocks: one graph, no breaks, gradients of the blocks as they are, and the ratio of steps",
            "compile",
            "1 graph, 0 breaks, 0 later graphs, 1e-5",
        ),
        Check(
            "a step compared with PyTorch on the same layout, in slow motion: x; FSDP2; streamed weights in a node; between nodes; data "
            "([why two are missed](performance.md#the-engine-against-pytorchs-own-parts))",
            "engine",
            "0.95; 1.02; 1.02; 0.90; 1.02",
            result="engine:",
        ),
        Check(
            "how much communication hides, in slow motion: with everything overlapped, in multiples of the floor "
            "([why x and y are missed](performance.md#what-hides))",
            "overlap",
            "x and y 1.10, z 1.08, data 1.05",
            result="overlap:",
        ),
        Check(
            "steps in slow motion repeat, and what does not overlap adds up",
            "slow_motion.repeat",
            "range 2 %, sum 3 %",
            result="nothing overlapped",
        ),
        Check(
            "the best 4D layout and the best of stock PyTorch, in slow motion, on three clusters, with a large batch and a small one "
            "([why it is missed](performance.md#the-best-4d-layout-and-the-best-of-stock-pytorch))",
            "headline",
            "1.26 times as fast",
            result="headline:",
        ),
    ),
    "Planner": (
        Check(
            "predictions compared with published runs of other software",
            "published",
            "median error 10 %, and four others",
            "nightly",
            "published: held-out median",
        ),
        Check(
            "the first choice compared with every layout of 8 devices, in slow motion, of two models on two clusters "
            "([all figures](planner-accuracy.md#regret-is-the-first-choice-the-best-one))",
            "regret",
            "first choice within 3 % of the fastest; the fastest in the first 3; Spearman 0.95; median error 5 %",
            result="regret:",
        ),
        Check("layouts per second, and six known cases", "search", "5,000 layouts per second"),
        Check(
            "a step of the layout that is chosen for each of them, by its dry run",
            "search --dry-run",
            "all run and fit",
        ),
    ),
    "Runs": (
        Check(
            "a model that is pretrained here learns the answers of chats, with all weights and with adapters (LoRA), on two grids as with stock PyTorch and PEFT",
            "fine_tuning",
            "losses 1e-5 in the first 20 steps, then 1 %; exact answers: at most 5 % before, at least 90 % after, and equal",
            "nightly",
        ),
        Check(
            "every path of the README, from an empty environment",
            "first_hour",
            "5 of 5; the quick start in 240 s",
            "nightly",
            "first hour:",
        ),
        Check(
            "answers of the planner",
            "plan_latency",
            "10 s; 60 s with --simulate 5",
            "nightly",
            "plan latency:",
        ),
        Check(
            "no saved step is lost, no wrong byte loaded, no hang silent ([Fault tolerance](../reliability.md))",
            "faults",
            "one for each row",
        ),
    ),
}

INDEX = """# What is checked

Each claim has a command that checks it against a threshold, and exits with a non-zero code if it is missed. Run the commands from a
checkout after `make setup`. `nightly` ones are part of `.ci/nightly`. Results are of two CPU cores with Gloo, in fp32 ([bf16](../concepts/exactness.md#bf16)); their output is
in `benchmarks/results/`. `python -m benchmarks.record NAME` records a new one.
"""


def index_page() -> str:
    lines = [GENERATED, INDEX]
    for heading, checks in CHECKS.items():
        lines += [
            f"## {heading}",
            "",
            "| claim | command | when | threshold | last result |",
            "|---|---|---|---|---|",
        ]
        for check in checks:
            cells = (check.claim, f"`python -m benchmarks.{check.benchmark}`", check.tier, check.threshold)
            lines.append(f"| {' | '.join(cells)} | {_result(check)} |")
        lines.append("")
    lines += [
        "## More",
        "",
        "- [Performance](performance.md): what was measured, and why thresholds were missed.",
        "- [Planner accuracy](planner-accuracy.md): predictions, published runs and measured steps.",
        "- [Models](../reference/models.md): every family.",
    ]
    return "\n".join(lines) + "\n"


def _result(check: Check) -> str:
    path = FOLDER / file_of(shlex.split(check.benchmark))
    if not path.exists():
        return f"thresholds missed: {check.page}" if check.page else "not recorded"
    record = json.loads(path.read_text())
    lines = [line for line in record["output"] if line.strip() and line.startswith(check.result)]
    outcome = "" if record["exit_code"] == check.exit_code else f"**exit code {record['exit_code']}**: "
    said = lines[-1].strip().replace("|", "\\|") if lines else "no output"
    return f"{outcome}{said} ({record['date']}, {record['commit']})"


# -- models -----------------------------------------------------------------------------------------------------------

MODELS = """# Models

Fourfold trains Hugging Face models whose configuration has a tensor-parallel plan, and those in a table of its own. This page has
every such family of transformers {transformers}. For each, `python -m benchmarks.families` trains a tiny random model on the grids
(1, 2, 2, 2) and (1, 1, 2, 4) (data, z, y, x), and compares the loss and every gradient with the stock model in one process.

**{tested} of {all} families are exact on x, y and z. None is inexact.** The others are rejected on grids with x > 1 or y > 1, by
the name of the module that is in the way. On grids with x = y = 1 (FSDP and data parallelism) they are exact as well, except where the
last table says otherwise.

Weights are read from files as transformers writes them, and exported as such files, for every family: experts one by one, projections fused or
permuted, other names. The rules are those of the installed transformers; each rank reads its part of each tensor.
"""


def models_page() -> str:
    record = json.loads((FOLDER / "families.json").read_text())
    listed = [row for line in record["output"] if (row := _row(line))]
    rows = [row for row in listed if row["outcome"] != "missing"]
    if record["exit_code"] or any(row["outcome"] == "failed" for row in rows):
        raise ValueError(
            "the recorded run of benchmarks.families failed, and the page would say that it did not"
        )
    tested = [row for row in rows if row["outcome"] == "verified"]
    rejected = [row for row in rows if row["outcome"] == "refused"]
    names = {row["family"].partition(":")[0] for row in rows}
    fully = names - {row["family"].partition(":")[0] for row in rejected}
    lines = [
        GENERATED,
        MODELS.format(tested=len(fully), all=len(names), **record["versions"]),
        "## On x, y and z",
        "",
        "The error is the largest of any gradient, relative to that gradient's largest entry.",
        "",
        "| family | replicated activations | sequence-parallel activations |",
        "|---|---|---|",
    ]
    notes: list[str] = []
    for row in tested:
        by_tokens = row["by_tokens"]
        if by_tokens.startswith("refused: "):
            notes.append(f"- `{row['family']}`: {_code(by_tokens.removeprefix('refused: '))}")
            by_tokens = "rejected, see below"
        lines.append(f"| {row['family']} | {row['detail']} | {by_tokens.removeprefix('verified ')} |")
    lines += ["", "Families that need `activations='replicated'`:", "", *notes, ""]
    experts = [
        row
        for row in rejected
        if "plan style 'moe_" in row["detail"] and row["detail"].endswith("[z and data: exact]")
    ]
    lines += [
        "## On z and data alone: mixture of experts",
        "",
        "Their expert layers are not sharded over x and y yet.",
        "",
        ", ".join(row["family"] for row in experts) + ".",
        "",
        "## On z and data alone: other reasons",
        "",
        "| family | on x, y and z | on z and data |",
        "|---|---|---|",
    ]
    for row in (row for row in rejected if row not in experts):
        said, _, alone = row["detail"].partition(" [z and data: ")
        alone = alone.removesuffix("]").replace("refused, ", "rejected: ")
        lines.append(f"| {row['family']} | {_code(said.partition('; ')[0])} | {_code(alone)} |")
    if missing := [row["family"] for row in listed if row["outcome"] == "missing"]:
        lines += ["", f"transformers lists these, and does not contain their code: {', '.join(missing)}."]
    lines += [
        "",
        f"Recorded on {record['date']} at {record['commit']}, with torch {record['versions']['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def _row(line: str) -> dict[str, str]:
    """A line of the output, such as "llama   verified 1.2e-06; by tokens verified 1.3e-06"."""
    found = re.match(r"(\S+)\s+(verified|refused|failed|missing)[: ]+(.*)", line)
    if not found:
        return {}
    detail, _, by_tokens = found[3].partition("; by tokens ")
    return {"family": found[1], "outcome": found[2], "detail": detail, "by_tokens": by_tokens}


def _code(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs/."""
    return {"verification/index.md": index_page(), "reference/models.md": models_page()}
