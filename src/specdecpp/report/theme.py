"""Colours and typeface of pages and pictures: one palette in two themes, one typeface. The report and the playground share it.

One accent colour, for what is ours. `SIGNAL` is for what went wrong: a draft token that was rejected, a request that failed.
"""

LIGHT = {
    "surface": "#ffffff",
    "grid": "#e4e7ea",
    "faint": "#c4cad0",
    "soft": "#8a949e",
    "muted": "#5a646d",
    "ink": "#1d2429",
    "accent": "#0b7a8c",
    "tint": "#4f9fac",
}
DARK = {
    "surface": "#161b1f",
    "grid": "#2a3137",
    "faint": "#3d464e",
    "soft": "#6b7680",
    "muted": "#a2adb6",
    "ink": "#e8ecef",
    "accent": "#48bfd2",
    "tint": "#2b7f8d",
}
PAGE = ("#f6f7f8", "#0f1316")
"""Behind the surfaces, in the light and in the dark."""
SIGNAL = ("#a8460c", "#f2a065")
TIMES = "\N{MULTIPLICATION SIGN}"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
