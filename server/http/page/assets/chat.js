// The view that holds a conversation.

import { encode, open, path } from "./conversation.js";
import { showCommand } from "./curl.js";
import { element } from "./dom.js";
import { Run } from "./run.js";
import { peek, read } from "./settings.js";
import { TokenView } from "./tokens.js";

/** Prepare the view; returns its run and a function to call when the settings change. */
export function setUpChat() {
  const view = document.getElementById("chat");
  const list = document.getElementById("chat-messages");
  const system = document.getElementById("chat-system");
  const text = document.getElementById("chat-text");
  const form = document.getElementById("chat-form");
  const again = document.getElementById("chat-again");
  const clear = document.getElementById("chat-clear");
  const run = new Run(view);
  let messages = [];

  const body = (turns, settings) => {
    const first = system.value.trim() ? [{ role: "system", content: system.value }] : [];
    return encode([...first, ...turns], settings);
  };

  const buttons = () => {
    again.disabled = run.busy || !messages.some((message) => message.role === "user");
    clear.disabled = run.busy || messages.length === 0;
  };

  const answer = async (settings) => {
    const item = append(list, "assistant");
    const output = new TokenView(item.querySelector(".output"));
    output.onflush = () => item.scrollIntoView({ block: "nearest" });
    const done = run.run(open, body(messages, settings), output);
    buttons();
    const error = await done;
    if (output.text) messages.push({ role: "assistant", content: output.text });
    else item.remove();
    if (error?.status === 404) {
      error.message += "\nThis server does not serve chat; the Prompt view works without it.";
      run.show(error);
    }
    buttons();
    return error;
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const content = text.value;
    if (run.busy || !content.trim()) return;
    const settings = read();
    if (settings === null) return;
    messages.push({ role: "user", content });
    const item = append(list, "user", content);
    text.value = "";
    const error = await answer(settings);
    if (error !== null && messages.at(-1).role === "user") {
      // Nothing was answered: give the message back, so that it can be changed and sent again.
      messages.pop();
      item.remove();
      text.value ||= content;
      buttons();
    }
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  again.addEventListener("click", () => {
    const settings = read();
    if (settings === null) return;
    if (messages.at(-1).role === "assistant") {
      messages.pop();
      list.lastElementChild.remove();
    }
    answer(settings);
  });
  clear.addEventListener("click", () => {
    messages = [];
    list.replaceChildren();
    buttons();
    text.focus();
  });
  const update = showCommand(view.querySelector(".request"), () => {
    const settings = peek();
    const turns = text.value.trim() ? [...messages, { role: "user", content: text.value }] : messages;
    return { path, body: settings && body(turns, settings) };
  });
  for (const input of [text, system]) input.addEventListener("input", update);
  return { run, update };
}

function append(list, role, content = "") {
  const output = element("div", { class: "output" }, content);
  const item = element("li", { class: role }, element("h3", {}, role === "user" ? "You" : "Model"), output);
  list.append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}
