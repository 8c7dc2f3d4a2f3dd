"""README.md and docs/ as tests read them: blocks, sections, links, code words and commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README, BENCHMARKS, SUPPORT = "README.md", "docs/benchmarks.md", "docs/support.md"
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )?(?:make|megamoe|python3?|pytest|torchrun|pip) \S")


def block(marker: str, page: str = README) -> str:
    """The fenced block behind <!-- marker -->."""
    match = re.search(rf"^<!-- {marker} -->\n```\w*\n(.*?)^```$", PAGES[page], re.S | re.M)
    assert match is not None, f"{page} has no block behind <!-- {marker} -->"
    return match[1]


def section(title: str, page: str = README) -> str:
    """From the heading of a section to the next one that is not below it."""
    match = re.search(rf"^(#+) {re.escape(title)}\n", PAGES[page], re.M)
    assert match is not None, f"{page} has no section {title}"
    return re.split(rf"^#{{1,{len(match[1])}}} ", PAGES[page][match.end() :], flags=re.M)[0]


def first_column(text: str) -> list[str]:
    """Code words that begin the rows of a table."""
    return re.findall(r"^\| `([\w.-]+)`", text, re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of the first table in a text, its head left out."""
    lines = [line for line in text.splitlines() if line.lstrip().startswith("|")]
    start = text.splitlines().index(lines[0])
    table = []
    for line in text.splitlines()[start:]:
        if not line.lstrip().startswith("|"):
            break
        table.append([cell.strip(" `") for cell in line.strip().strip("|").split("|")])
    return table[2:]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def code_words(text: str) -> list[str]:
    """What stands in backquotes outside of fenced blocks."""
    return [" ".join(word.split()) for word in re.findall(r"`([^`]+)`", prose(text))]


def links(text: str) -> list[str]:
    """Targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def anchors(text: str) -> set[str]:
    """What #... links of a page may point to."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> list[str]:
    """Shell commands of a page: lines of sh blocks, lines behind "$ ", and code words."""
    found = [word for word in code_words(text) if COMMAND.match(word)]
    for _, language, body in FENCE.findall(text):
        for line in body.splitlines():
            command = line.strip() if language == "sh" else line.partition("$ ")[2]
            if language == "sh" or line.startswith("$ "):
                found.append(re.split(r"\s{2,}#", command)[0].strip())
    return [command for command in found if command]
