"""What stands in a terminal, as a page: tmux's text with its colours becomes HTML."""

import html
import re

COLOURS = {
    30: "#1c2430", 31: "#ff8f86", 32: "#5fd3a6", 33: "#f0b94a", 34: "#85b4ff", 35: "#d7a6ff",
    36: "#6fd6e8", 37: "#e7ecf3", 90: "#8995a5", 91: "#ff8f86", 92: "#5fd3a6", 93: "#f0b94a",
    94: "#85b4ff", 95: "#d7a6ff", 96: "#6fd6e8", 97: "#ffffff",
}
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
# One of 256 colours, of which the first sixteen have codes of their own.
INDEXED = re.compile(r"38;5;(\d+)")
# Curves are drawn with these, which few fonts give the width of the others.
BRAILLE = re.compile("[\u2800-\u28ff]")
# Charset changes and whatever else says nothing about colours.
OTHER = re.compile(r"\x1b[()][A-Z0-9]|\x1b\[[0-9;?]*[A-Zln-z]|[\x0e\x0f]")

PAGE = """<!doctype html><meta charset="utf-8"><title>shoal top</title><style>
body {{ margin: 0; background: #10151c; color: #e7ecf3; }}
pre {{ margin: 0; padding: 12px; width: max-content; font: 14px/1.2 "DejaVu Sans Mono", monospace; }}
i {{ display: inline-block; width: 1ch; height: 1.2em; overflow: hidden; vertical-align: bottom; font-style: normal; }}
</style><pre>{text}</pre>"""


def page(text):
    """A page of what `tmux capture-pane -e` gave."""
    text = OTHER.sub("", text)
    parts, style, end = [], {}, 0
    for match in ESCAPE.finditer(text):
        parts.append(styled(text[end:match.start()], style))
        codes = INDEXED.sub(lambda found: str(base_code(int(found.group(1)))), match.group(1))
        style = changed(style, [int(code or 0) for code in codes.split(";")])
        end = match.end()
    parts.append(styled(text[end:], style))
    return PAGE.format(text="".join(parts))


def base_code(number):
    """The code of one of the first sixteen colours; of any other that of plain text."""
    return 30 + number if number < 8 else 82 + number if number < 16 else 39


def changed(style, codes):
    """A style after some of a terminal's codes."""
    style = dict(style)
    for code in codes:
        if code == 0:
            style = {}
        elif code == 1:
            style["font-weight"] = "bold"
        elif code == 2:
            style["opacity"] = "0.65"
        elif code == 22:
            style.pop("font-weight", None)
            style.pop("opacity", None)
        elif code == 39:
            style.pop("color", None)
        elif code in COLOURS:
            style["color"] = COLOURS[code]
    return style


def styled(text, style):
    """A piece of text in a style."""
    text = BRAILLE.sub(lambda found: f"<i>{found.group(0)}</i>", html.escape(text))
    if not style or not text:
        return text
    rules = "; ".join(f"{name}: {value}" for name, value in sorted(style.items()))
    return f'<span style="{rules}">{text}</span>'
