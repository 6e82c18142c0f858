"""Is a mixture of experts on a grid what it is in one process, wherever its experts are?

Experts are sharded by their inner features (cut), or ranks of z, of x or of both own whole ones and tokens travel to them (owned).

    steps       loss and every gradient of two steps, with odd routing: all tokens to the same experts, so that ranks have no rows; one expert
                for each token, or all; scores that are equal; experts that ranks do not divide, or that are fewer than z
    losses      of 50 steps, on five grids; and across restarts on other grids, cut, then owned by each of the axes, then cut
    balance     the auxiliary loss; the correction bias after three steps, to the bit
    traffic     bytes by axis and purpose, equal to formulas of sizes and of what routers chose
    faults      planted into the code: each has to be found

    python -m benchmarks.experts
    python -m benchmarks.experts --break map    # plants one fault: has to fail
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.experts import balanced, sent, training
from benchmarks.experts.faults import FAULTS
from benchmarks.experts.step import GRADIENT_BAR, LOSS_BAR, step_errors, worst
from benchmarks.experts.ways import Routing, Way
from benchmarks.ranks import RankError, RankPool

STEPS, LEG = 50, 10
Z, X, Z_X = ("z",), ("x",), ("z", "x")
CUT_ON_4, Z_ON_4, X_ON_4, Z_X_ON_4 = (
    Way((1, 1, 2, 2)),
    Way((2, 2, 1, 1), Z, "fsdp2"),
    Way((1, 1, 2, 2), X),
    Way((1, 2, 1, 2), Z_X),
)
ALL_TO_SAME = Routing(chosen=1, scores="equal")
STEP_CASES: tuple[tuple[str, Way, Routing], ...] = (
    *(("", way, Routing()) for way in (CUT_ON_4, Z_ON_4, X_ON_4, Z_X_ON_4)),
    ("", Way((1, 2, 1, 2), Z_X, "fsdp2", "replicated"), Routing()),
    ("", Way((1, 2, 2, 1), Z), Routing("gpt_oss")),
    ("a shared expert, groups", Z_X_ON_4, Routing("deepseek_v3")),
    *(("all tokens to one expert", way, ALL_TO_SAME) for way in (CUT_ON_4, Z_ON_4, X_ON_4, Z_X_ON_4)),
    ("all tokens to one expert", Way((1, 1, 2, 2), X, "fsdp2", "replicated"), ALL_TO_SAME),
    *(
        ("equal scores in pairs", way, Routing(chosen=3, scores="equal in pairs"))
        for way in (CUT_ON_4, Z_ON_4, Z_X_ON_4)
    ),
    *(("one expert a token", way, Routing(chosen=1)) for way in (X_ON_4, Z_X_ON_4)),
    *(("all experts", way, Routing(chosen=8)) for way in (Z_ON_4, Z_X_ON_4)),
    ("an expert on each rank", Way((1, 4, 1, 1), Z), Routing(experts=4)),
    ("5 experts on z=2", Way((1, 2, 1, 2)), Routing(experts=5)),
    ("2 experts on z=4", Way((1, 4, 1, 1)), Routing(experts=2, chosen=1)),
    ("2 on x=2, z shards features", Way((1, 2, 1, 2), X), Routing(experts=2, chosen=1)),
)
REJECTED: tuple[tuple[Way, Routing, str], ...] = (
    (Way((1, 2, 1, 2), Z), Routing(experts=5), "z=2 does not divide the 5 experts"),
    (Way((1, 4, 1, 1), Z), Routing(experts=2, chosen=1), "z=4 does not divide the 2 experts"),
    (Way((1, 2, 1, 2), Z_X), Routing(experts=6), "z*x=4 does not divide the 6 experts"),
)
LONG = (
    Way((1, 1, 2, 2), "cut", "fsdp2"),
    Way((2, 2, 1, 1), Z),
    Way((1, 1, 1, 4), X),
    Way((1, 2, 1, 2), Z_X, "fsdp2"),
    Way((1, 2, 2, 2), Z_X, "streamed", "replicated"),
)
RESTARTS = (
    Way((1, 2, 1, 2)),
    Way((2, 2, 1, 1), Z),
    Way((1, 2, 1, 2), Z_X, "fsdp2"),
    Way((1, 1, 1, 4), X),
    Way((1, 1, 2, 2), "cut", "fsdp2"),
)
BALANCED = (
    CUT_ON_4,
    Z_ON_4,
    X_ON_4,
    Z_X_ON_4,
    Way((1, 2, 2, 1), Z, "streamed", "replicated"),
    Way((1, 2, 1, 2), Z_X, "fsdp2", "replicated"),
)
TRAFFIC = tuple(
    Way(shape, experts, "fsdp2", activations)
    for shape, experts in (
        ((1, 2, 2, 2), "cut"),
        ((1, 2, 2, 2), Z),
        ((1, 2, 2, 2), X),
        ((1, 2, 2, 2), Z_X),
        ((2, 2, 1, 2), Z_X),
        ((1, 1, 2, 4), X),
    )
    for activations in ("sequence-parallel", "replicated")
)


class Rows:
    """What is printed and counted."""

    def __init__(self) -> None:
        self.good = self.total = 0

    def add(self, part: str, way: Way | str, about: str, holds: bool, figures: str) -> None:
        self.good += holds
        self.total += 1
        print(f"{part:8} {way!s:66} {about:28} {figures}{'' if holds else '  WRONG'}", flush=True)


def steps(pool: RankPool, rows: Rows) -> None:
    for about, way, routing in STEP_CASES:
        found = worst(pool.run(step_errors, way.ranks, way, routing))
        names = about or ("" if routing.family == "qwen3_moe" else routing.family)
        rows.add("step", way, names, found.holds, f"loss {found.loss:.1e} gradients {found.gradient:.1e}")
    for way, routing, why in REJECTED:
        try:
            pool.run(step_errors, way.ranks, way, routing)
            holds = False
        except RankError as error:
            holds = why in str(error)
        rows.add("step", way, f"{routing.experts} experts", holds, "rejected" if holds else "not rejected")


def losses(pool: RankPool, rows: Rows) -> None:
    expected = training.losses_of_one_process(STEPS)

    def compare(part: str, way: Way, found: list[list[float]], first: int = 0) -> None:
        until = first + len(found[0])
        error = max(abs(a / b - 1) for own in found for a, b in zip(own, expected[first:until], strict=True))
        holds = error <= LOSS_BAR and until > first
        about = f"steps {first + 1} to {until}"
        rows.add(
            part, way, about, holds, f"loss {error:.1e}, {expected[first]:.4f} to {expected[until - 1]:.4f}"
        )

    for way in LONG:
        compare("losses", way, pool.run(training.losses_on_grid, way.ranks, way, STEPS, timeout_s=400))
    with tempfile.TemporaryDirectory() as folder:
        for number, way in enumerate(RESTARTS):
            until = (number + 1) * LEG
            found = pool.run(training.losses_on_grid, way.ranks, way, until, Path(folder), timeout_s=400)
            compare("restart", way, found, number * LEG)


def balance(pool: RankPool, rows: Rows) -> None:
    routing = Routing(has_aux_loss=True)
    for way in BALANCED:
        found = worst(pool.run(step_errors, way.ranks, way, routing))
        figures = f"loss {found.loss:.1e} gradients {found.gradient:.1e}"
        rows.add("balance", way, "auxiliary loss", found.holds, figures)
    expected = balanced.biases_of_one_process()
    moved = any(len(bias.unique()) > 1 for bias in expected)
    for way in BALANCED:
        by_rank = pool.run(balanced.biases_on_grid, way.ranks, way)
        holds = moved and all(_equal(own, expected) for own in by_rank)
        rows.add("balance", way, "correction bias", holds, "equal to the bit" if holds else "differs")


def _equal(own: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(own) == len(expected) > 0 and all(
        torch.equal(a, b) for a, b in zip(own, expected, strict=True)
    )


def traffic(pool: RankPool, rows: Rows) -> None:
    for way in TRAFFIC:
        accounts = pool.run(sent.account, way.ranks, way)
        wrong = _not_equal(way, accounts)
        total = float(sum(sum(each.sent.values()) for each in accounts))
        of_rows = sum(
            float(size)
            for each in accounts
            for (_, what), size in each.sent.items()
            if what in ("dispatch", "combine")
        )
        figures = f"{total:.0f} bytes, {of_rows:.0f} of them rows, {len(accounts[0].sent)} kinds"
        rows.add("traffic", way, "", not wrong, "; ".join([f"equal: {figures}"] if not wrong else wrong[:4]))


def _not_equal(way: Way, accounts: list[sent.Account]) -> list[str]:
    wrong = []
    for rank, (own, formula) in enumerate(zip(accounts, sent.formulas(way, accounts), strict=True)):
        for axis, purpose in sorted(set(own.sent) | set(formula)):
            measured, said = own.sent.get((axis, purpose), 0), formula.get((axis, purpose), 0)
            if measured != said:
                wrong.append(
                    f"rank {rank}, {axis} {purpose}: sent {float(measured):.0f}, the formula says {float(said):.0f}"
                )
    return wrong


def found_by_check(pool: RankPool, name: str, planted: str | None) -> tuple[bool, str]:
    """(is it wrong, the figures) of the check that a fault is to be found by, with the fault planted or without."""
    fault = FAULTS[name]
    if fault.check == "bias":
        expected = balanced.biases_of_one_process()
        by_rank = pool.run(balanced.biases_on_grid, fault.way.ranks, fault.way, planted)
        is_wrong = not all(_equal(own, expected) for own in by_rank)
        return is_wrong, "biases differ" if is_wrong else "biases are equal"
    if fault.check == "traffic":
        wrong = _not_equal(fault.way, pool.run(sent.account, fault.way.ranks, fault.way, planted))
        return bool(wrong), wrong[0] if wrong else "bytes are equal"
    found = worst(pool.run(step_errors, fault.way.ranks, fault.way, fault.routing, planted))
    return not found.holds, f"loss {found.loss:.1e} gradients {found.gradient:.1e}"


def faults(pool: RankPool, rows: Rows) -> None:
    for name, fault in FAULTS.items():
        is_found, figures = found_by_check(pool, name, name)
        clean, without = found_by_check(pool, name, None)
        said = f"{figures}; without it {without}"
        rows.add("fault", f"{name}: {fault.about}", "", is_found and not clean, said)


PARTS: dict[str, Callable[[RankPool, Rows], None]] = {
    "steps": steps,
    "losses": losses,
    "balance": balance,
    "traffic": traffic,
    "faults": faults,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    parser.add_argument(
        "--break",
        dest="fault",
        choices=FAULTS,
        help="plant a fault in what shows it: the command has to fail",
    )
    options = parser.parse_args(arguments)
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    rows = Rows()
    print(
        f"loss within {LOSS_BAR:g}, gradients within {GRADIENT_BAR:g} of their own maximum; Gloo on CPU, fp32"
    )
    with RankPool(8, quiet=True) as pool:
        if options.fault:
            fault = FAULTS[options.fault]
            is_wrong, figures = found_by_check(pool, options.fault, options.fault)
            rows.add("fault", fault.way, options.fault, not is_wrong, figures)
        else:
            for name in options.only or PARTS:
                PARTS[name](pool, rows)
    print(
        f"experts: {rows.good}/{rows.total} as in one process or as the formulas say, {time.perf_counter() - start_s:.0f} s"
    )
    return 0 if rows.good == rows.total else 1


if __name__ == "__main__":
    sys.exit(main())
