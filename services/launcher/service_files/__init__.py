"""Files with which others run a fleet: systemd, Podman (quadlets) and Slurm. And the upgrade of what runs."""
