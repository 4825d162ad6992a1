"""Replays traces in virtual time: the router's own placement, and others', over the same simulated fleet."""
