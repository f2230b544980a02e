"""mdBook's preprocessor for docs/: links that leave the book become names of files.

`book.py check` refuses links that lead nowhere, in every tracked Markdown file.
"""

import json
import os
import re
import subprocess
import sys

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(text):
    """The anchors that GitHub and mdBook make of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path, text):
    """Relative links of the Markdown file `path` to files or headings that are not there."""
    for _, link in LINK.findall(FENCED.sub("", text)):
        file, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
        if not os.path.exists(target):
            yield f"{path}: [{link}]: there is no {target}"
        elif anchor and target.endswith(".md") and anchor not in anchors(open(target, encoding="utf-8").read()):
            yield f"{path}: [{link}]: {target} has no heading #{anchor}"


def inside(text, path):
    """`text` of the chapter `path` with links that leave the book as names of files."""

    def name(match):
        words, link = match.groups()
        target = os.path.normpath(os.path.join("docs", os.path.dirname(path), link.partition("#")[0]))
        if re.match(r"[a-z]+:|#", link) or target.startswith("docs/"):
            return match.group()
        return words if words.strip("`") in target else f"{words} (`{target}`)"

    return LINK.sub(name, text)


def rewrite(items):
    for item in items:
        if chapter := item.get("Chapter"):
            if chapter["path"]:
                chapter["content"] = inside(chapter["content"], chapter["path"])
            rewrite(chapter["sub_items"])


if sys.argv[1:] == ["check"]:
    files = subprocess.check_output(["git", "ls-files", "*.md"], text=True).split()
    found = [line for file in files for line in broken(file, open(file, encoding="utf-8").read())]
    chapters = {link for _, link in LINK.findall(open("docs/SUMMARY.md", encoding="utf-8").read())}
    pages = {os.path.relpath(file, "docs") for file in files if file.startswith("docs/")} - {"SUMMARY.md"}
    found += [f"docs/SUMMARY.md lacks {page}" for page in sorted(pages - chapters)]
    print("\n".join(found) or f"links of {len(files)} pages lead somewhere")
    sys.exit(bool(found))
# What mdBook calls: `supports RENDERER`, then with the book on standard input.
if not sys.argv[1:]:
    _, book = json.load(sys.stdin)
    rewrite(book["items"])
    json.dump(book, sys.stdout)
