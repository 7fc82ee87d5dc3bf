"""What the README shows is there and runs."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_picture_is_well_formed() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot()
    assert picture.tag.endswith("svg")
    shown = " ".join("".join(element.itertext()) for element in picture.iter())
    for part in ("embedding", "KDA", "MLA + DSA", "bank", "MoE", "head"):
        assert part in shown


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets


@pytest.mark.slow
def test_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    assert capsys.readouterr().out.rstrip().endswith("4096)")
    assert {"model", "reply", "one"} <= set(names)
