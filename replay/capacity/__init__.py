"""Capacity planning: which fleet a workload needs for given targets, from the simulation of the replay."""
