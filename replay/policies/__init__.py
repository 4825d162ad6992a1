"""Placement policies of other systems, from their published descriptions, over the same fleet."""
