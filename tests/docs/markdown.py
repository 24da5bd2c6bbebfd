"""Links and headings of Markdown files, as a forge reads them."""

import re

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[^\n]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")


def prose(text):
    """Return a page without its blocks of code, comments and code in a line."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)
    # A block of code is indented after an empty line that no list is before.
    lines, in_list, before = [], False, ""
    for line in text.splitlines():
        if re.match(r"\s*([-*+]|\d+\.) ", line):
            in_list = True
        elif line and not line.startswith(" "):
            in_list = False
        if not (line.startswith("    ") and not in_list and (not before or before == "code")):
            lines.append(line)
            before = line.strip()
        else:
            before = "code"
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", "\n".join(lines), flags=re.DOTALL)


def links(text):
    """Return where a page's links and images lead, without those to other hosts."""
    return [it for it in _LINK.findall(prose(text)) if not re.match(r"[a-z][a-z0-9+.-]*:", it)]


def anchors(text):
    """Return the anchors that GitHub makes of a page's headings, in their order."""
    titles = re.findall(r"^#{1,6} (.*)$", _FENCE.sub("", text), re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip() for title in titles]
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in shown]
