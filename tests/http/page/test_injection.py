"""Messages that attack the page: nothing of them runs, is requested, or changes what the page's scripts see."""

import random
from pathlib import Path

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# `{js}` notes in the page that it ran; `{host}` is a host that no page may ask.
JS = "document.hit=1"
HOST = "https://evil.example"
TEMPLATES = (
    # Markup
    "<script>{js}</script>",
    "<script src={host}/a.js></script>",
    "<ScRiPt >{js}</sCrIpT>",
    "<img src=x onerror={js}>",
    "<img src={host}/a.png>",
    '<img src="x" onerror="{js}">',
    "<svg onload={js}>",
    "<svg><script>{js}</script></svg>",
    "<svg><use href='{host}/a.svg#x'/></svg>",
    "<style>@import '{host}/a.css'; * { background: url({host}/b) }</style>",
    "<div style='background:url({host}/c)'>x</div>",
    "<link rel=stylesheet href={host}/a.css>",
    "<iframe src={host}></iframe>",
    "<iframe srcdoc='<script>{js}</script>'>",
    "<object data={host}></object>",
    "<embed src={host}>",
    "<form action={host}><input name=q><button>go</button></form>",
    "<base href={host}>",
    "<meta http-equiv=refresh content='0;url={host}'>",
    "<body onload={js}>",
    "<video src={host}/v>",
    "<audio autoplay src={host}/a>",
    "<math><mi xlink:href='javascript:{js}'>x</mi></math>",
    "<details open ontoggle={js}>x",
    "<input autofocus onfocus={js}>",
    "<marquee onstart={js}>x</marquee>",
    "<a href='javascript:{js}'>x</a>",
    "<!-- <img src=x onerror={js}> -->",
    "<!--><img src=x onerror={js}>-->",
    "<?xml-stylesheet href='{host}'?>",
    "<![CDATA[<script>{js}</script>]]>",
    "<noscript><p title='</noscript><img src=x onerror={js}>'>",
    "<template><script>{js}</script></template>",
    "<portal src={host}>",
    "<dialog open>x</dialog>",
    "<x onclick={js} id=location name=forms>x</x>",
    "&lt;script&gt;{js}&lt;/script&gt;",
    "<plaintext>",
    "</div></main></body><script>{js}</script>",
    "<textarea></textarea><script>{js}</script>",
    # Links
    "[a](javascript:{js})",
    "[a](JaVaScRiPt:{js})",
    "[a]( javascript:{js})",
    "[a](<javascript:{js}>)",
    "[a](java\tscript:{js})",
    "[a](<java\tscript:{js}>)",
    "[a](java&#10;script:{js})",
    "[a](&#106;avascript:{js})",
    "[a](javascript&colon;{js})",
    "[a](javascript&#58;{js})",
    "[a](\\javascript:{js})",
    "[a](javascript\\:{js})",
    "[a](%6Aavascript:{js})",
    "[a](\u0001javascript:{js})",
    "[a](\u00a0javascript:{js})",
    "[a](\u200bjavascript:{js})",
    "[a](\uff4aavascript:{js})",
    "[a](vbscript:{js})",
    "[a](data:text/html,<script>{js}</script>)",
    "[a](DATA:text/html;base64,PHNjcmlwdD4=)",
    "[a](data:image/svg+xml,<svg/onload={js}>)",
    "[a](file:///etc/passwd)",
    "[a](blob:{host}/x)",
    "[a](filesystem:{host}/x)",
    "[a](view-source:{host})",
    "[a](about:blank)",
    "[a](intent://x)",
    "[a](//evil.example)",
    "[a](/v1/models)",
    "[a](#chat)",
    "[a](\\\\evil.example)",
    "[a](?x)",
    "[a](javascript://%0a{js})",
    "[a](https://x@evil.example)",
    "[a]({host} \"x' onclick={js} y='\")",
    "[a]({host} 'x\" onmouseover=\"{js}')",
    "<javascript:{js}>",
    "<JAVASCRIPT:{js}>",
    "<data:text/html,x>",
    "<{host}>",
    '{host}/x?q="onclick={js}',
    "<a@evil.example>",
    "javascript:{js}",
    "[r]\n\n[r]: javascript:{js}",
    "[r][]\n\n[r]: <data:text/html,x> 'onclick={js}'",
    '[R]: {host}/"onclick="{js}\n\n[r]',
    "[![a](javascript:{js})](javascript:{js})",
    "![a](javascript:{js})",
    "![a]({host}/p.png)",
    "![a]({host}/p.png 'onerror={js}')",
    '![a" onerror="{js}]({host})',
    "![a][i]\n\n[i]: {host}/p.png",
    "![](data:image/svg+xml;base64,PHN2Zy8+)",
    "[a]({host})[b](javascript:{js})",
    "[<img src=x onerror={js}>]({host})",
    # Names that would hide those of the page
    "[^1]\n\n[^1]: note",
    "# location",
    "# x {#forms onclick={js}}",
    "[a](){name=body}",
    "<a id=document name=cookie>x</a>",
    "[__proto__]: {host}\n\n[__proto__]",
    "[constructor]: {host}\n\n[constructor] [toString] [hasOwnProperty]",
    # Code
    "```{js}\nx\n```",
    '```"><script>{js}</script>\nx\n```',
    "```python onload={js} class=error\nx\n```",
    "```<img/src=x/onerror={js}>\nx\n```",
    "```__proto__\nx\n```",
    "```constructor\nx\n```",
    "```toString\nx\n```",
    "```html\n<script>{js}</script><img src=x onerror={js}>\n```",
    "```markdown\n[a](javascript:{js})\n```",
    "```xml\n<a href='javascript:{js}'>\n```",
    "```offscreen\nx\n```",
    "`<script>{js}</script>`",
    "    <script>{js}</script>",
    "~~~js' onclick='{js}\nx\n~~~",
    # Characters that hide or turn around others
    "\u202e[gro.live](https://example.com)\u202c",
    "[\u202ehttps://good.example](https://evil.example)",
    "`a\u200bb\u2066c\u2069`",
    "\x1b[31mred\x1b]8;;https://evil.example\x07x\x1b]8;;\x07",
    "\x00\x08\x7f\ufeff\ufffe",
    "[a](https://ex\u202eample.com)",
    "[a](https://ex\u200bample.com)",
    "\ud800 alone",
    "a\u2028<script>{js}</script>\u2029b",
    "\U000e0041\U000e0042",
    # Templates, formulas, tables, lists
    "{{constructor.constructor('{js}')()}}",
    "${{js}}",
    "$\\href{javascript:{js}}{x}$",
    "$$<img src=x onerror={js}>$$",
    "\\(<script>{js}</script>\\)",
    "|<img src=x onerror={js}>|a|\n|-|-|\n|[x](javascript:{js})|<svg onload={js}>|",
    "- [x] <input type=checkbox onclick={js}>",
    "- [ ] [a](javascript:{js})",
    "> <script>{js}</script>",
    "<think><script>{js}</script></think><img src=x onerror={js}>",
    '{"<img src=x onerror={js}>": "</pre><script>{js}</script>"}',
    '[{"__proto__": {"hit": 1}, "constructor": 1}]',
)
ATTACKS = [text.replace("{js}", JS).replace("{host}", HOST) for text in TEMPLATES]

CHECK = (Path(__file__).parent / "injection.js").read_text()


async def check(messages, cases):
    wrong = []
    for i in range(0, len(cases), 200):
        wrong += await messages.page.evaluate(CHECK, cases[i : i + 200])
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert messages.visit.complaints == []
    own = messages.visit.url
    assert not [url for url in messages.visit.requests if not url.startswith(own)]
    assert len(messages.page.context.pages) == 1
    assert messages.page.url == own


async def test_no_attack_becomes_more_than_text_and_safe_links(messages):
    cases = [
        [text, [len(text) // 2], role] for text in ATTACKS for role in ("assistant", "user", "tool")
    ]
    wrapped = [f"> {text}" for text in ATTACKS] + [f"1. a\n\n   {text}\n\n   b" for text in ATTACKS]
    wrapped += [f"**{text}**" for text in ATTACKS] + [
        f"[{text}](https://example.com)" for text in ATTACKS
    ]
    await check(messages, cases + [[text, [], "assistant"] for text in wrapped])


async def test_no_mixture_of_fragments_becomes_more_than_text_and_safe_links(messages):
    chance = random.Random(40)
    marks = [
        "\n",
        "\n\n",
        "    ",
        "- ",
        "1. ",
        "> ",
        "# ",
        "```",
        "```js\n",
        "`",
        "*",
        "**",
        "_",
        "~~",
        "[",
        "]",
        "](",
        ")",
        "<",
        ">",
        "!",
        "|",
        "|-|\n",
        "---",
        "===\n",
        "\\",
        "&",
        "&#",
        "&lt;",
        ";",
        "$",
        "$$",
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        ": ",
        "\t",
        " ",
        "\r",
        "\r\n",
        "[x] ",
        "[a]: ",
        "http://",
        "https://a.b/",
        "javascript:",
        "data:",
        "<think>",
        "</think>",
        "\u202e",
        "\u200b",
        "\x1b[0m",
        "\x00",
        '"',
        "'",
        "a",
        "b c",
        "{",
        "}",
        '{"a":',
    ]
    cases = []
    for _ in range(2500):
        parts = chance.choices([chance.choice(ATTACKS), *marks], k=chance.randint(1, 14))
        text = "".join(parts)
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), 3)))
        cases.append([text, cuts, "assistant"])
    await check(messages, cases)


LONG = {
    "stars": "*" * 50_000,
    "backticks": "`" * 50_000,
    "brackets": "[" * 50_000,
    "images": "![" * 25_000,
    "quotes": ">" * 10_000,
    "quotes with spaces": "> " * 10_000,
    "brackets of links": "[" * 10_000 + "](a)" * 10_000,
    "lists in lists": "- " * 10_000,
    "deeper lists": "\n".join(" " * i + "- a" for i in range(1000)),
    "fences of every length": "\n".join("`" * (3 + i) + "a" for i in range(300)),
    "backtick strings": " ".join("`" * i + "a" for i in range(300)),
    "underscores": "_a " * 17_000,
    "strong": "**a " * 12_000,
    "angles": "<" * 50_000,
    "half tags": "<a " * 17_000,
    "entities": "&a" * 25_000,
    "dollars": "$a " * 17_000,
    "open formulas": "\\(a " * 12_000,
    "formula lines": "\\[a\n" * 12_000,
    "dollar lines": "$$\n" * 20_001,
    "table": "|a" * 500 + "\n" + "|-" * 500 + "\n" + ("|b" * 500 + "\n") * 200,
    "short rows": "|a" * 500 + "\n" + "|-" * 500 + "\n" + "|b\n" * 5000,
    "definitions": "".join(f"[{i}]: /u\n" for i in range(10_000)),
    "addresses": "http://" * 7000,
    "mail": "mailto:a@" * 5000,
    "backslashes": "\\" * 50_000,
    "json brackets": "[" * 50_000 + "]" * 50_000,
    "json string": '["' + "\\" * 50_000,
    "think": "<think>" * 8000,
    "closed think": "</think>\n" * 6000,
    "one line of code": "```python\n" + "x = (" * 20_000 + "\n```",
    "code": "```python\n" + "x = 'a' # b\n" * 20_000 + "```",
    "quoted lines": "a\n" + "> b\n" * 20_000,
    "lines": "\n" * 100_000 + "x",
    "spaces": " " * 100_000 + "x",
    "words": "word " * 40_000,
    "controls": "\x1b" * 20_000,
    "fences": "```a\n" * 10_000,
}


async def test_input_that_is_made_to_be_slow_is_shown_all_the_same(messages):
    script = """async (texts) => {
      const wrong = [];
      for (const [name, text, role] of texts) {
        const step = text.length / 8 + 1;
        const view = document.helpers.make();
        view.show({ role, content: text });
        const count = view.node.querySelectorAll("*").length;
        if (count > 120_000) wrong.push([name, role, `${count} elements`]);
        let depth = 0;
        for (let node = view.node; node; node = node.firstElementChild) depth += 1;
        if (depth > 200) wrong.push([name, role, `${depth} elements deep`]);
        if (view.text !== text && !/^<.?think>/.test(text)) wrong.push([name, role, "another text"]);
        const streamed = document.helpers.make();
        for (let i = 0; i < text.length; i += step) streamed.append({ text: text.slice(i, i + step) });
        streamed.flush();
      }
      return wrong;
    }"""
    cases = [[name, text, "assistant"] for name, text in LONG.items()]
    others = ("fences", "fences of every length", "json brackets", "controls", "lines", "code")
    cases += [[name, LONG[name], role] for name in others for role in ("user", "tool")]
    for case in cases:
        assert await messages.page.evaluate(script, [case]) == [], case[0]
    assert messages.visit.complaints == []
    await messages.show(LONG["quotes"])
    assert "too deeply nested" in await messages.text(".note")
    await messages.show("# Title\n\nafter")
    assert await messages.count("h4") == 1


async def test_hidden_characters_are_made_visible_and_copied_as_they_are(messages):
    await messages.show("a\x1b[31m and `b\u200b` and [c\u202e](https://example.com)")

    shown = await messages.page.locator("#list .hidden-character").all_inner_texts()
    assert shown == ["\N{SYMBOL FOR ESCAPE}", "U+200B", "U+202E"]
    assert await messages.page.locator("#list a .hidden-character").count() == 1
    assert "\x1b" in await messages.run("view.text")
    family = "\N{WOMAN}\u200d\N{MICROSCOPE} \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    await messages.show(family)
    assert await messages.text() == family
