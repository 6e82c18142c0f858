"""A few shapes of SVG, in colours that follow a page from light to dark."""

from __future__ import annotations

from html import escape

# One colour for each axis, on every picture: (on light paper, on dark paper).
COLOURS = {
    "ink": ("#1f2430", "#e4e7ee"),
    "soft": ("#5a6270", "#a7afbd"),
    "line": ("#a9b1bf", "#5d6675"),
    "x": ("#1769d2", "#6cb0ff"),
    "y": ("#11835a", "#4fd3a0"),
    "z": ("#b3560a", "#ffae5c"),
    "data": ("#7b45c9", "#c19bff"),
}
AXES = ("x", "y", "z", "data")


def style() -> str:
    """A page of the site says which scheme is on; a picture by itself asks the reader's system."""
    light, dark = (
        "{" + "".join(f"--{name}:{both[i]};" for name, both in COLOURS.items()) + "}" for i in (0, 1)
    )
    rules = [
        f".ff-picture{light}",
        f"@media (prefers-color-scheme:dark){{.ff-picture{dark}}}",
        f"[data-md-color-scheme=default] .ff-picture{light}",
        f"[data-md-color-scheme=slate] .ff-picture{dark}",
        ".ff-picture{max-width:100%;height:auto;font:13px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}",
        ".ff-picture text{fill:var(--ink)}",
        ".ff-picture .soft{fill:var(--soft)}",
        ".ff-picture .small{font-size:11.5px}",
        ".ff-picture .bold{font-weight:650}",
        ".ff-picture .plain{fill:var(--line);fill-opacity:.13;stroke:var(--line)}",
        ".ff-picture .frame{fill:none;stroke:var(--line)}",
        ".ff-picture .chosen{fill:var(--ink);fill-opacity:.1;stroke:var(--ink);stroke-width:2}",
        ".ff-picture .dashed{stroke-dasharray:4 4}",
        ".ff-picture .stroke-soft{stroke:var(--soft);fill:none}",
        ".ff-picture .head-soft{fill:var(--soft)}",
    ]
    for axis in AXES:
        rules += [
            f".ff-picture .{axis}{{fill:var(--{axis});fill-opacity:.16;stroke:var(--{axis})}}",
            f".ff-picture .{axis}-strong{{fill:var(--{axis});fill-opacity:.5;stroke:var(--{axis})}}",
            f".ff-picture .stroke-{axis}{{stroke:var(--{axis});fill:none}}",
            f".ff-picture text.{axis}{{fill:var(--{axis});fill-opacity:1;stroke:none}}",
            f".ff-picture .head-{axis}{{fill:var(--{axis})}}",
        ]
    return "\n".join(rules)


class Picture:
    """An SVG that grows shape by shape; lengths are in pixels of its own size."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._title, self._width, self._height = title, width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, look: str, *, radius: float = 5) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{look}"/>'
        )

    def text(self, x: float, y: float, words: str, look: str = "", *, anchor: str = "middle") -> None:
        """Lines are divided by a newline; ``y`` is the base of the first."""
        for i, line in enumerate(words.split("\n")):
            self._parts.append(
                f'<text x="{x:g}" y="{y + 16 * i:g}" text-anchor="{anchor}" class="{look}">{escape(line)}</text>'
            )

    def labelled(
        self, x: float, y: float, width: float, height: float, look: str, words: str, text: str = ""
    ) -> None:
        """A box with its words in the middle."""
        self.box(x, y, width, height, look)
        lines = words.count("\n") + 1
        self.text(x + width / 2, y + height / 2 + 4.5 - 8 * (lines - 1), words, text)

    def line(self, points: list[tuple[float, float]], look: str = "soft", *, width: float = 1.5) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="stroke-{look}" stroke-width="{width:g}"/>')

    def arrow(self, points: list[tuple[float, float]], look: str = "soft", *, width: float = 1.5) -> None:
        """A line along ``points``, all horizontal or vertical, with a head at the last."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        self.line([*points[:-1], (x1 - 5 * dx, y1 - 5 * dy)], look, width=width)
        tips = [
            (x1, y1),
            (x1 - 8 * dx + 4 * dy, y1 - 8 * dy + 4 * dx),
            (x1 - 8 * dx - 4 * dy, y1 - 8 * dy - 4 * dx),
        ]
        path = " ".join(f"{x:g},{y:g}" for x, y in tips)
        self._parts.append(f'<polygon points="{path}" class="head-{look}"/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="ff-picture" width="{self._width}" '
                f'height="{self._height}" viewBox="0 0 {self._width} {self._height}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>\n{style()}\n</style>",
                *self._parts,
                "</svg>",
                "",
            ]
        )
