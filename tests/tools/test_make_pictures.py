"""The pictures of the READMEs are what the results say, and are whole SVG."""

import json
from copy import deepcopy
from xml.etree import ElementTree

import pytest

from tools.make_pictures import PICTURES, RESULTS, pictures
from tools.make_readme_tables import read_results

RECORDS = read_results(RESULTS)
MADE = pictures(RECORDS)


@pytest.mark.parametrize("name", MADE)
def test_a_picture_is_what_the_results_say(name: str) -> None:
    assert (PICTURES / f"{name}.svg").read_text("utf-8") == MADE[name], "run python tools/make_pictures.py"


@pytest.mark.parametrize("name", MADE)
def test_a_picture_stays_within_its_frame_and_suits_dark_pages(name: str) -> None:
    root = ElementTree.fromstring(MADE[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    places = [(float(one.attrib["x"]), float(one.attrib["y"])) for one in root.iter() if "x" in one.attrib]
    assert places
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert "prefers-color-scheme: dark" in MADE[name]


def test_a_changed_record_changes_its_picture() -> None:
    changed = deepcopy(RECORDS)
    for record in changed.values():
        for arms in record.get("sets", {}).values():
            if isinstance(arms, dict) and "none" in arms:
                arms["none"]["tokens_per_s"] *= 0.5
    assert json.dumps(changed) != json.dumps(RECORDS)
    assert pictures(changed)["speed"] != MADE["speed"]
