"""Faults to plant into the code of experts, and what each has to be found by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts.ways import Routing, Way, replaced
from fourfold.hf.experts import ExpertStorage, storage_of
from fourfold.mesh.collectives import Collectives
from fourfold.mesh.reductions import sum_forward
from fourfold.parallel import replace_modules
from fourfold.parallel.experts import balance, cut, own_tokens, owned
from fourfold.parallel.experts.balance import BalanceLoss
from fourfold.parallel.experts.whole_features import WholeFeatures
from fourfold.weights.streamed import StreamedWeights


@dataclass(frozen=True)
class Fault:
    about: str
    planted: Callable[[], AbstractContextManager[None]]
    way: Way
    routing: Routing = field(default_factory=Routing)
    # By a step against one process, or by one of the others.
    check: str = "step"


def _in_combine(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    before = owned.send_rows

    def send(rows: Tensor, sizes: Any, collectives: Any, axis: Any, purpose: Any, name: str) -> Tensor:
        arrived = before(rows, sizes, collectives, axis, purpose, name)
        return change(arrived) if purpose == "combine" else arrived

    return replaced(owned, "send_rows", send)


def _counts_off_by_one() -> AbstractContextManager[None]:
    before = owned._own_choices

    def own_choices(told: Tensor, rows: int) -> Tensor:
        moved = (told[:, 0] > 0).to(told.dtype)
        return before(
            torch.cat([told[:, :1] - moved[:, None], told[:, 1:2] + moved[:, None], told[:, 2:]], 1), rows
        )

    return replaced(owned, "_own_choices", own_choices)


def _mean_of_aux_losses() -> AbstractContextManager[None]:
    def of_all(self: BalanceLoss, sums: Tensor) -> Tensor:
        with replaced(balance, "sum_forward", lambda tensor, *_: tensor):
            mean = before(self, sums)
        for axis in self._axes:
            total = sum_forward(mean, self._grid.collectives, axis, "balance", "routers")
            mean = total / self._grid.size(axis)
        return mean

    before = BalanceLoss._of_all
    return replaced(BalanceLoss, "_of_all", of_all)


def _also_summed_over_z() -> AbstractContextManager[None]:
    before = StreamedWeights._scatter

    def scatter(self: Any, item: Any) -> None:
        if item.weight.z < self._grid.z:
            self._collectives.all_reduce(item.tensor, "z", "gradient").wait()
        before(self, item)

    return replaced(StreamedWeights, "_scatter", scatter)


def _not_over_data() -> AbstractContextManager[None]:
    before = StreamedWeights._start_data

    def start(self: Any, item: Any) -> None:
        if item.weight.z < self._grid.z:
            self._reducing.append(item)
        else:
            before(self, item)

    return replaced(StreamedWeights, "_start_data", start)


def _local_counts() -> AbstractContextManager[None]:
    before = Collectives.all_reduce

    def all_reduce(self: Any, tensor: Tensor, axis: Any, purpose: Any, *others: Any, **more: Any) -> Any:
        return before(
            self, tensor.clone() if purpose == "balance" else tensor, axis, purpose, *others, **more
        )

    return replaced(Collectives, "all_reduce", all_reduce)


def _halves_as_one() -> AbstractContextManager[None]:
    def seen(module: Any, name: str) -> ExpertStorage:
        found = storage_of(module, name)
        return ExpertStorage(found.inner, found.features, found.hidden)

    return replaced(replace_modules, "storage_of", seen)


def _counts_sent_twice() -> AbstractContextManager[None]:
    before = owned.exchange_counts

    def exchange(*given: Any) -> Tensor:
        before(*given)
        return before(*given)

    return replaced(owned, "exchange_counts", exchange)


CUT, GATED = Way((1, 1, 2, 2)), Routing("qwen2_moe")
Z, X, Z_X = Way((2, 2, 1, 1), ("z",)), Way((1, 1, 2, 2), ("x",)), Way((1, 2, 1, 2), ("z", "x"))
REPLICATED = Way((1, 1, 2, 2), ("x",), activations="replicated")

FAULTS = {
    "weights-of-choices": Fault(
        "gradients of the weights of choices are not summed over y",
        lambda: replaced(cut, "_summed", lambda tensor, *_, **__: tensor),
        CUT,
    ),
    "router": Fault(
        "the gradient of a router's input counts on each rank",
        lambda: replaced(WholeFeatures, "share", lambda self, whole: whole),
        CUT,
    ),
    "gate": Fault(
        "the gradient of a gate is not summed over y",
        lambda: replaced(cut, "_mapped", lambda output, function: output),
        CUT,
        GATED,
    ),
    "halves": Fault("halves of gate and up are sharded as one", _halves_as_one, CUT),
    "pair": Fault(
        "what an expert made of one row is dropped",
        lambda: _in_combine(lambda rows: torch.cat([torch.zeros_like(rows[:1]), rows[1:]])),
        Z,
    ),
    "order": Fault("rows come back in another order", lambda: _in_combine(lambda rows: rows.roll(1, 0)), X),
    "counts": Fault("counts of rows are off by one between experts", _counts_off_by_one, X),
    "map": Fault(
        "the map of experts has z and x transposed",
        lambda: replaced(owned, "_by_z_and_x", lambda choices, experts, grid: choices),
        Z_X,
    ),
    "tokens": Fault(
        "x ranks with the same tokens send the same part of them",
        lambda: replaced(own_tokens, "chunk", lambda rows, parts, which: slice(0, rows // parts)),
        REPLICATED,
    ),
    "z": Fault("gradients of owned experts are also summed over z", _also_summed_over_z, Z),
    "data": Fault("gradients of owned experts are not summed over data", _not_over_data, Z),
    "aux": Fault(
        "the mean of the ranks' own auxiliary losses",
        _mean_of_aux_losses,
        Z_X,
        Routing(has_aux_loss=True),
    ),
    "bias": Fault("the correction bias follows a rank's own counts", _local_counts, Z_X, check="bias"),
    "traffic": Fault(
        "counts are sent twice", _counts_sent_twice, Way((1, 2, 1, 2), ("z", "x"), "fsdp2"), check="traffic"
    ),
}
