"""What every page is made of: pictures, tables, and the script that draws them, in one file that asks no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from plotly.offline import get_plotlyjs

_CONFIG = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "responsive": True,
    "scrollZoom": True,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; margin: 0 auto; max-width: 1280px; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; } h1 + p, .note { color: #57606a; }
.note { margin: 0 0 8px; font-size: 14px; } section { margin-top: 12px; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; } .scroll { max-height: 420px; overflow: auto; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid #eaeef2; vertical-align: top; }
td:first-child { white-space: nowrap; }
th { color: #57606a; font-weight: 600; position: sticky; top: 0; background: white; } td.n { text-align: right; }
.missing { background: #fff8e5; border-left: 4px solid #d4a72c; padding: 8px 12px; margin: 12px 0; }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.fact { border: 1px solid #d8dee4; border-radius: 8px; padding: 8px 16px; } .fact b { display: block; font-size: 20px; }
.bad { color: #b42318; } hr { border: 0; border-top: 2px solid #d8dee4; margin: 48px 0 24px; }
"""


def write_html(title: str, parts: Iterable[str], file: TextIO) -> None:
    file.write(f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{text(title)} - everstep</title>")
    file.write(f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>\n")
    file.writelines(parts)
    file.write("</body></html>\n")


def text(words: object) -> str:
    return html.escape(str(words))


def headline(title: str, note: str) -> str:
    return f"<h1>{text(title)}</h1><p>{text(note)}</p>\n"


def warning(sentences: Sequence[str]) -> str:
    return "<div class='missing'>" + "<br>".join(map(text, sentences)) + "</div>\n" if sentences else ""


def cards(facts: Mapping[str, str]) -> str:
    """What is to be seen first."""
    inner = "".join(f"<div class='fact'><b>{text(value)}</b>{text(name)}</div>" for name, value in facts.items())
    return f"<div class='facts'>{inner}</div>\n"


def section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2><p class='note'>{text(note)}</p>{body}</section>\n"


def drawn(figure: Any) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{text(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>\n"


def inputs_of(inputs: Mapping[str, float], assumed: Sequence[str] = ()) -> str:
    """What went into a number."""
    return ", ".join(f"{name} {value:.3g}{' (assumed)' if name in assumed else ''}" for name, value in inputs.items())
