"""Tables of a report, as text for the terminal (Markdown) and as one self-contained HTML page."""

import dataclasses
import html
from collections.abc import Sequence

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}"
    "td,th{padding:.15rem .8rem;border-bottom:1px solid #ddd;text-align:right;"
    "font-variant-numeric:tabular-nums}td:first-child,th:first-child{text-align:left}"
    "svg{max-width:100%;height:auto}"
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A titled table; cells are shown as they are."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def as_text(sections: Sequence[Section]) -> str:
    """The sections as aligned Markdown tables."""
    return "\n\n".join(_text_section(section) for section in sections) + "\n"


def as_html(title: str, sections: Sequence[Section], picture_svg: str) -> str:
    """One page with the picture inline; it loads nothing and runs nothing."""
    body = [f"<h1>{html.escape(title)}</h1>", picture_svg]
    for section in sections:
        body.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.note:
            body.append(f"<p>{html.escape(section.note)}</p>")
        body.append("<table>" + _html_row(section.headings, "th"))
        body += [_html_row(row, "td") for row in section.rows]
        body.append("</table>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return (
        f"<!doctype html>\n<html><head>{head}</head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def percent(share: float) -> str:
    """A share as per cent with two decimals."""
    return f"{100 * share:.2f}%"


def _text_section(section: Section) -> str:
    rows = [section.headings, *section.rows]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    pad = [str.ljust if _is_words(column[1:]) else str.rjust for column in columns]
    lines = [f"## {section.title}", ""]
    lines += [section.note, ""] if section.note else []
    rule = ["-" * w + ("-" if p is str.ljust else ":") for w, p in zip(widths, pad, strict=True)]
    body = [" | ".join(p(c, w) for p, c, w in zip(pad, row, widths, strict=True)) for row in cells]
    lines += [f"| {body[0]} |", f"|-{'|-'.join(rule)}|", *(f"| {line} |" for line in body[1:])]
    return "\n".join(lines)


def _is_words(cells: Sequence[str]) -> bool:
    return any(cell[:1].isalpha() or not cell[:1].isascii() for cell in cells)


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
