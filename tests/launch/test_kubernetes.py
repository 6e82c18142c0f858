"""The manifest of a JobSet, validated by the API's models; and the signal of a pod."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from benchmarks.local_slurm import wait_until
from fourfold.cli.main import main
from fourfold.launch.kubernetes import KubernetesJob, manifest, resources
from fourfold.launch.world import World

pytest.importorskip("kubernetes", reason="kubernetes is not installed: pip install fourfold[kubernetes-test]")
from kubernetes.client.models.v1_config_map import V1ConfigMap

from tests.jobset import JobSet

pytestmark = pytest.mark.nightly

RUN = """\
[model]
config = "tiny/config.json"  # "quoted": and so on
[data]
sources = [{ path = "text" }]
sequence_length = 128
[batch]
tokens = 1024
[grid]
data = 2
z = 4
"""


def job_of(**changes: Any) -> KubernetesJob:
    values = {
        "world": World(nodes=4, ranks_per_node=2, gpus_per_node=2),
        "run": RUN,
        "name": "night-run",
        "image": "registry/fourfold:1",
        "changes": ["optimizer.lr=1e-4"],
        "claim": "weights",
        "cpus": "16",
        "memory": "128Gi",
        "node_selector": {"gpu": "h100"},
    }
    return KubernetesJob(**{**values, **changes})


def read(job: KubernetesJob) -> tuple[V1ConfigMap, JobSet]:
    """The manifest, parsed by the API's models."""
    config, jobset = yaml.safe_load_all(manifest(job))
    return V1ConfigMap.model_validate(config), JobSet.model_validate(jobset)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "claim": None,
            "cpus": None,
            "memory": None,
            "node_selector": {},
            "folder": Path("/scratch"),
            "world": World(nodes=1, ranks_per_node=4, gpus_per_node=0),
        },
    ],
)
def test_the_manifest_is_valid_and_consistent(changes):
    job = job_of(**changes)
    config, jobset = read(job)
    assert config.data == {"run.toml": RUN}
    (replicated,) = jobset.spec.replicatedJobs
    spec = replicated.template.spec
    assert (spec.completion_mode, spec.completions, spec.parallelism) == (
        "Indexed",
        job.world.nodes,
        job.world.nodes,
    )
    pod = spec.template.spec
    (container,) = pod.containers
    # The first pod's name by the API: JOBSET-REPLICATEDJOB-JOBINDEX-PODINDEX.SUBDOMAIN, which is the JobSet's name.
    host = f"{jobset.metadata.name}-{replicated.name}-0-0.{jobset.metadata.name}"
    assert f"--master-addr={host}" in container.command
    assert f"--nnodes={spec.completions}" in container.command
    assert f"--nproc-per-node={job.world.ranks_per_node}" in container.command
    for used in re.findall(r"\$\((\w+)\)", " ".join(container.command)):
        assert used in {variable.name for variable in container.env}
    mounted = {mount.name: mount.mount_path for mount in container.volume_mounts}
    volumes = {volume.name: volume for volume in pod.volumes}
    assert set(mounted) == set(volumes)
    run = next(part for part in container.command if part.endswith("run.toml"))
    assert run == f"{mounted['run']}/run.toml"
    assert volumes["run"].config_map.name == config.metadata.name
    assert mounted["shm"] == "/dev/shm"
    on_exit = spec.pod_failure_policy.rules[0].on_exit_codes
    assert (on_exit.container_name, on_exit.values) == (container.name, [85])
    assert pod.restart_policy == "Never", "the API requires it with a podFailurePolicy"
    gpus = container.resources.limits["nvidia.com/gpu"] if job.world.gpus_per_node else None
    assert gpus == (str(job.world.gpus_per_node) if job.world.gpus_per_node else None)


@pytest.mark.parametrize(
    "path",
    [
        "spec",
        "spec.failurePolicy.rules.0",
        "spec.replicatedJobs.0.template.spec",
        "spec.replicatedJobs.0.template.spec.template.spec.containers.0",
    ],
)
def test_the_models_reject_unknown_fields(path):
    jobset = resources(job_of())[1]
    part: Any = jobset
    for name in path.split("."):
        part = part[int(name) if name.isdigit() else name]
    part["restartsMax"] = 3
    with pytest.raises(ValidationError, match="restartsMax"):
        JobSet.model_validate(jobset)


def test_a_name_that_is_not_a_host_name_is_rejected():
    with pytest.raises(ValueError, match="up to 48 small letters"):
        job_of(name="Night_run")
    with pytest.raises(ValueError, match="4 pods"):
        job_of(name="a" * 49)
    read(job_of(name="a" * 48))


def test_the_command_writes_the_manifest(tmp_path, capsys):
    file = tmp_path / "Night run.toml"
    file.write_text(RUN)
    launch = ["launch", "kubernetes", str(file), "--nodes", "4", "--image", "fourfold"]
    assert main([*launch, "--claim", "weights:/work", "--out", str(tmp_path / "out.yaml")]) == 0
    _, jobset = yaml.safe_load_all((tmp_path / "out.yaml").read_text())
    assert jobset["metadata"]["name"] == "night-run"
    (container,) = JobSet.model_validate(jobset).spec.replicatedJobs[0].template.spec.template.spec.containers
    assert container.working_dir == "/work"
    assert container.resources.limits == {"nvidia.com/gpu": "2"}
    # Checkpoints inside a pod are lost with it.
    capsys.readouterr()
    assert main(launch) == 2
    assert "checkpoints.folder='checkpoints'" in capsys.readouterr().err
    assert main([*launch, "--set", "checkpoints.folder=s3://bucket/run"]) == 0
    assert main([*launch, "--claim", "weights", "--set", "checkpoints.folder=/scratch/run"]) == 2
    assert "/scratch/run" in capsys.readouterr().err


def test_a_terminated_pod_saves_first(tmp_path):
    job = job_of(world=World(nodes=1, ranks_per_node=1, gpus_per_node=0))
    (container,) = read(job)[1].spec.replicatedJobs[0].template.spec.template.spec.containers
    # The pod's command with another host, port and training module.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = container.command[: container.command.index("fourfold")]
    command[0] = sys.executable
    command = [
        re.sub(r"(--master-addr=).*", r"\g<1>127.0.0.1", part.replace("$(NODE_RANK)", "0"))
        for part in command
    ]
    command = [f"--master-port={port}" if part.startswith("--master-port") else part for part in command]
    with subprocess.Popen([*command, "tests.slurm_rank", str(tmp_path)]) as pod:
        wait_until(
            (tmp_path / "young").exists, "rank", 60
        )  # still importing, so it ignores the first warning
        os.kill(pod.pid, signal.SIGTERM)
        assert pod.wait(60) == 85
    assert json.loads((tmp_path / "saved.json").read_text())[0] == "SIGUSR1"
