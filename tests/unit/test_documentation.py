"""The README and every page of the site: Python runs when pasted, and commands have the options they show."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers.libraries import library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


def blocks(page, header):
    """The code of every block of a page whose first line is ```` ``` ```` and the header."""
    found = re.findall(r"^ *(```+)([^\n`]*)\n(.*?)^ *\1 *$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [code for _, start, code in found if start.strip() == header]


def name(page):
    return str(page.relative_to(ROOT))


LIBRARIES = {"integrations": ("transformers", "accelerate", "lightning")}
"""What pages use that may be missing."""


def run_blocks(page, seed=0):
    """Run the Python of a page from top to bottom, as someone does who pastes it into one session."""
    for used in LIBRARIES.get(page.stem, ()):
        library(used)
    namespace: dict = {"__name__": "__main__"}
    torch.manual_seed(seed)
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{name(page)}, block {number}", "exec"), namespace)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Files that pages write go into a folder of the test; names that they register are forgotten."""
    from petra.methods import METHODS
    from petra.models import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    known = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(known)


@pytest.mark.parametrize("page", [p for p in PAGES[1:] if blocks(p, "python")], ids=name)
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|torch.distributed is)")  # of other libraries
def test_python_of_a_page_runs(page, capsys):
    run_blocks(page)
    if page.stem == "own-network":
        assert float(re.search(r"accuracy=([\d.]+)", capsys.readouterr().out)[1]) > 0.8


@pytest.fixture
def mkldnn():
    """The kernels that PyTorch uses outside of tests; for a whole training, they are worth their set-up."""
    before = torch.backends.mkldnn.set_flags(True)
    yield
    torch.backends.mkldnn.set_flags(*before)


@pytest.mark.usefixtures("elsewhere", "mkldnn")
def test_the_first_example_of_the_readme_reaches_95_percent(capsys):
    first = blocks(README, "python")[0]
    torch.manual_seed(1)
    exec(compile(first, "README, first example", "exec"), {})
    assert float(re.search(r"accuracy=([\d.]+)", capsys.readouterr().out)[1]) > 0.95


@pytest.mark.usefixtures("elsewhere")
def test_the_second_example_of_the_readme_inverts(capsys):
    _, second = blocks(README, "python")
    exec(compile(second, "README, second example", "exec"), {})
    assert capsys.readouterr().out.startswith("inverts: inputs come back to")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_that_is_not_run_compiles(page):
    for code in blocks(page, "{ .python .no-run }"):
        compile(code, name(page), "exec")
    unknown = {h for _, h in re.findall(r"^ *(```+)([^\n`]*python[^\n`]*)$", page.read_text(), flags=re.MULTILINE)}
    assert unknown <= {"python", "{ .python .no-run }"}, "a block that no test sees"


def test_few_blocks_are_not_run():
    assert sum(len(blocks(page, "{ .python .no-run }")) for page in PAGES) <= 3


def commands(page):
    """Every call of petra in shell blocks and in inline code that looks like a whole command."""
    lines = [line for code in blocks(page, "bash") for line in code.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(petra [a-z]+ [^`…]*)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    for line in lines:
        for command in line.split(";"):
            words = shlex.split(command, comments=True)
            if words[:1] == ["petra"]:
                yield words[1:]
            elif "petra" in words and words[words.index("petra") - 1] == "-m":
                yield words[words.index("petra") + 1 :]


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=name)
def test_commands_of_a_page_parse(page):
    from petra.cli.main import build_parser

    parser = build_parser()
    for arguments in commands(page):
        if not set(arguments) <= {"--help", "--version"}:
            parser.parse_args(arguments)


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_outside_the_site_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_readme_is_short_and_names_the_commands():
    text = README.read_text()
    assert len(text.split()) <= 900
    for command in ("pip install .", "make demo", "make test"):
        assert command in text


def test_claims_of_the_comparison_have_tests():
    """Every line names files of this repository that prove it."""
    text = (ROOT / "docs" / "guides" / "comparison.md").read_text()
    paths = re.findall(r"`((?:tests|examples)/[^`]+)`", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for row in re.findall(r"^\| [^|]* \| yes.*$", text, flags=re.MULTILINE):
        assert re.search(r"`(tests|examples)/", row), row


def test_pages_fetch_nothing():
    pattern = re.compile(r"https?://(?!www\.w3\.org)[^\s\"')>]+")
    for page in [*PAGES, ROOT / "mkdocs.yml"]:
        assert not pattern.findall(page.read_text()), page


@pytest.mark.parametrize("schedule", ["lock-step", "low-staleness"])
def test_pictures_are_those_of_the_command(schedule, tmp_path, capsys):
    from petra.cli.main import main

    drawn = tmp_path / "drawn.svg"
    main(["schedule", schedule, "--stages", "4", "--microbatches", "7", "--svg", str(drawn)])
    assert drawn.read_text() == (ROOT / "docs" / "images" / f"{schedule}.svg").read_text()
