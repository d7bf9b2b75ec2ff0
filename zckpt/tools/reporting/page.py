"""Makes the page of zckpt.report: one HTML file that contains its data, its scripts and its styles.

Names of tensors, paths and messages come from checkpoints, and a checkpoint may be malicious. So the template escapes
all of them, and what is not printable in them. The data for the scripts are compressed and encoded in base64, so that
nothing in them can end a script. The security policy in the head of the page allows only the page's own scripts, and no
network.
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

from zckpt.errors import UnsupportedError, printable
from zckpt.tools.validating.report import WHAT
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.tools.reporting.page_data import PageData


@dataclass(frozen=True, slots=True)
class Libraries:
    """The scripts of other projects that the page contains."""

    plotly: bytes
    """The script that draws the charts."""
    datatables: bytes
    """The script that makes the table of tensors. It is a module whose default export is DataTables."""
    versions: str
    """The names and versions of these scripts as a text."""


def find_libraries() -> Libraries:
    """Returns the scripts from the installed packages. Raises UnsupportedError if a package is not installed."""
    try:
        import jinja2  # noqa: F401  for ``render``

        plotly, itables = distribution("plotly"), distribution("itables")
        return Libraries(
            plotly.locate_file("plotly/package_data/plotly.min.js").read_bytes(),  # type: ignore[attr-defined]
            itables.locate_file("itables/html/dt_bundle.js").read_bytes(),  # type: ignore[attr-defined]
            f"plotly {plotly.version}, itables {itables.version}",
        )
    except (ImportError, PackageNotFoundError) as error:
        raise UnsupportedError(
            f"a report needs plotly, itables and jinja2: {error}", hint="pip install 'zckpt[report]'"
        ) from error


def render(data: PageData, libraries: Libraries) -> bytes:
    """Returns the bytes of the page."""
    import jinja2

    from zckpt.tools.reporting.page_data import to_json  # imported late, because ``find_libraries`` needs no torch

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    folder = files("zckpt.tools.reporting") / "template"
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
    return text.encode()


def _packed(raw: bytes) -> str:
    """Returns the bytes, compressed and encoded in base64, as a text that needs no escapes in HTML."""
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()
