"""Streams, memory and host waits of training steps on CUDA, without a GPU: fake tensors on a fake device."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
Found = Callable[..., dict[str, tuple[int, list[str]]]]
nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What was found in these ways."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("fake_cuda") / "device.so"
    home = Path(torch.__file__).parent
    words = [compiler, "-std=c++20", "-shared", "-fPIC", str(HERE / "device.cpp"), "-o", str(library)]
    words += [
        f"-I{home / 'include'}",
        f"-L{home / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{home / 'lib'}",
    ]
    subprocess.run(words, check=True)

    def run(*names: str) -> dict[str, tuple[int, list[str]]]:
        command = [sys.executable, "-m", "tests.fake_cuda", str(library), *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return {name: (kernels, faults) for name, kernels, faults in rows}

    return run


@pytest.mark.parametrize(
    "way",
    [
        "fsdp2, replicas, sharded gradients, offloaded",
        "fsdp2, shared sequences",
        pytest.param("fsdp2", marks=nightly),
        pytest.param("fsdp2, replicas", marks=nightly),
        pytest.param("fsdp2, sequence-parallel", marks=nightly),
        pytest.param("streamed", marks=nightly),
        pytest.param("streamed, recomputed", marks=nightly),
        pytest.param("streamed, two half-batches", marks=nightly),
        pytest.param("streamed, two half-batches, offloaded", marks=nightly),
    ],
)
def test_streams_wait_for_each_other_and_the_host_for_none(found: Found, way: str) -> None:
    kernels, faults = found(way)[way]
    assert faults == []
    assert kernels > 1000


@nightly
def test_planted_faults_are_found(found: Found) -> None:
    said = {
        "no wait": "does not wait for all_reduce",
        "no record_stream": "is freed while all_reduce",
        "offloaded too early": "aten::copy_ on stream",
        "offloaded, no wait": "does not wait for aten::copy_",
        "offloaded, no wait to free": "is freed while aten::copy_",
        "offloaded, no record_stream": "is freed while aten::copy_",
        "offloaded, from pageable memory": "the host waits for a copy",
        "the loss is read": "DataDependentOutputException",
        "bounds are read in each layer": "DataDependentOutputException",
        "the loss is copied": "the host waits for a copy",
        "the stream is waited for": "the host waits for a stream",
    }
    for fault, (_, faults) in found(*said).items():
        assert any(said[fault] in line for line in faults), (fault, faults)
