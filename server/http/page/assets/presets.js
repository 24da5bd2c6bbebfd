// Named settings, kept in this browser: choose, save and delete.

import { element } from "./dom.js";
import { keep, recall } from "./kept.js";
import { apply, snapshot } from "./settings.js";

const STORE = "tessera.presets";
let memory = {}; // What the browser does not keep.

/** Prepare the controls of the presets. */
export function setUpPresets() {
  const choice = document.getElementById("preset");
  const name = document.getElementById("preset-name");
  const save = document.getElementById("preset-save");
  const remove = document.getElementById("preset-delete");
  const status = document.getElementById("preset-status");

  const show = (chosen = choice.value) => {
    const names = Object.keys(read()).sort((a, b) => a.localeCompare(b));
    const option = (value) => element("option", { value }, value);
    choice.replaceChildren(element("option", { value: "" }, names.length ? "choose" : "none saved"), ...names.map(option));
    choice.value = names.includes(chosen) ? chosen : "";
    remove.disabled = choice.value === "";
  };
  choice.addEventListener("change", () => {
    remove.disabled = choice.value === "";
    name.value = choice.value;
    const { [choice.value]: values } = read();
    if (values) {
      apply(values);
      status.textContent = `Preset ${choice.value} applied`;
    }
  });
  save.addEventListener("click", () => {
    const chosen = name.value.trim();
    if (chosen === "") {
      status.textContent = "Enter a name for the preset.";
      name.focus();
      return;
    }
    const kept = write({ ...read(), [chosen]: snapshot() });
    status.textContent = kept ? `Preset ${chosen} saved` : "The browser stores nothing: the preset is lost with this page.";
    show(chosen);
  });
  name.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    save.click();
  });
  remove.addEventListener("click", () => {
    const { [choice.value]: _, ...others } = read();
    status.textContent = `Preset ${choice.value} deleted`;
    write(others);
    show("");
    choice.focus();
  });
  // Another tab has changed them.
  addEventListener("storage", (event) => event.key === STORE && show());
  show("");
}

function read() {
  const found = recall(STORE, {});
  return { ...found, ...memory };
}

function write(presets) {
  const kept = keep(STORE, presets);
  memory = kept ? {} : presets;
  return kept;
}
