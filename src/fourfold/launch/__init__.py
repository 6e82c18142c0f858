"""Start a run: ranks on this machine, or a job on a cluster (Slurm or Kubernetes)."""
