"""The documentation check bites: foreign addresses, dead links and failing examples are found."""

import subprocess
import sys
from pathlib import Path

import pytest

import documentation


@pytest.fixture
def repository(tmp_path):
    """A repository with one page, built, and nothing wrong in it."""
    for folder in ("docs", "site"):
        tmp_path.joinpath(folder).mkdir()
    tmp_path.joinpath("README.md").write_text("[page](docs/index.md#top) [out](https://example.org) `[x](no)`\n")
    tmp_path.joinpath("docs/index.md").write_text("# Page\n\n<!-- run -->\n```python\nx = 1\n```\n\nText.\n")
    tmp_path.joinpath("site/index.html").write_text(
        '<a href="https://example.org">out</a><script src="own.js"></script>'
    )
    tmp_path.joinpath("site/own.css").write_text("a { background: url(own.png) }")
    return tmp_path


def run(repository):
    """Run the program on a repository."""
    command = [sys.executable, documentation.__file__, str(repository / "site"), "--root", str(repository)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_clean_repository_passes(repository):
    finished = run(repository)
    assert (finished.returncode, finished.stdout) == (0, "docs: 1 pages, the examples of 1 run\n")


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("site/a.html", '<script src="https://cdn.example/x.js"></script>', "a.html: loads https://cdn.example/x.js"),
        ("site/a.html", '<link rel="stylesheet" href="//cdn.example/x.css">', "loads //cdn.example/x.css"),
        ("site/a.html", '<link rel="preconnect" href="https://fonts.example">', "loads https://fonts.example"),
        ("site/a.html", '<img alt="" src="http://cdn.example/x.png">', "loads http://cdn.example/x.png"),
        (
            "site/a.html",
            "<style>@font-face { src: url('https://f.example/x.woff') }</style>",
            "https://f.example/x.woff",
        ),
        ("site/deep/a.css", '@import "https://f.example/x.css";', "loads https://f.example/x.css"),
        ("packages/one/README.md", "[gone](gone.md)", "README.md: link to gone.md, which does not exist"),
        ("docs/a.md", "# A\n\n<!-- run -->\n```python\nx = 1 / 0\n```\n", "ZeroDivisionError"),
        ("docs/a.md", "<!-- run -->\n```python\nimport warnings\nwarnings.warn('old')\n```\n", "UserWarning: old"),
    ],
)
def test_a_fault_is_found(repository, path, text, message):
    file = Path(repository, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    finished = run(repository)
    assert finished.returncode == 1
    assert message in finished.stdout


def test_canonical_links_load_nothing(repository):
    repository.joinpath("site/a.html").write_text('<link rel="canonical" href="https://example.org/a.html">')
    assert run(repository).returncode == 0


def test_marked_blocks_form_one_program_at_their_own_lines():
    page = "# A\n<!-- run -->\n```python\nx = 1\n```\n```python\nnot run\n```\n\n<!-- run -->\n```python\ny = x\n```\n"
    assert documentation.example_of(page).splitlines() == ["", "", "", "x = 1", *[""] * 7, "y = x"]
