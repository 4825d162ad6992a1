from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.system.fleet import Fleet, fleet_of_short_prompts


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of_short_prompts(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
