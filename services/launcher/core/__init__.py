"""Pure decisions of the launcher: which processes, with which settings, and what to do when one dies."""
