"""A Kubernetes job: the manifest of a JobSet with a pod for each node, and of a ConfigMap with the run config.

The API is v1alpha2 of https://jobset.sigs.k8s.io. Its controller gives each pod a stable host name, NAME-node-0-I in a
headless service called NAME, and restarts all pods when one has failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # transformers needs it as well

from fourfold.launch.world import World, train_command
from fourfold.processes import CONTINUE

PORT = 29500
RUN_FOLDER = Path("/etc/fourfold")
CONTAINER = "fourfold"
REPLICATED_JOB = "node"
HEAD = """\
# Written by `fourfold launch kubernetes`. Start it with kubectl apply -f, inspect it with kubectl get jobset,pods.
"""


@dataclass(frozen=True)
class KubernetesJob:
    """All settings of a job."""

    world: World
    run: str
    name: str
    image: str
    changes: Sequence[str] = ()
    # A PersistentVolumeClaim that all pods can write, and its mount path.
    claim: str | None = None
    claim_path: Path = Path("/data")
    # Working directory; by default the claim's path.
    folder: Path | None = None
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str | None = None
    memory: str | None = None
    shared_memory: str = "16Gi"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    # Seconds from SIGTERM to SIGKILL of a pod; a step and a checkpoint have to fit in.
    grace_period_s: int = 120
    max_restarts: int = 10

    def __post_init__(self) -> None:
        # A pod is called NAME-node-0-I-xxxxx, and that has to be a host name.
        longest = 63 - len(f"-{REPLICATED_JOB}-0-{self.world.nodes - 1}-xxxxx")
        if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", self.name) or len(self.name) > longest:
            raise ValueError(
                f"{self.name!r} is not a valid name of a JobSet of {self.world.nodes} pods; use --name with up to {longest} "
                "small letters, digits and hyphens, with a letter first"
            )


def manifest(job: KubernetesJob) -> str:
    """The YAML for kubectl apply."""
    text: str = yaml.dump_all(resources(job), Dumper=_Readable, sort_keys=False, width=1000)
    return HEAD + text


def resources(job: KubernetesJob) -> list[dict[str, Any]]:
    """The ConfigMap and the JobSet."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{job.name}-run"},
            "data": {"run.toml": job.run},
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": {
                # The rendezvous happens before any pod is ready.
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {
                    "maxRestarts": job.max_restarts,
                    # Old and new pods must not write to one checkpoint folder at the same time.
                    "restartStrategy": "BlockingRecreate",
                    # A pod that was evicted, or that saved to be continued, is not a failure of the run.
                    "rules": [
                        {
                            "name": "continued",
                            "action": "RestartJobSetAndIgnoreMaxRestarts",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "replicatedJobs": [
                    {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": _job_spec(job)}}
                ],
            },
        },
    ]


def _job_spec(job: KubernetesJob) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": job.world.nodes,
        "parallelism": job.world.nodes,
        # A single pod cannot continue: after a failure the JobSet restarts all pods.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [CONTINUE]},
                },
                {
                    "action": "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {"spec": _pod_spec(job)},
    }


def _pod_spec(job: KubernetesJob) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "run", "configMap": {"name": f"{job.name}-run"}},
        # The ranks of a node communicate over it, and a container has 64 MB by default.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "run", "mountPath": str(RUN_FOLDER), "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if job.claim:
        volumes.append({"name": "claim", "persistentVolumeClaim": {"claimName": job.claim}})
        mounts.append({"name": "claim", "mountPath": str(job.claim_path)})
    folder = job.folder or (job.claim_path if job.claim else None)
    mine = {"jobset.sigs.k8s.io/jobset-name": job.name}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_period_s,
        **({"nodeSelector": dict(job.node_selector)} if job.node_selector else {}),
        # One pod per node.
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": mine}, "topologyKey": "kubernetes.io/hostname"}
                ]
            }
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": job.image,
                "command": _agent(job),
                **({"workingDir": str(folder)} if folder else {}),
                "env": [
                    {
                        "name": "NODE_RANK",
                        "valueFrom": {
                            "fieldRef": {
                                "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                            }
                        },
                    }
                ],
                "ports": [{"containerPort": PORT}],
                "resources": _resources(job),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _agent(job: KubernetesJob) -> list[str]:
    """The agent of each pod, which starts the ranks; the rendezvous is at the first pod. Kubernetes sets $(NODE_RANK)."""
    return [
        *("python", "-m", "fourfold.launch.agent"),
        f"--nnodes={job.world.nodes}",
        f"--nproc-per-node={job.world.ranks_per_node}",
        "--max-restarts=0",
        "--rdzv-backend=static",
        "--node-rank=$(NODE_RANK)",
        f"--master-addr={job.name}-{REPLICATED_JOB}-0-0.{job.name}",
        f"--master-port={PORT}",
        *train_command(RUN_FOLDER / "run.toml", job.changes),
    ]


def _resources(job: KubernetesJob) -> dict[str, Any]:
    # With equal requests and limits, pods are the last to be evicted.
    asked = {name: value for name, value in (("cpu", job.cpus), ("memory", job.memory)) if value is not None}
    if job.world.gpus_per_node:
        asked[job.gpu_resource] = str(job.world.gpus_per_node)
    return {"requests": dict(asked), "limits": dict(asked)} if asked else {}


class _Readable(yaml.SafeDumper):  # type: ignore[misc]
    """Writes the run config as lines, not as one quoted string."""


def _text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)
