// The view that continues a prompt.

import { encode, open, path } from "./completion.js";
import { showCommand } from "./curl.js";
import { Run } from "./run.js";
import { peek, read } from "./settings.js";
import { TokenView } from "./tokens.js";

/** Prepare the view; returns its run and a function to call when the settings change. */
export function setUpPrompt() {
  const view = document.getElementById("prompt");
  const text = document.getElementById("prompt-text");
  const form = document.getElementById("prompt-form");
  const more = document.getElementById("prompt-continue");
  const output = new TokenView(view.querySelector(".output"));
  const run = new Run(view);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const settings = run.busy ? null : read();
    if (settings === null) return;
    const prompt = text.value;
    more.disabled = true;
    output.clear(prompt);
    await run.run(open, encode(prompt, settings), output);
    more.disabled = output.text === "";
    more.onclick = () => {
      text.value = prompt + output.text;
      more.disabled = true;
      update();
      text.focus();
    };
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  const update = showCommand(view.querySelector(".request"), () => {
    const settings = peek();
    return { path, body: settings && encode(text.value, settings) };
  });
  text.addEventListener("input", update);
  return { run, update };
}
