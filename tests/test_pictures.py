"""Pictures of the pages: no scripts, text for a phone, light and dark, and their content in words."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
SCREENS = sorted((ROOT / "docs" / "screens").iterdir())
"""Pages of the console as a browser drew them."""
SCREEN_BYTES_MAX = 60_000
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
COLOURED = re.compile(r"(\S+) \{[^}]*(?:fill|stroke): (?:#|none)")

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = {"svg", "title", "desc", "style", "marker", "g", "rect", "path", "text", "tspan"}
"""Elements that run nothing and load nothing."""
PHONE = 288
"""Width in pixels of a picture on a phone of 320 pixels."""
TEXT_MIN = 12
"""Height in pixels of the smallest text there."""
WORDS_MIN = 10
"""Fewest words that say what a picture shows."""


def style_of(picture: ET.Element) -> str:
    return picture.findtext(f"{SVG}style") or ""


def problems(picture: ET.Element) -> Iterator[str]:
    """Yield what keeps a picture from being read everywhere."""
    if picture.tag != f"{SVG}svg" or picture.get("role") != "img":
        yield "is no svg of role img"
    for name in ("title", "desc"):
        if not picture.findtext(f"{SVG}{name}"):
            yield f"has no {name}"
    for element in picture.iter():
        if element.tag.removeprefix(SVG) not in DRAWN:
            yield f"has an element {element.tag}"
        yield from (f"has {name}" for name in element.attrib if _acts(name, element.attrib[name]))
    yield from _problems_of_style(picture)


def _acts(name: str, value: str) -> bool:
    """Return True if an attribute runs or loads something."""
    return name.startswith("on") or "href" in name or "url(" in value.replace("url(#", "")


def _problems_of_style(picture: ET.Element) -> Iterator[str]:
    style = style_of(picture)
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    without = set(COLOURED.findall(light)) ^ set(COLOURED.findall(dark))
    yield from (f"has {one} in light or dark alone" for one in sorted(without))
    if "url" in style or "@import" in style:
        yield "loads a style"
    width = float((picture.get("viewBox") or "").split()[2])
    sizes = [float(size) for size in re.findall(r"([\d.]+)px", style)]
    if min(sizes) * PHONE / width < TEXT_MIN:
        yield "has text too small for a phone"
    used = {name for element in picture.iter() for name in element.get("class", "").split()}
    yield from (f"lacks a class {name}" for name in used - set(re.findall(r"\.(\w+) \{", light)))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_read_everywhere(path: Path) -> None:
    assert [*problems(ET.parse(path).getroot())] == []


def test_pictures_look_alike() -> None:
    assert len({style_of(ET.parse(path).getroot()) for path in PICTURES}) == 1


@pytest.mark.parametrize(
    ("replaced", "planted", "said"),
    [
        ('role="img"', "", "is no svg of role img"),
        ("</title>", "</title><script>alert()</script>", f"has an element {SVG}script"),
        ("</desc>", "</desc><image/>", f"has an element {SVG}image"),
        ("<rect ", '<rect onclick="go()" ', "has onclick"),
        ("<rect ", '<rect fill="url(https://elsewhere/a)" ', "has fill"),
        ("17px", "11px", "has text too small for a phone"),
        (".step { fill: #161b22;", ".stop { fill: #161b22;", "has .step in light or dark alone"),
        ('class="step"', 'class="stop"', "lacks a class stop"),
        ("<style>", "<style>@import 'a.css';", "loads a style"),
    ],
)
def test_a_planted_problem_is_found(replaced: str, planted: str, said: str) -> None:
    text = PICTURES[0].read_text()
    assert replaced in text
    assert said in [*problems(ET.fromstring(text.replace(replaced, planted, 1)))]


def test_each_picture_is_on_a_page_with_its_content_in_words() -> None:
    shown = {
        (page.parent / target).resolve(): len(words.split())
        for page in PAGES
        for words, target in SHOWN.findall(page.read_text())
    }
    assert set(shown) == {*PICTURES, *SCREENS}
    assert all(path.stat().st_size < SCREEN_BYTES_MAX for path in SCREENS)
    assert min(shown.values()) >= WORDS_MIN, shown


def test_the_front_pages_link_each_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    reference = {f"api/{path.name}" for path in (ROOT / "docs" / "api").glob("*.md")}
    assert {*pages, *reference} - set(
        LINK.findall((ROOT / "docs" / "index.md").read_text())
    ) == set()
    linked = LINK.findall((ROOT / "README.md").read_text())
    assert pages - {target.removeprefix("docs/") for target in linked} == set()


@pytest.mark.parametrize("front", ["README.md", "docs/index.md"])
def test_a_front_page_begins_with_a_picture(front: str) -> None:
    """It stands before the first section, table and list."""
    text = (ROOT / front).read_text()
    opening = re.split(r"^(?:## |\||- )", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert SHOWN.search(opening)
