"""Every module has a purpose, says it, and is used."""

from __future__ import annotations

import re
import tomllib

from tests.architecture.sources import ROOT, sources


def is_entry(path: str, text: str) -> bool:
    return path.endswith(("__init__.py", "__main__.py")) or 'if __name__ == "__main__"' in text


def test_every_module_is_imported_by_another_or_can_be_run():
    imported = {module for source in sources() for module, _ in source.imports() if source.module != module}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    scripts = [project["scripts"], *project["entry-points"].values()]
    imported |= {script.partition(":")[0] for group in scripts for script in group.values()}
    everything = "\n".join(source.text for source in sources())

    unused = [
        source.path
        for source in sources()
        if source.module not in imported
        and not is_entry(source.path, source.text)
        and not re.search(rf'"{re.escape(source.module)}[":.]', everything)
    ]

    assert unused == []
