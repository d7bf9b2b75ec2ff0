"""The page of zckpt.report as text: one HTML file with its data, its scripts and its styles in it.

Names of tensors, paths and messages come from checkpoints, which may be made to do harm. The template escapes all of
them; the data that scripts read are compressed, so that nothing in them can end a script; and the policy in the head of
the page allows no scripts but its own, and no network.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError
from zckpt.reporting.page_data import to_json
from zckpt.validation.report import WHAT
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.reporting.page_data import PageData


@dataclass(frozen=True, slots=True)
class Libraries:
    """The scripts of others that the page has in it."""

    plotly: bytes
    """The charts."""
    datatables: bytes
    """The table of tensors: a module whose default export is DataTables."""
    versions: str


def find_libraries() -> Libraries:
    """Raises UnsupportedError where one is not installed."""
    try:
        import jinja2  # noqa: F401  which makes the page

        plotly, itables = distribution("plotly"), distribution("itables")
        return Libraries(
            plotly.locate_file("plotly/package_data/plotly.min.js").read_bytes(),  # type: ignore[attr-defined]
            itables.locate_file("itables/html/dt_bundle.js").read_bytes(),  # type: ignore[attr-defined]
            f"plotly {plotly.version}, itables {itables.version}",
        )
    except (ImportError, PackageNotFoundError) as error:
        raise UnsupportedError(
            f"a report has the scripts of plotly and itables in it: {error}", hint="pip install 'zckpt[report]'"
        ) from error


def render(data: PageData, libraries: Libraries) -> bytes:
    """The file."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    folder = files("zckpt.reporting") / "template"
    template, style, script = ((folder / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    text = environment.from_string(template).render(
        data=data,
        last=data.summaries[-1],
        what=WHAT,
        version=__version__,
        libraries=libraries.versions,
        style=style,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        packed={
            "data": _packed(json.dumps(to_json(data), allow_nan=False, separators=(",", ":")).encode()),
            "plotly": _packed(libraries.plotly),
            "datatables": _packed(libraries.datatables),
        },
    )
    return text.encode(errors="replace")  # a path may have bytes that are no UTF-8


def _packed(raw: bytes) -> str:
    """As text that stands in HTML as it is, a third of the size."""
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()
