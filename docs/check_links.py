"""Check that every relative link in the Markdown files of this repository leads somewhere, headings included.

python docs/check_links.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "docs", "docs/decisions", "examples", "tests", "benchmarks", "lightning_3d", "lightning_3d/*")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def markdown_files(root: Path = ROOT) -> list[Path]:
    """The Markdown files that belong to the project (not those of a virtual environment inside it)."""
    return sorted({file for folder in FOLDERS for file in root.glob(f"{folder}/*.md")})


def anchors(text: str) -> set[str]:
    """The names under which headings can be linked, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _without_fences(text), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(name)
    return found


def broken_links(file: Path) -> list[str]:
    """The links of a file that lead nowhere, each with the reason."""
    broken = []
    for found in LINK.finditer(_without_code(file.read_text())):
        target = found[1] or found[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (file.parent / path).resolve() if path else file
        if not to.exists():
            broken.append(f"{target}: there is no {path}")
        elif anchor and to.suffix == ".md" and anchor not in anchors(to.read_text()):
            broken.append(f"{target}: {to.name} has no heading #{anchor}")
    return broken


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", _without_fences(text))


def _without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def main() -> int:
    """Print the broken links. Returns 1 if there are any."""
    files = markdown_files()
    broken = [f"{file.relative_to(ROOT)}: {link}" for file in files for link in broken_links(file)]
    print("\n".join(broken) if broken else f"all relative links of {len(files)} Markdown files are good")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
