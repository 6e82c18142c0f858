"""What is recorded of a step is what a dry run of it finds, and FSDP2's streams wait as on CUDA."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard

from benchmarks.baseline import Layout
from benchmarks.slow_motion import steps
from benchmarks.slow_motion.program import COMPUTE, Program
from benchmarks.slow_motion.recorder import Recorder
from fourfold import Overlap
from fourfold.config.describe import sized_model_config
from fourfold.dry_run.events import Operation
from fourfold.dry_run.run import dryrun, fake_grid
from fourfold.planner.cost.compute import operation_s
from fourfold.planner.inputs.cluster import preset

CLUSTER = preset("dgx-h100")
JOB = steps.Job(sized_model_config("1m", 512) | {"num_hidden_layers": 2}, sequences=8, length=64)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 2, 1, 2), {"weights": "fsdp2"}),
        ((2, 2, 1, 1), {"weights": "streamed"}),
        pytest.param(
            (1, 1, 2, 2),
            {"weights": "streamed", "overlap": Overlap(interleave=True)},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_step_is_that_of_a_dry_run(shape, options):
    program = steps.fourfold(JOB, shape, CLUSTER, precision="bf16", **options)
    run = dryrun(JOB.config, shape, sequences=JOB.sequences, length=JOB.length, trace_all=True, **options)
    wanted = sorted((c.kind, c.ranks, c.payload_bytes) for c in run.collectives)
    assert sorted((kind, group[1], size) for _, kind, group, size in program.sends()) == wanted
    seconds = sum(operation_s(e, CLUSTER) for e in run.trace.events if isinstance(e, Operation))
    assert program.work_s() == pytest.approx(seconds, rel=1e-9)


def test_fsdp2_gathers_ahead_of_computation_and_waits_on_streams():
    recorder = Recorder(CLUSTER)
    with fake_grid((1, 2, 1, 1)) as grid, FakeTensorMode(allow_non_fake_inputs=True), recorder.streams():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=grid.mesh["z"])
        fully_shard(model, mesh=grid.mesh["z"])
        with recorder.recording():
            model(torch.ones(8, 64)).sum().backward()
        with recorder.recording() as program:
            model(torch.ones(8, 64)).sum().backward()
    kinds = [kind for _, kind, *_ in program.sends()]
    assert kinds.count("all_gather") >= 5
    assert kinds.count("reduce_scatter") == 3
    # The compute stream sends nothing itself, and waits for what other streams did.
    assert not any(item[0] == "send" for item in program.streams[COMPUTE])
    assert any(item[0] == "await" for item in program.streams[COMPUTE])


def test_a_program_knows_its_phases():
    program = Program()
    program.work(COMPUTE, 1.0)
    program.wait(COMPUTE, program.send(COMPUTE, "all_gather", (1, 2), 8.0))
    program.backward = program.record(COMPUTE)
    program.work(COMPUTE, 2.0)
    program.wait(COMPUTE, program.send(COMPUTE, "reduce_scatter", (1, 2), 16.0))
    assert program.by_phase(lambda item: item[3]) == [(1.0, 8.0), (2.0, 16.0)]
    assert program.work_s() == 3.0
    assert not program.without("send").sends()


def test_an_estimate_follows_the_streams():
    program = Program()
    event = program.send(COMPUTE, "all_gather", (1, 2), 3.0)
    program.work(COMPUTE, 2.0)
    program.wait(COMPUTE, event)
    program.work(COMPUTE, 1.0)
    assert program.estimated_s(lambda item: item[3]) == 4.0
    assert program.without("work").estimated_s(lambda item: item[3]) == 3.0


def test_collectives_of_an_estimate_share_their_link():
    program = Program()
    first = program.send(COMPUTE, "all_gather", (1, 2), 2.0)
    second = program.send(COMPUTE, "all_gather", (2, 2), 3.0)
    program.wait(COMPUTE, first)  # after 4 s, as both go on at half of the rate
    program.work(COMPUTE, 5.0)
    program.wait(COMPUTE, second)
    assert program.estimated_s(lambda item: item[3]) == 7.0
    assert program.estimated_s(lambda item: item[3], lambda item: "the link") == 9.0
    assert program.without("work").estimated_s(lambda item: item[3], lambda item: "the link") == 5.0


def test_stock_pytorch_gathers_once_if_weights_are_kept():
    """The opponent is recorded as it is on CUDA: gathers on streams of their own, gradients reduced in fp32."""
    config = JOB.config | {"tie_word_embeddings": False}
    job = steps.Job(config, sequences=4, length=64)
    counts = {}
    for reshards in (True, False):
        program = steps.stock(
            job, Layout(1, 2, 2), CLUSTER, tensors="sequence-parallel", reshard_after_forward=reshards
        )
        over_shards = [kind for _, kind, group, _ in program.sends() if group == [2, 2]]
        counts[reshards] = over_shards.count("all_gather")
        assert over_shards.count("reduce_scatter") == 4  # two blocks, the embedding, the head
        assert not any(item[0] == "send" for item in program.streams[COMPUTE])
    assert counts[True] == counts[False] + 2  # each block again in backward


def test_what_reads_a_functional_collective_waits_for_it():
    recorder = Recorder(CLUSTER)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_grid((1, 1, 1, 2)) as grid, fake, recorder.streams(), recorder.recording() as program:
        total = all_reduce(torch.ones(64, 64), "sum", grid.mesh["x"])
        total + 1
    assert program.estimated_s(lambda item: 5.0) == pytest.approx(5.0 + program.work_s(), rel=1e-3)
    assert [item[0] for item in program.streams[COMPUTE]].count("await") == 1
