// Shows messages whole and as streams; returns what of them is not text, known elements and safe links.
async (texts) => {
  const TAGS = new Set(("DIV SPAN P H4 H5 H6 A BR HR EM STRONG S CODE PRE UL OL LI BLOCKQUOTE TABLE THEAD TBODY TR TH TD " +
    "BUTTON DETAILS SUMMARY").split(" "));
  const ATTRIBUTES = new Set(["class", "href", "title", "target", "rel", "tabindex", "role", "aria-label", "type",
    "start", "scope", "open", "data-index", "data-level"]);
  const PATTERN = /^(hljs-[\w-]+|[a-z]+_|heading-[1-6]|align-(left|center|right))$/;
  const CLASSES = new Set(("message-body prefix plain reasoning markdown calls scroll math code-block bar language copy task " +
    "box image hidden-character thought tool call result note source").split(" "));
  const before = new Set(Object.getOwnPropertyNames(window));
  const documentBefore = Object.getOwnPropertyNames(document).length;
  const wrong = [];
  const check = (text, how) => {
    const say = (what) => wrong.push([what, how, text.slice(0, 300)]);
    const root = document.view.node;
    for (const node of [root, ...root.querySelectorAll("*")]) {
      if (!TAGS.has(node.tagName)) say(`<${node.tagName}>`);
      if (node.namespaceURI !== "http://www.w3.org/1999/xhtml") say(node.namespaceURI);
      for (const { name, value } of node.attributes) {
        if (!ATTRIBUTES.has(name)) say(`${node.tagName} ${name}`);
        if (name === "class") {
          const others = value.split(/ +/).filter((one) => one && !PATTERN.test(one) && !CLASSES.has(one));
          if (others.length) say(`class ${others}`);
        }
        if (name === "href") {
          const known = /^(https?:\/\/[^\s]|mailto:[^\s])/.test(value) && node.tagName === "A";
          if (!known) say(`link to ${value}`);
          if (node.rel !== "noopener noreferrer nofollow" || node.target !== "_blank") say("a link that is not apart");
          if (node.title !== value) say("a link without its address");
          if (/[\u202a-\u202e\u2066-\u2069\u200b-\u200f]/.test(node.textContent)) say("a link with hidden characters");
        }
        if (name === "type" && value !== "button") say(`type ${value}`);
      }
      if (node.attributes.style || node.onclick || node.onerror) say("a handler or style");
    }
    if (document.hit) say("a script ran");
    delete document.hit;
    if ({}.hit !== undefined) say("a prototype was changed");
  };
  for (const [text, cuts, role] of texts) {
    document.view = document.helpers.make();
    const toolCalls = [{ id: text, name: text, arguments: text }];
    const reasoning = role === "assistant" && text.length % 3 === 0 ? text : "";
    document.view.show({ role, content: text, toolCalls, name: text, reasoning });
    check(text, "shown");
    for (const one of document.querySelectorAll("#list a")) {
      one.addEventListener("click", (event) => event.preventDefault());
      one.click();
    }
    if (role !== "assistant") continue;
    document.view = document.helpers.make();
    let from = 0;
    for (const cut of [...cuts, text.length]) {
      document.view.append({ text: text.slice(from, cut) });
      from = cut;
      document.view.setView("source");
      document.view.setView("text");
      check(text, "streamed");
    }
    document.view.flush();
    check(text, "streamed");
    const streamed = document.view;
    const reference = document.helpers.make();
    reference.show({ role, content: text });
    const [one, other] = [bare(streamed.node), bare(reference.node)];
    if (one !== other) wrong.push(["a stream differs", text.slice(0, 300), one.slice(0, 600), other.slice(0, 600)]);
  }
  function bare(node) {
    const copy = node.cloneNode(true);
    for (const code of copy.querySelectorAll("pre code")) code.textContent = code.textContent;
    for (const one of copy.querySelectorAll(".thought")) one.open = false;
    for (const one of copy.querySelectorAll(".thought summary")) one.textContent = "";
    return copy.outerHTML;
  }
  await new Promise((resolve) => setTimeout(resolve, 50));
  const after = Object.getOwnPropertyNames(window).filter((name) => !before.has(name));
  if (after.length) wrong.push(["global variables", after.join()]);
  if (Object.getOwnPropertyNames(document).length > documentBefore + 1) wrong.push(["properties of the document"]);
  if (document.forms.length || document.images.length || document.scripts.length) wrong.push(["the document"]);
  return wrong;
}