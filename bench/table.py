"""Tables in Markdown."""

import textwrap


def show(title, notes, header, rows):
    """Prints a table under its title and its notes."""
    print(f"\n## {title}\n", flush=True)
    print(textwrap.fill(notes, width=100))
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    aligned = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in cells
    ]
    aligned.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n" + "\n".join(aligned), flush=True)


def rate(tokens_per_second):
    return f"{tokens_per_second:,.0f}"


def times(value):
    return f"{value:.2f}x"


def megabytes(count):
    return f"{count / 1e6:,.0f} MB"


def goal(value, least):
    """Whether a goal is met, for the last column of a table."""
    return f"{'met' if value >= least else 'NOT met'} (at least {least:.2f}x)"
