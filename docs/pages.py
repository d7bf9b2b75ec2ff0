"""Collects the pages of the site, which ``make docs`` builds. These are hooks that ``mkdocs.yml`` names.

The pages keep their paths in the repository, so that links between them work both in the repository and on the site. A
link to another file of the repository, such as code, becomes plain text, because the site has no copy of that file.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

import zckpt
from zckpt import errors, types

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
GATHERED = (
    "*.md", "docs/**/*.md", "docs/*.svg", "docs/pictures/*", "spec/*.md", "bench/results/*.md", "bench/results/*.svg",
)  # fmt: skip
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Adds each page of docs/ that ``mkdocs.yml`` does not list to the guides. Its title is its first heading."""
    assert config.nav is not None
    sections: dict[str, Any] = {title: entry for section in config.nav for title, entry in section.items()}
    listed = set(re.findall(r"docs/[\w/-]+\.md", str(sections)))
    written = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")}
    sections["Guides"] += sorted(written - listed)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    of_themes = [file for file in files if not str(file.abs_src_path).startswith(config.docs_dir)]
    paths = sorted(path for pattern in GATHERED for path in ROOT.glob(pattern))
    pages = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths]
    return Files([*of_themes, *pages, File.generated(config, "docs/api.md", content=api())])


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    def without_broken_link(link: re.Match[str]) -> str:
        target = normpath(join(dirname(page.file.src_uri), link[2]))
        is_off_site = files.get_file_from_path(target) is None and (ROOT / target).exists()
        return link[1] if is_off_site else link[0]

    return _LINK.sub(without_broken_link, markdown)


def api() -> str:
    """Returns the page about all public names. Their docstrings describe them."""
    paths: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    classes = [name for of in (errors, types) for name in dir(of) if isinstance(getattr(of, name), type)]
    of_types = {*dir(types)} - {*zckpt.__all__}  # only type checkers find these names in the package itself
    for name in sorted({*zckpt.__all__, *zckpt._HOME, *classes}):
        value = getattr(zckpt, name)
        path = f"zckpt.types.{name}" if name in of_types else f"zckpt.{name}"
        if isinstance(value, type):
            paths["Errors" if issubclass(value, zckpt.ZckptError) else "Classes"].append(path)
        elif callable(value):
            paths["Functions"].append(path)
    listed = (f"## {kind}\n\n" + "\n\n".join(f"::: {path}" for path in of_kind) for kind, of_kind in paths.items())
    return "# API\n\n" + "\n\n".join(listed) + "\n"
