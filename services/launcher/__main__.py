"""`python -m services.launcher` is `baton`."""

from services.launcher.cli import main

main()
