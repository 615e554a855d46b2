"""What the site builder asks of us while it builds: the README as the first page, the reference from the code, links that
hold on the site as they do in the repository.

    properdocs build -> on_files (two more pages) -> on_page_markdown (links) -> build/docs
"""

import re
from pathlib import Path
from typing import Any

from properdocs.structure.files import File, Files
from reference import reference

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
PICTURES = (".svg", ".png")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference.md", content=reference(ROOT / "src")))
    for folder in (ROOT, ROOT / "docs"):
        for page in folder.glob("*.md"):
            for link in LINK.finditer(page.read_text(encoding="utf-8")):
                add_picture(files, config, (folder / link["target"]).resolve())
    return files


def add_picture(files: Files, config: Any, path: Path) -> None:
    """A picture from elsewhere in the repository, under the same path on the site."""
    if path.suffix in PICTURES and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs") and path.exists():
        name = path.relative_to(ROOT).as_posix()
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them."""
    folder = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"
    return LINK.sub(lambda link: site_link(link, folder), markdown)


def site_link(link: re.Match[str], folder: Path) -> str:
    """A link to another page or picture, relative to docs/; one to any other file of the repository becomes its name."""
    path = (folder / link["target"]).resolve()
    if "://" in link["target"] or not path.exists():
        return link[0]
    if path.is_relative_to(ROOT / "docs") and path.suffix in (".md", *PICTURES):
        target = path.relative_to(ROOT / "docs").as_posix()
    elif path == ROOT / "README.md":
        target = "index.md"
    elif path.suffix in PICTURES:
        target = path.relative_to(ROOT).as_posix()
    else:
        return f"{link['text']} (`{path.relative_to(ROOT).as_posix()}`)"
    return f"{link['image']}[{link['text']}]({target}{link['anchor'] or ''})"
