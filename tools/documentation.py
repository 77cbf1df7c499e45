"""Check the documentation: examples run, relative links lead somewhere, built pages load nothing from other hosts.

``python tools/documentation.py site`` looks at the built site, the pages in ``docs/``, and the Markdown files beside the
code. A Python block runs if the line before it is ``<!-- run -->``; the blocks of one page are one program, run in an empty
folder.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = re.compile(r"^<!-- run -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")
STYLE_URL = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s;]+)""")
TIMEOUT_SECONDS = 120
# Attributes through which a page loads something when it is opened; links that a reader may follow are not among them.
LOADING = {"link": "href", "object": "data"} | dict.fromkeys(
    ["audio", "embed", "iframe", "img", "script", "source", "video"], "src"
)
RELATIONS_THAT_LOAD_NOTHING = {"canonical", "next", "prev", "alternate", "author", "license", "edit"}


class LoadedAddresses(HTMLParser):
    """Collect what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one element's address and style."""
        values = {name: value or "" for name, value in attrs}
        address = values.get(LOADING.get(tag, ""), "")
        idle = tag == "link" and set(values.get("rel", "").split()) <= RELATIONS_THAT_LOAD_NOTHING
        if re.match(r"(https?:)?//", address) and not idle:
            self.found.append(address)
        self.found += STYLE_URL.findall(values.get("style", ""))
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        """Look into a style sheet inside the page."""
        if self._in_style:
            self.found += STYLE_URL.findall(data)
            self._in_style = False


def check_addresses(site: Path) -> Iterator[str]:
    """Find scripts, styles, fonts and pictures that a built page would load from another host."""
    for page in sorted(site.rglob("*.html")):
        parser = LoadedAddresses()
        parser.feed(page.read_text(encoding="utf-8"))
        yield from (f"{page.relative_to(site)}: loads {address}" for address in parser.found)
    for style in sorted(site.rglob("*.css")):
        found = STYLE_URL.findall(style.read_text(encoding="utf-8"))
        yield from (f"{style.relative_to(site)}: loads {address}" for address in found)


def check_links(root: Path) -> Iterator[str]:
    """Find relative links that lead nowhere, in the Markdown files outside ``docs/`` (there the builder checks them)."""
    for page in [*sorted(root.glob("*.md")), *sorted(root.glob("packages/*/*.md"))]:
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                yield f"{page.relative_to(root)}: link to {target}, which does not exist"


def example_of(page: str) -> str:
    """Return the marked blocks of a page as one program, each at its line of the page so that tracebacks point there."""
    program = ""
    for match in EXAMPLE.finditer(page):
        program += "\n" * (page.count("\n", 0, match.start(1)) - program.count("\n")) + match[1]
    return program


def run_example(page: Path) -> str | None:
    """Run the marked blocks of a page; return what went wrong, or None."""
    program = example_of(page.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, f"{page.stem}.py")
        copy.write_text(program, encoding="utf-8")
        try:
            finished = subprocess.run(
                [sys.executable, "-W", "error", str(copy)],
                cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{page}: the example ran for more than {TIMEOUT_SECONDS} s"
    return f"{page}: the example fails\n{finished.stderr}" if finished.returncode else None


def main() -> int:
    """Print what is wrong and return the exit status."""
    parser = argparse.ArgumentParser(description="Check the documentation.")
    parser.add_argument("site", type=Path, help="folder of the built pages")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    arguments = parser.parse_args()
    pages = sorted(arguments.root.glob("docs/**/*.md"))
    examples = [page for page in pages if example_of(page.read_text(encoding="utf-8"))]
    findings = [*check_addresses(arguments.site), *check_links(arguments.root)]
    with ThreadPoolExecutor(2) as pool:
        findings += [finding for finding in pool.map(run_example, examples) if finding]
    print("\n".join(findings) if findings else f"docs: {len(pages)} pages, the examples of {len(examples)} run")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
