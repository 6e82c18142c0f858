"""The JobSet API, v1alpha2, as models that reject unknown fields; its Jobs are those of Kubernetes' client.

After api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset.
"""

from typing import Annotated, Literal

from kubernetes.client.models.v1_job_template_spec import V1JobTemplateSpec
from kubernetes.client.models.v1_object_meta import V1ObjectMeta
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

Count = Annotated[StrictInt, Field(ge=0)]
Action = Literal[
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rule(Part):
    name: Annotated[StrictStr, Field(pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Action
    onJobFailureReasons: list[StrictStr] = []  # noqa: N815
    onJobFailureMessagePatterns: list[StrictStr] = []  # noqa: N815
    targetReplicatedJobs: list[StrictStr] = []  # noqa: N815


class FailurePolicy(Part):
    maxRestarts: Count = 0  # noqa: N815
    restartStrategy: Literal["Recreate", "BlockingRecreate", "InPlaceRestart"] = "Recreate"  # noqa: N815
    rules: list[Rule] = []


class SuccessPolicy(Part):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[StrictStr] = []  # noqa: N815


class Network(Part):
    enableDNSHostnames: StrictBool | None = None  # noqa: N815
    subdomain: StrictStr | None = None
    publishNotReadyAddresses: StrictBool | None = None  # noqa: N815


class Coordinator(Part):
    replicatedJob: StrictStr  # noqa: N815
    jobIndex: Count = 0  # noqa: N815
    podIndex: Count = 0  # noqa: N815


class DependsOn(Part):
    name: StrictStr
    status: Literal["Ready", "Complete"]


class ReplicatedJob(Part):
    name: StrictStr
    groupName: StrictStr = "default"  # noqa: N815
    template: V1JobTemplateSpec
    replicas: Count = 1
    dependsOn: list[DependsOn] = []  # noqa: N815


class JobSetSpec(Part):
    replicatedJobs: list[ReplicatedJob]  # noqa: N815
    network: Network | None = None
    successPolicy: SuccessPolicy | None = None  # noqa: N815
    failurePolicy: FailurePolicy | None = None  # noqa: N815
    suspend: StrictBool | None = None
    coordinator: Coordinator | None = None
    managedBy: StrictStr | None = None  # noqa: N815
    ttlSecondsAfterFinished: Count | None = None  # noqa: N815


class JobSet(Part):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]  # noqa: N815
    kind: Literal["JobSet"]
    metadata: V1ObjectMeta
    spec: JobSetSpec
