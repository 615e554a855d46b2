"""Colours and typeface of pages and pictures: one palette in two themes, one typeface. The report and the playground share it.

One accent colour, for what is ours. `SIGNAL` is for what went wrong: a draft token that was rejected, a request that failed.
"""

_COLOURS = {
    "surface": ("#ffffff", "#161b1f"),
    "grid": ("#e4e7ea", "#2a3137"),
    "faint": ("#c4cad0", "#3d464e"),
    "soft": ("#8a949e", "#6b7680"),
    "muted": ("#5a646d", "#a2adb6"),
    "ink": ("#1d2429", "#e8ecef"),
    "accent": ("#0b7a8c", "#48bfd2"),
    "tint": ("#4f9fac", "#2b7f8d"),
}
LIGHT, DARK = ({name: colours[i] for name, colours in _COLOURS.items()} for i in range(2))
PAGE = ("#f6f7f8", "#0f1316")
"""Behind the surfaces, in the light and in the dark."""
SIGNAL = ("#a8460c", "#f2a065")
TIMES = "\N{MULTIPLICATION SIGN}"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
