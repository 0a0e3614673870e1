"""The commands in the documents are ones that ``frspec`` takes."""

import re
import shlex
from pathlib import Path

import pytest

from sgl_frspec import cli

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "token-map.md", *sorted((DOCS / "recipes").glob("*.md"))]
MAP_COMMANDS = ("rank", "inspect", "diff", "merge", "cut", "convert", "choose")


def commands(page):
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.S | re.M):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            for part in line.split("&&"):
                words = shlex.split(part.replace("…", ""))
                if words[:1] == ["frspec"] and words[1] in MAP_COMMANDS:
                    yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page):
    found = list(commands(page))
    assert found
    for words in found:
        module = cli._import_command(words[0])
        args = cli._parser(words[0], module).parse_args(words)
        assert args.command == words[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
