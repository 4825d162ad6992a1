"""Files with which systemd, Podman or Slurm run a fleet: templates, and what is filled in."""
