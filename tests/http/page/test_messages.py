"""How messages are shown: Markdown, code, JSON, calls of tools, reasoning."""

import json

import pytest

from tests.http.page.messages import Messages, call, pretty

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DOCUMENT = r"""# Title

Some *prose* with **bold**, `code`, ~~struck~~ and a [link](https://example.com/a "title").
The second line.

### A heading that leaves one out

3. third
   ```python
   def f(x):
       return x  # a comment
   ```
4. fourth
   - nested

- [x] done
- [ ] open

> quoted
>
> twice

| left | right |
|:-----|------:|
| a `b` | 2 |

$$
\sum_i a_i * b_i
$$

![A cat](https://example.com/cat.png)

---

    indented code

See [the reference][ref] and https://example.com/bare.

```unknown-language
plain
```

[ref]: https://example.com/ref
"""


async def test_markdown_becomes_elements(messages):
    await messages.show(DOCUMENT)

    for selector, count in {
        "h4.heading-1": 1, "h5.heading-3": 1, "strong": 1, "s": 1, "br": 1, "ol[start='3'] > li": 2,
        "li ul li": 1, "li.task .box": 2, "blockquote > p": 2, "th.align-right": 1, "td.align-right": 1,
        "hr": 1, ".code-block": 3, "div.math": 1, "img": 0, "[id]": 0, "[style]": 0,
    }.items():  # fmt: skip
        assert await messages.count(selector) == count, selector
    links = await messages.run(
        "[...list.querySelectorAll('a')].map((a) => [a.textContent, a.href])"
    )
    assert links == [
        ["link", "https://example.com/a"], ["Image: A cat", "https://example.com/cat.png"],
        ["the reference", "https://example.com/ref"], ["https://example.com/bare", "https://example.com/bare"],
    ]  # fmt: skip
    assert await messages.run(
        "[...list.querySelectorAll('a')].every((a) => a.target === '_blank' && "
        "a.rel === 'noopener noreferrer nofollow')"
    )
    assert r"\sum_i a_i * b_i" in await messages.text(".math")
    assert await messages.run("view.text") == DOCUMENT
    assert messages.visit.complaints == []
    assert all(url.startswith(messages.visit.url) for url in messages.visit.requests)


async def test_a_stream_ends_with_the_elements_of_the_whole_text(messages):
    script = """async ([text, size]) => {
      const bare = (node) => {
        const copy = node.cloneNode(true);
        for (const code of copy.querySelectorAll("pre code")) code.textContent = code.textContent;
        return copy.outerHTML;
      };
      const view = document.helpers.make();
      const shown = [];
      for (let i = 0; i < text.length; i += size) {
        view.append({ text: text.slice(i, i + size) });
        await new Promise((resolve) => requestAnimationFrame(resolve));
        await new Promise((resolve) => requestAnimationFrame(resolve));
      }
      view.flush();
      const streamed = bare(view.node);
      view.show({ role: "assistant", content: text });
      return [streamed, bare(view.node)];
    }"""
    for size in (7, 64):
        streamed, whole = await messages.page.evaluate(script, [DOCUMENT, size])
        assert streamed == whole


async def test_what_is_complete_stays_the_same_element_while_the_rest_streams(messages):
    await messages.stream("First *block*.\n\n", "```python\nx = 1\n")
    await messages.run(
        "list.querySelector('p').mark = list.querySelector('.code-block').mark = true"
    )
    await messages.run("[...'y = 2\\n```\\n\\nmore'].forEach((text) => view.append({ text }))")
    await messages.run("view.flush()")

    assert await messages.run(
        "list.querySelector('p').mark && list.querySelector('.code-block').mark"
    )
    assert await messages.text("pre") == "x = 1\ny = 2"
    assert "more" in await messages.text()


async def test_a_fence_that_is_not_closed_is_code(messages):
    await messages.stream("Look:\n\n```py", "thon\nprint('a')\n", "``")

    assert await messages.text("pre") == "print('a')"
    assert await messages.text(".language") == "python"
    assert await messages.count(".hljs-string") == 1


async def test_code_is_coloured_labelled_and_copied_as_it_is(messages):
    code = 'def f():\n\treturn "\N{RIGHT-TO-LEFT OVERRIDE}x\N{ZERO WIDTH SPACE}"\n'
    await messages.show(f"```python title=x\n{code}```")
    await messages.page.locator("#list .hljs-keyword").first.wait_for()

    assert await messages.text(".language") == "python"
    assert await messages.page.locator("pre .hidden-character").all_inner_texts() == [
        "U+202E",
        "U+200B",
    ]
    font = await messages.run("getComputedStyle(list.querySelector('pre code')).fontFamily")
    assert "monospace" in font
    await messages.page.evaluate(
        "navigator.clipboard.writeText = async (text) => { document.copied = text; }"
    )
    await messages.page.click("#list .copy")
    assert await messages.page.evaluate("document.copied") == code
    assert await messages.text(".copy") == "Copied"


async def test_copying_works_without_the_clipboards_interface(messages):
    await messages.show("```\none\ntwo\n```")
    await messages.page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined })"
    )
    await messages.page.evaluate(
        "document.addEventListener('copy', () => (document.copied = document.activeElement.value))"
    )

    await messages.page.locator("#list .copy").focus()
    await messages.page.keyboard.press("Enter")

    await messages.page.locator("#list .copy", has_text="Copied").wait_for()
    assert await messages.page.evaluate("document.copied") == "one\ntwo\n"
    assert await messages.page.evaluate("document.activeElement.className") == "copy"


async def test_wide_code_and_tables_scroll_within_the_message(messages):
    await messages.page.set_viewport_size({"width": 360, "height": 700})
    wide = "x" * 400
    await messages.show(
        f"```\n{wide}\n```\n\n|{'a |' * 40}\n|{'-|' * 40}\n|{'word |' * 40}\n\n{wide} `{wide}`"
    )

    assert await messages.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert await messages.run("list.querySelector('pre').scrollWidth > list.clientWidth")


async def test_math_is_shown_as_its_source(messages):
    await messages.show(
        r"$x_1 * y_2$ costs $5 or $10, \(a_1 \times b_1\) and \[c_1\]" + "\n\n\\[\nd_1 * e_1\n\\]"
    )

    assert await messages.page.locator("#list .math").all_inner_texts() == [
        "$x_1 * y_2$", r"\(a_1 \times b_1\)", r"\[c_1\]", "\\[\nd_1 * e_1\n\\]",
    ]  # fmt: skip
    assert "costs $5 or $10," in await messages.text()


async def test_a_json_document_is_indented_and_keeps_its_values(messages):
    text = '{"big":12345678901234567890,"one":1.0,"one":[1,{"a":"b, {c}"}],"none":{},"text":"\\u00e9\\n"}'
    await messages.stream(*(text[i : i + 9] for i in range(0, len(text), 9)), flush=True)

    shown = await messages.text("pre")
    assert '  "big": 12345678901234567890,\n  "one": 1.0,\n  "one": [\n    1,\n' in shown
    assert '"a": "b, {c}"' in shown
    assert '"none": {},\n  "text": "\\u00e9\\n"\n}' in shown
    assert await messages.run("view.text") == text
    await messages.show("[1] is a footnote, {x} a set")
    assert await messages.count("pre") == 0
    await messages.stream('{"a": 1}', " and more", flush=True)
    assert await messages.count("pre") == 0


async def test_calls_of_tools_stream_and_are_shown_with_indented_arguments(messages):
    await messages.stream(
        "I look.",
        call(0, id="a", name="weather", arguments=""),
        call(0, arguments='{"city":"Par'),
        call(0, arguments='is"}'),
        call(1, id="b", name="broken", arguments="not JSON"),
    )
    assert await messages.page.locator("#list .tool summary").all_inner_texts() == [
        "Tool call weather", "Tool call broken",
    ]  # fmt: skip
    await messages.run("view.flush()")

    assert await messages.page.locator("#list .tool pre").all_inner_texts() == [
        pretty({"city": "Paris"}), "not JSON",
    ]  # fmt: skip
    assert await messages.run("view.toolCalls") == [
        {"id": "a", "name": "weather", "arguments": '{"city":"Paris"}'},
        {"id": "b", "name": "broken", "arguments": "not JSON"},
    ]
    assert await messages.run("view.text") == "I look."
    await messages.show(None, toolCalls=[{"id": "a", "name": "f", "arguments": {"b": 1}}])
    assert await messages.text(".tool pre") == pretty({"b": 1})
    await messages.show('{"ok":true}', role="tool", name="weather")
    assert await messages.text(".tool summary") == "Result of weather"
    assert await messages.text(".tool pre") == pretty({"ok": True})


@pytest.mark.parametrize(
    "parts",
    [
        [{"reasoning": True, "text": "I *think*"}, {"reasoning": True, "text": " so."}, "Yes."],
        ["<th", "ink>\nI *think*", " so.\n</thi", "nk>\n\nYes."],
        ["I *think*", " so.\n</think>\n", "\nYes."],
    ],
    ids=["field", "tags", "tag in the prompt"],
)
async def test_reasoning_is_folded_when_the_answer_begins_and_is_no_part_of_it(messages, parts):
    tagged = parts[0] != "I *think*"
    await messages.stream(*parts[:-1])
    if tagged:
        assert await messages.text(".thought summary") == "Thinking …" or parts[0] == "<th"
    await messages.run(
        "argument.forEach((part) => view.append(part))",
        [{"text": "Yes."} | ({"text": parts[-1]} if isinstance(parts[-1], str) else parts[-1])],
    )
    await messages.run("view.flush()")

    assert await messages.run("list.querySelector('.thought').open") is False
    assert (await messages.text(".thought summary")).startswith("Thought")
    assert await messages.text(".markdown:not(.thought .markdown)") == "Yes."
    assert await messages.run("view.text") == "Yes."
    assert await messages.run("view.reasoning") == "I *think* so."
    assert await messages.count(".thought em") == 1
    await messages.show("Yes.", reasoning="Hm.", reasoningSeconds=75)
    assert await messages.text(".thought summary") == "Thought for 1 min 15 s"


async def test_the_chunks_of_a_stream_have_reasoning_text_and_calls(messages):
    def logprobs(*tokens):
        entries = [{"token": token, "logprob": -0.5, "top_logprobs": []} for token in tokens]
        return {"content": entries}

    called = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    choices = [
        {"delta": {"role": "assistant", "reasoning_content": "Hm"}, "logprobs": logprobs("Hm")},
        {"delta": {"reasoning": "."}},
        {"delta": {"content": "I call"}, "logprobs": logprobs("I", " call")},
        {"delta": {"tool_calls": [called]}, "logprobs": logprobs("<tool>", "f")},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}},
        {"delta": {}, "finish_reason": "tool_calls"},
    ]
    chunks = [{"choices": [{"index": 0, **choice}]} for choice in choices]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    await messages.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=200, body=body)
    )
    end, tokens = await messages.page.evaluate("""async () => {
      const { open } = await import("/page/conversation.js");
      document.view = document.helpers.make();
      const { parts } = await open("{}", new AbortController().signal);
      let end = null;
      for await (const part of parts) {
        if (part.token) document.view.append(part.token);
        end = part.end ?? end;
      }
      document.view.flush();
      return [end.reason, document.view.tokens.map((one) => one.name)];
    }""")

    assert end == "tool_calls"
    assert tokens == ["Hm", ".", "I", " call", "<tool>", "f", "{}"]
    assert await messages.run("[view.reasoning, view.text, view.toolCalls]") == [
        "Hm.",
        "I call",
        [{"id": "c", "name": "f", "arguments": "{}"}],
    ]
    await messages.run("view.setView('tokens')")
    assert await messages.text(".output") == "Hm.I call<tool>f{}"


async def test_an_answer_may_speak_of_the_tags_of_reasoning(messages):
    for text in ("It writes `<think>` and\n</think>", "Write:\n```\n</think>\n```", "a </think> b"):
        await messages.show(text)
        assert await messages.run("view.text") == text
        assert await messages.count(".thought") == 0


async def test_what_a_person_wrote_is_shown_as_typed_with_fenced_code_as_code(messages):
    await messages.show(
        "  two   spaces\n# no heading *here*\n\n```python\nx = 1\n```\n<b>end", role="user"
    )

    assert await messages.text(".markdown .plain >> nth=0") == "  two   spaces\n# no heading *here*"
    assert await messages.text("pre") == "x = 1"
    assert await messages.text(".markdown .plain >> nth=1") == "<b>end"
    assert (
        await messages.run("view.text")
        == "  two   spaces\n# no heading *here*\n\n```python\nx = 1\n```\n<b>end"
    )
    await messages.show([{"type": "text", "text": "part"}, {"type": "image_url"}], role="user")
    assert await messages.text() == "part\n[image_url]"


async def test_the_views_are_text_tokens_and_source(messages):
    token = {"logprob": -1.5, "alternatives": [{"name": "*a*", "logprob": -1.5}]}
    await messages.stream(
        {"text": "*a*", "name": "*a*"} | token, {"text": " b", "name": " b"} | token
    )

    assert await messages.count("em") == 1
    await messages.run("view.setView('tokens')")
    assert await messages.page.locator("#list .token[data-level='2']").all_inner_texts() == [
        "*a*",
        " b",
    ]
    await messages.run("view.append({ text: ' c', name: ' c', logprob: null, alternatives: [] })")
    await messages.run("view.setView('source')")
    assert await messages.text() == "*a* b c"
    await messages.run("(view.setView('text'), view.flush())")
    assert await messages.text() == "a b c"
    await messages.show("kept")
    await messages.run("view.setView('tokens')")
    assert "were not kept" in await messages.text()


async def test_a_shown_message_can_be_continued(messages):
    await messages.show("- one\n- tw")
    await messages.run("(view.append({ text: 'o\\n- three' }), view.flush())")

    assert await messages.page.locator("#list li").all_inner_texts() == ["one", "two", "three"]
    assert await messages.run("view.text") == "- one\n- two\n- three"


async def test_text_is_shown_before_and_without_the_libraries(visit):
    here = Messages(await visit())
    await here.page.route("**/vendor/*", lambda route: route.abort())
    await here.open(libraries=False)

    await here.show("*not* formatted")
    await here.page.wait_for_timeout(200)

    assert await here.text() == "*not* formatted"
    await here.page.unroute("**/vendor/*")
    here.visit.complaints.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_violation_in_any_kind_of_message(visit, scheme):
    pytest.importorskip("axe_playwright_python", reason="needs the package axe-playwright-python")
    from axe_playwright_python.async_playwright import Axe

    here = Messages(await visit(color_scheme=scheme, viewport={"width": 900, "height": 3000}))
    await here.open()
    code = "\n\n".join(f"```{language}\n{text}\n```" for language, text in SAMPLES.items())
    calls = [{"id": "a", "name": "f", "arguments": '{"a": [1, true, null, "x"]}'}]
    await here.show(DOCUMENT + code, reasoning=DOCUMENT, reasoningSeconds=3, toolCalls=calls)
    await here.page.evaluate(
        "document.querySelectorAll('details').forEach((one) => (one.open = true))"
    )
    await here.page.locator("#list .tool .hljs-attr").wait_for()
    await here.page.locator("#list .hljs-deletion").wait_for()

    axe = Axe()
    for script in ("view.setView('text')", "view.setView('source')", "view.setView('tokens')"):
        await here.run(script)
        found = await axe.run(here.page)
        assert found.violations_count == 0, f"{script}: {found.generate_report()}"
    await here.show('{"a": 1}', role="tool", name="f")
    found = await axe.run(here.page)
    assert found.violations_count == 0, found.generate_report()


async def test_the_memory_of_a_message_is_bounded(messages):
    here = messages
    await here.show("z" * 2_000_000)
    shown = await here.run("view.node.textContent.length")
    assert 500_000 < shown < 501_000
    assert "1,500,000 more characters" in await here.page.inner_text("#list .hidden-character")
    assert await here.run("view.text.length") == 2_000_000

    script = """(() => {
      view.clear();
      for (let i = 0; i < 120000; i += 1) view.append({ text: "a ", name: "a ", logprob: -1, alternatives: [] });
      view.flush();
      return [view.tokens.length, view.text.length];
    })()"""
    kept, length = await here.run(script)
    assert kept <= 50_000
    assert length == 240_000
    await here.run("view.setView('tokens')")
    assert await here.run("view.node.querySelector('.output').textContent.length") == length
    assert "of the first tokens" in await here.page.inner_text("#list .note")


SAMPLES = {
    "python": '@dec\nclass A(B):\n    """Doc."""\n    x: int = 3  # note\n    def f(self): return f"{x}", print(None)',
    "javascript": "const a = async (b) => { /* c */ return `t${b.c}` + /r/g.test(1) && new Map(); };",
    "html": '<!-- c --><div class="a" id=b>text &amp; more</div>',
    "css": "a:hover, #b .c[d] { color: #fff; margin: 0 1px !important } @media print { b { x: var(--y) } }",
    "bash": 'for f in *; do echo "$f" | grep -v x > /dev/null; done # c',
    "yaml": "a: 1\nb: [x, 'y']\n# c\nc: &d\n  - e: true",
    "sql": "SELECT count(*) AS n FROM t WHERE a = 'x' AND b > 1.5; -- c",
    "rust": "#[derive(Debug)] fn f<'a>(x: &'a str) -> Option<u8> { Some(b'c') } // c",
    "markdown": "# T\n\n*a* **b** `c` [d](e)\n\n> q\n- l",
    "latex": r"\section{A} $x^2$ % c",
    "makefile": "A := b\nall: x\n\techo $(A) # c",
    "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-old\n+new",
}
