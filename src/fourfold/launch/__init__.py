"""Start a run: ranks of this machine, or a job of a cluster (Slurm or Kubernetes)."""
