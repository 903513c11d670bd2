"""Pages of the site that are generated when it is built: the command line, logs of results, exports and changelog."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [
    readme.parent for kind in ("benchmarks", "experiments") for readme in sorted(ROOT.glob(f"{kind}/*/README.md"))
]
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures of benchmarks and experiments, and the changelog."""
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.md")):
            text = _LINK.sub(lambda link, path=path: _relink(link, path), path.read_text())
            files.append(File.generated(config, _uri(path), content=text))
        for path in sorted(folder.rglob("*.png")):
            files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is read from the code."""
    if "<!-- command line -->" in markdown:
        markdown = markdown.replace("<!-- command line -->", command_line())
    if "<!-- exports -->" in markdown:
        markdown = markdown.replace("<!-- exports -->", exports())
    return markdown


def command_line() -> str:
    """The reference of all commands in Markdown."""
    try:
        from petra.cli.reference import markdown
    except ImportError:
        return _argparse_help()
    text = markdown().removeprefix("# Command line\n")
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), text)  # code in tables needs no escape here


def exports() -> str:
    """A table of the names in ``petra``, with links to where they are documented."""
    import petra

    rows = ["| name | summary |", "| --- | --- |"]
    for name in petra.__all__:
        found = getattr(petra, name)
        module = getattr(found, "__module__", "")
        if inspect.ismodule(found):
            rows.append(f"| [`petra.{name}`]({name}.md) | {_summary(found)} |")
        elif module.startswith("petra."):
            package = ".".join(module.split(".")[:2])
            rows.append(f"| [`petra.{name}`][{package}.{name}] | {_summary(found)} |")
    return "\n".join(rows)


def _summary(found: Any) -> str:
    return (inspect.getdoc(found) or "").partition("\n")[0].replace("|", "\\|")


def _argparse_help() -> str:
    os.environ["COLUMNS"] = "100"
    from petra.cli.main import build_parser

    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return "\n\n".join(
        f"## petra {name}\n\n```text\n{parser.format_help()}```" for name, parser in commands.choices.items()
    )


def _uri(path: Path) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    path = path / "README.md" if path.is_dir() else path
    for folder in FOLDERS:
        if path == folder / "README.md":
            return f"results/logs/{folder.name}.md"
        if path.is_relative_to(folder) and path.suffix in (".md", ".png"):
            return f"results/logs/{folder.name}/{path.relative_to(folder).as_posix()}"
    return None


def _relink(link: re.Match[str], page: Path) -> str:
    """A link of a page outside docs/, as seen from its place on the site."""
    text, target, anchor = link[1], link[2], link[3] or ""
    if not target or "://" in target:
        return link[0]
    start, uri = _uri(page), _uri((page.parent / target).resolve())
    if start is None or uri is None:  # a script or a result, which stays in the repository
        return text.removeprefix("!")[1:-1]
    return f"{text}({os.path.relpath(uri, Path(start).parent.as_posix())}{anchor})"
