"""A fleet on several hosts: its description, the part of each host, and tokens with which hosts join."""
