"""Check every link of a built site, without a network: files and anchors must be there, and no script or style may come
from another host. `python .ci/links.py FOLDER` prints what is broken; exit code 1 if anything is.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = ("link", "script", "img")  # what a browser loads with the page


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # tag, address
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        for name in ("href", "src"):
            if value := values.get(name):
                self.links.append((tag, value))


def broken(folder: Path) -> list[str]:
    """A line for each link that leads nowhere, and for each file that would be loaded from another host."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for tag, link in page.links:
            parts = urlsplit(link)
            name = f"{path.relative_to(folder)}: {link}"
            if parts.scheme or parts.netloc:
                if tag in LOADED and parts.scheme != "data":
                    found.append(f"{name} is loaded from another host")
            elif path.name != "404.html":  # which is served for any address, so its links begin at the root
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                anchor = unquote(parts.fragment)
                if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                    found.append(f"{name} leads nowhere")
    return found


if __name__ == "__main__":
    lines = broken(Path(sys.argv[1]).resolve())
    print("\n".join(lines) or "all links lead somewhere")
    sys.exit(bool(lines))
