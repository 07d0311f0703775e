"""The files of a job on several hosts, for Slurm, Kubernetes and others: each is written from one ``ClusterJob``."""
