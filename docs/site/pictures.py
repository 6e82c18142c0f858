"""The pictures of the docs: `python docs/site/pictures.py` writes them, and a test compares them with what is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from draw import Picture

FOLDER = Path(__file__).parent.parent / "pictures"


def weight() -> Picture:
    """From a weight to one (y, x) block of it, to what one rank stores."""
    p = Picture(
        "A weight sharded over x and y into blocks, and each block sharded over z for storage", 720, 324
    )
    left, top, side = 70, 70, 200
    p.text(left + side / 2, 22, "the weight of a linear layer", "bold")
    p.text(left + side / 2, 40, "no rank ever holds it", "soft small")
    for x in (0, 1):
        for y in (0, 1):
            chosen = (x, y) == (0, 1)
            p.box(
                left + y * side / 2,
                top + x * side / 2,
                side / 2,
                side / 2,
                "z-strong" if chosen else "plain",
                radius=0,
            )
            p.text(left + (y + 0.5) * side / 2, top + (x + 0.5) * side / 2 + 5, f"x={x}, y={y}", "small")
    p.text(left + side / 2, top - 10, "input features: sharded over y", "y small")
    for x, words in enumerate(("x=0", "x=1")):
        p.text(left - 8, top + (x + 0.5) * side / 2 + 4, words, "x small", anchor="end")
    for y, words in enumerate(("y=0", "y=1")):
        p.text(left + (y + 0.5) * side / 2, top + side + 18, words, "y small")
    p.text(left + side / 2, top + side + 38, "output features (rows): sharded over x", "x small")

    block = 330
    p.arrow([(left + side + 12, top + side / 4), (block - 12, top + side / 4)])
    p.text(block + 75, 22, "the block of x=0, y=1", "bold")
    p.text(block + 75, 40, "what a rank multiplies with", "soft small")
    p.box(block, top, 150, 100, "z-strong", radius=0)
    p.line([(block, top + 50), (block + 150, top + 50)], "z dashed")
    for z in (0, 1):
        p.text(block + 75, top + 29 + 50 * z, f"rows of z={z}", "small")
    p.text(block + 75, top + 124, "all-gathered over z before\nits matmul, freed after it", "soft small")

    part = 545
    p.arrow([(block + 150 + 12, top + side / 4), (part - 12, top + side / 4)])
    p.text(part + 75, 22, "its shards on z", "bold")
    p.text(part + 75, 40, "what a rank stores", "soft small")
    for z in (0, 1):
        p.labelled(part, top + z * 54, 150, 46, "z", f"rank (z={z}, y=1, x=0)", "small")
    p.text(
        part + 75,
        top + 124,
        "⅛ of the weight, of its gradient\nand of its optimizer state",
        "soft small",
    )
    p.text(
        block + 182,
        top + 192,
        "The data axis replicates all of this.",
        "data small",
    )
    return p


def axes() -> Picture:
    """One linear from y to x: what is computed, what is sent, in forward, backward and at the step."""
    p = Picture(
        "One linear layer: what each axis communicates in forward, in backward and in the optimizer step",
        720,
        372,
    )
    rows = {"computes": 44, "sends": 104}

    def row(top: float, name: str) -> None:
        p.text(8, top - 18, name, "bold", anchor="start")
        p.text(8, top + 27, "computes", "soft small", anchor="start")
        p.text(8, top + 87, "sends", "soft small", anchor="start")

    def compute(x: float, top: float, width: float, words: str) -> None:
        p.labelled(x, top, width, 42, "plain", words, "small")

    def send(x: float, top: float, width: float, axis: str, words: str) -> None:
        p.labelled(x, top + 60, width, 42, axis, words, f"{axis} small")

    top = rows["computes"]
    row(top, "forward")
    send(80, top, 150, "z", "all-gather over z:\nthe weight's block W")
    p.arrow([(155, top + 60), (155, top + 21), (258, top + 21)], "z")
    compute(260, top, 150, "O = I · W\nI has its features on y")
    p.arrow([(410, top + 21), (505, top + 21), (505, top + 58)])
    send(430, top, 150, "y", "all-reduce over y:\nparts of the output O")
    p.arrow([(580, top + 81), (632, top + 81)], "y")
    p.text(676, top + 78, "next layer:\nO is on x", "small")

    top = 216
    row(top, "backward")
    send(80, top, 130, "z", "all-gather over z:\nW again")
    p.arrow([(145, top + 60), (145, top + 21), (223, top + 21)], "z")
    compute(225, top, 110, "dI = dO · Wᵀ")
    p.arrow([(280, top + 42), (280, top + 58)])
    send(225, top, 130, "x", "all-reduce over x:\nparts of dI")
    p.arrow([(335, top + 21), (373, top + 21)])
    compute(375, top, 110, "dW = Iᵀ · dO")
    p.arrow([(430, top + 42), (430, top + 58)])
    send(375, top, 150, "z", "reduce-scatter over z:\nparts of dW")
    p.arrow([(525, top + 81), (553, top + 81)], "z")
    send(555, top, 158, "data", "all-reduce over data:\nthis rank's shard of dW")
    p.text(634, top + 14, "then the optimizer step,\non each rank's own shard", "small")
    p.text(
        8,
        top + 128,
        "All five can overlap with computation: the all-reduce of dI, for example, runs during the matmul of dW.",
        "soft small",
        anchor="start",
    )
    p.text(
        8,
        top + 146,
        "In every second layer (o, down) x and y are exchanged.",
        "soft small",
        anchor="start",
    )
    return p


def block() -> Picture:
    """A transformer block: features on y, then on x, then on y again; nothing is moved in between."""
    p = Picture(
        "A transformer block: the features change from y to x and back, and nothing is rearranged", 720, 340
    )
    p.text(8, 20, "residual stream: hidden features on y", "y bold", anchor="start")
    p.line([(8, 44), (334, 44)], "y", width=3)
    p.line([(358, 44), (676, 44)], "y", width=3)
    p.arrow([(700, 44), (716, 44)], "y", width=3)

    def half(left: float, name: str, first: str, core: str, last: str, end: float) -> None:
        p.line([(left, 44), (left, 90), (left + 14, 90)], "y", width=3)
        p.arrow([(left + 12, 90), (left + 22, 90)], "y", width=3)
        p.labelled(left + 22, 66, 48, 48, "y", "norm", "small")
        p.arrow([(left + 70, 90), (left + 90, 90)], "y", width=3)
        p.labelled(left + 90, 66, 66, 48, "plain", first, "small")
        p.arrow([(left + 156, 90), (left + 176, 90)], "x", width=3)
        p.labelled(left + 176, 66, 70, 48, "x", core, "small")
        p.line([(left + 211, 114), (left + 211, 134)], "x", width=3)
        p.arrow([(left + 211, 130), (left + 211, 142)], "x", width=3)
        p.labelled(left + 176, 142, 70, 48, "plain", last, "small")
        p.line([(left + 246, 166), (end, 166), (end, 64)], "y", width=3)
        p.arrow([(end, 70), (end, 57)], "y", width=3)
        p.labelled(end - 12, 32, 24, 24, "y", "+", "bold")
        p.text(left + 123, 134, "y → x", "small")
        p.text(left + 172, 182, "x → y", "small", anchor="end")
        p.text(left + 22, 222, name, "bold", anchor="start")

    half(24, "attention: heads on x", "q, k, v", "attention", "o", 346)
    half(366, "MLP: inner features on x", "gate, up", "activation", "down", 688)
    for left, first, last in ((46, "q, k, v", "o"), (388, "gate, up", "down")):
        for top, when, at, axes in ((246, "forward", "output", "yx"), (284, "backward", "input", "xy")):
            p.text(left, top, when, "soft small", anchor="start")
            for i, (axis, layer) in enumerate(zip(axes, (first, last), strict=True)):
                words = f"all-reduce over {axis} at the {at} of {layer}"
                p.text(left + 64, top + 17 * i, words, f"{axis} small", anchor="start")
    p.text(
        360,
        330,
        "q, k and v read one input and share one all-reduce each way; so do gate and up. A norm sums its statistics over y.",
        "soft small",
    )
    return p


def ranks() -> Picture:
    """Sixteen ranks on two nodes as data=2, z=2, y=2, x=2, and the four groups of rank 0."""
    p = Picture("The ranks of two nodes with eight GPUs each on the grid data=2, z=2, y=2, x=2", 720, 340)
    cell, height = 66, 50
    for data in (0, 1):
        node = 16 + data * 352
        p.box(node, 44, 336, 190, "frame", radius=10)
        p.text(node + 12, 64, f"node {data}", "bold", anchor="start")
        p.text(node + 324, 64, f"data={data}", "data small", anchor="end")
        for z in (0, 1):
            box = node + 12 + z * 160
            p.box(box, 76, 152, 146, "frame dashed")
            p.text(box + 76, 94, f"z={z}", "z small")
            for y in (0, 1):
                for x in (0, 1):
                    rank = ((data * 2 + z) * 2 + y) * 2 + x
                    look = "plain"
                    for axis, other in (("x", 1), ("y", 2), ("z", 4), ("data", 8)):
                        look = axis if rank == other else look
                    left, top = box + 7 + x * (cell + 6), 102 + y * (height + 8)
                    p.box(left, top, cell, height, "chosen" if rank == 0 else look)
                    p.text(left + cell / 2, top + 22, f"rank {rank}", "bold" if rank == 0 else "")
                    p.text(left + cell / 2, top + 39, f"y={y} x={x}", "soft small")
    p.text(360, 22, "grid (data=2, z=2, y=2, x=2): 16 ranks, x innermost", "bold")
    p.text(16, 260, "Rank 0 communicates with four ranks, one on each axis:", "", anchor="start")
    groups = [
        ("x", "rank 1", "activations, in every layer"),
        ("y", "rank 2", "activations, in every layer"),
        ("z", "rank 4", "weights and their gradients"),
        ("data", "rank 8", "its shard of the gradients, once a step"),
    ]
    for i, (axis, other, what) in enumerate(groups):
        left, top = 16 + (i % 2) * 352, 276 + (i // 2) * 30
        p.box(left, top, 18, 18, axis, radius=3)
        p.text(left + 28, top + 14, f"{axis}: {other}", f"{axis} bold", anchor="start")
        p.text(left + 132, top + 14, what, "soft small", anchor="start")
    return p


def overview() -> Picture:
    """The README's picture: what a user does, and what each axis of the grid is known as."""
    p = Picture(
        "A Hugging Face model and text become a trained model; the four axes and their usual names", 720, 300
    )
    steps = [
        ("plan", "the best layout that fits,\nwithout a GPU"),
        ("train", "exact on any grid,\nresumed after failures"),
        ("export", "a Hugging Face folder"),
    ]
    p.text(70, 38, "Hugging Face model\ntext\nN nodes", "small")
    for i, (name, words) in enumerate(steps):
        left = 160 + i * 190
        p.arrow([(left - 22, 46), (left - 2, 46)])
        p.box(left, 14, 164, 70, "plain")
        p.text(left + 82, 36, f"fourfold {name}", "bold")
        p.text(left + 82, 56, words, "soft small")
    p.text(360, 122, "ranks = data × z × y × x", "bold")
    axes = [
        ("x", "tensor parallel", "TP", "shards heads, MLP features", "sends activations"),
        ("y", "second tensor axis", "TP2", "shards hidden features", "sends activations"),
        ("z", "FSDP, ZeRO-3", "FSDP", "shards batch and weights", "sends weights, gradients"),
        ("data", "data parallel", "DP", "shards the batch", "sends gradients"),
    ]
    for i, (axis, name, short, shards, sends) in enumerate(axes):
        left = 10 + i * 178
        p.box(left, 138, 166, 146, axis)
        p.text(left + 83, 164, axis, f"{axis} bold")
        p.text(left + 83, 190, name, "bold")
        p.text(left + 83, 210, short, f"{axis} small")
        p.text(left + 83, 240, shards, "small")
        p.text(left + 83, 262, sends, "soft small")
    return p


def packages() -> Picture:
    """The packages of src, from the top down."""
    p = Picture("The packages of Fourfold, from commands at the top to collectives at the bottom", 720, 470)
    floors = [
        ("commands", ["cli"]),
        ("start and leave a run", ["launch", "drill", "export", "bench"]),
        ("a run", ["train: loop, observe, resilience, recovery", "config"]),
        ("before a run", ["planner: inputs, cost, calibrate, show", "dry_run"]),
        ("around a step", ["checkpoint", "optim", "profiling"]),
        ("a step in parallel", ["parallel", "weights"]),
        ("what it works on", ["hf", "data"]),
        ("ranks", ["mesh: axes, grid, collectives"]),
    ]
    left, width, height = 170, 520, 40
    for floor, (words, names) in enumerate(floors):
        top = 20 + floor * 56
        p.text(left - 16, top + 25, words, "soft small", anchor="end")
        each = (width - 12 * (len(names) - 1)) / len(names)
        for i, name in enumerate(names):
            p.box(left + i * (each + 12), top, each, height, "z-strong" if name == "parallel" else "plain")
            p.text(left + i * (each + 12) + each / 2, top + 25, name, "small")
        if floor:
            p.arrow([(left + width / 2, top - 15), (left + width / 2, top - 2)])
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "overview": overview,
    "weight": weight,
    "axes": axes,
    "block": block,
    "ranks": ranks,
    "packages": packages,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
