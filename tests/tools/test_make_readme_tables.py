"""The tables and pictures of the READMEs say what the results and the code say, all of it, and nothing older than the newest."""

from copy import deepcopy
from xml.etree import ElementTree

import pytest

from cpuspec.checkpoints.families import FAMILIES
from tools.make_families_table import ROWS
from tools.make_pictures import pictures
from tools.make_readme_tables import END, README, RESULTS, START, made, read_results, with_tables

MADE = made()


@pytest.mark.parametrize("path", MADE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_is_made_is_what_the_tool_makes(path):
    assert path.read_text("utf-8") == MADE[path], "run python tools/make_readme_tables.py"


def test_another_figure_gives_another_picture():
    results = read_results(RESULTS)
    changed = deepcopy(results)
    for one in changed.values():
        for arms in one.get("sets", {}).values():
            arms["none"]["tokens_per_s"] *= 0.5
    assert pictures(changed)["speed"] != pictures(results)["speed"]


@pytest.mark.parametrize("path", [path for path in MADE if path.suffix == ".svg"], ids=lambda path: path.stem)
def test_a_picture_stays_within_its_frame_and_suits_dark_pages(path):
    root = ElementTree.fromstring(MADE[path])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    places = [(float(one.attrib["x"]), float(one.attrib["y"])) for one in root.iter() if "x" in one.attrib]
    assert places
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert "prefers-color-scheme: dark" in MADE[path]


def test_every_family_has_a_row():
    assert ROWS.keys() == FAMILIES.keys(), "each family has a row in tools/make_families_table.py"


def test_the_newest_result_counts_and_only_what_stands_between_the_markers_changes():
    results, readme = read_results(RESULTS), README.read_text("utf-8")
    assert list(results.values()) == sorted(results.values(), key=lambda one: one["date"], reverse=True)
    one = next(one for one in results.values() if one["benchmark"] == "quality") | {"kl_mean": 0.5}
    assert with_tables(readme, results | {"old": one}) == readme
    changed = with_tables(readme, {"new": one, **results})
    assert changed != readme
    assert changed.partition(START)[0] == readme.partition(START)[0]
    assert changed.partition(END)[2] == readme.partition(END)[2]


@pytest.mark.parametrize("readme", ["", START, END, f"{START}\n{END}\n" * 2])
def test_a_readme_without_its_markers_is_refused(readme):
    with pytest.raises(ValueError, match="README needs"):
        with_tables(readme, {})
