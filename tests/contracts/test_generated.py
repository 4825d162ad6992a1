"""What is generated from the channel table is up to date and true."""

from __future__ import annotations

import pytest
import yaml

from shared.contracts.catalogue import ROOT, files, main
from shared.contracts.channels import CHANNELS


@pytest.mark.parametrize("path", files())
def test_the_generated_file_matches_the_table(path):
    assert (ROOT / path).read_text() == files()[path], "run python -m shared.contracts.catalogue"


def test_check_agrees():
    assert main(["--check"]) == 0


def test_the_asyncapi_document_is_whole():
    document = yaml.safe_load((ROOT / "docs/asyncapi.yaml").read_text())

    assert document["asyncapi"] == "3.0.0"
    assert len(document["channels"]) == len(CHANNELS)
    assert not [target for target in references(document) if not resolves(document, target)]


def references(node) -> list[str]:
    if isinstance(node, dict):
        here = [node["$ref"]] if "$ref" in node else []
        return here + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []


def resolves(document, target: str) -> bool:
    node = document
    for step in target.removeprefix("#/").split("/"):
        if step not in node:
            return False
        node = node[step]
    return True
