// The controls of a request: reads and checks them, and keeps them for the view or the conversation that they belong to.

import { apiKey, setApiKey } from "./api.js";
import { element } from "./dom.js";
import { keep, recall } from "./kept.js";

const form = document.getElementById("settings");
const panel = document.getElementById("settings-panel");
const toggle = document.getElementById("settings-toggle");
const control = (id) => document.getElementById(id);
const kept = [...form.elements].filter((item) => item.id && item.id !== "api-key");

// What the controls belong to now; see `use`.
let scope = { values: {}, defaults: {}, save: () => {} };
let changed = () => {};

/** Prepare the controls; `onchange` is called after each change, `newKey` after a change of the API key. */
export function setUp(onchange, newKey) {
  changed = onchange;
  control("api-key").value = apiKey();
  control("api-key").addEventListener("change", (event) => {
    setApiKey(event.target.value.trim());
    newKey();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (kept.includes(event.target)) edited();
  });
  form.addEventListener("reset", (event) => {
    // The API key is no setting with a default.
    event.preventDefault();
    apply({});
  });
  toggle.addEventListener("click", () => open(toggle.getAttribute("aria-expanded") !== "true"));
  document.getElementById("settings-close").addEventListener("click", () => {
    open(false);
    toggle.focus();
  });
}

/** Show or hide the settings. */
export function open(shown) {
  toggle.setAttribute("aria-expanded", String(shown));
  document.body.dataset.settings = shown ? "open" : "closed";
  panel.hidden = !shown;
}

/**
 * Let the controls belong to something else.
 * @param {object} next  Its `values` by the id of a control, its `defaults` where they are not the document's, and a
 *   function `save` to which all values are passed after a change.
 */
export function use(next) {
  scope = next;
  set(next.values);
  check();
  changed();
}

function select(item, value) {
  const known = [...item.options].some((option) => option.value === value);
  if (known) item.value = value;
  else item.selectedIndex = 0;
}

/** What keeps its values in the browser. */
export function keptScope(key, defaults = {}) {
  const found = { values: recall(key, {}), defaults, save };
  function save(values) {
    found.values = values;
    keep(key, values);
  }
  return found;
}

/** The values of all controls, by id. */
export function snapshot() {
  const value = (item) => {
    if (item.type === "checkbox") return item.checked;
    // The names of the models are not known yet.
    if (item.tagName === "SELECT" && !item.options.length) return scope.values[item.id] ?? "";
    return item.value;
  };
  return Object.fromEntries(kept.map((item) => [item.id, value(item)]));
}

/** Set the controls; those without a value get their default. */
export function apply(values) {
  set(values);
  edited();
}

function edited() {
  check();
  scope.values = snapshot();
  scope.save(scope.values);
  changed();
}

function set(values) {
  const all = { ...scope.defaults, ...values };
  for (const item of kept) {
    const value = all[item.id];
    if (item.type === "checkbox") item.checked = typeof value === "boolean" ? value : item.defaultChecked;
    else if (item.tagName === "SELECT") select(item, value);
    else item.value = typeof value === "string" ? value : item.defaultValue;
  }
}

/** Set the limits that the server reported in /info. */
export function setLimits(info) {
  if (info.max_total_tokens) control("max-tokens").max = info.max_total_tokens;
  if (info.max_top_n_tokens !== undefined) control("alternatives").max = info.max_top_n_tokens;
}

/** Offer the models that the server lists, where there are several. */
export function setModels(names) {
  control("model-field").hidden = names.length < 2;
  control("chat-model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  select(control("chat-model"), scope.values["chat-model"]);
  changed();
}

/** The settings of a request; null if one is invalid. */
export function peek() {
  check();
  return form.checkValidity() ? values() : null;
}

/** The settings of a request; null if one is invalid, which the browser then shows at its control. */
export function read() {
  const found = peek();
  if (found === null) {
    open(true);
    form.reportValidity();
  }
  return found;
}

/** Open the settings at the API key. */
export function askForKey() {
  open(true);
  control("api-key").focus();
}

function values() {
  const stop = control("stop").value.split("\n").filter(Boolean).map(unescape);
  const kind = control("grammar-kind").value;
  const grammar = control("grammar").value;
  return {
    system: control("chat-system").value,
    model: control("model-field").hidden ? undefined : control("chat-model").value,
    maxTokens: number("max-tokens"),
    temperature: number("temperature"),
    topP: number("top-p"),
    topK: number("top-k"),
    minP: number("min-p"),
    repetitionPenalty: number("repetition-penalty"),
    seed: seed(),
    alternatives: number("alternatives"),
    stop: stop.length ? stop : undefined,
    grammar: kind ? { kind, value: kind === "json" ? JSON.parse(grammar) : grammar } : undefined,
  };
}

function number(id) {
  const value = control(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

// A seed has 64 bits; JSON.rawJSON keeps digits that a number cannot hold.
function seed() {
  const text = control("seed").value.trim();
  if (text === "") return undefined;
  const exact = Number(text);
  return Number.isSafeInteger(exact) ? exact : JSON.rawJSON(BigInt(text).toString());
}

function unescape(line) {
  const meaning = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  return line.replace(/\\([ntr\\])/g, (_, letter) => meaning[letter]);
}

function check() {
  const kind = control("grammar-kind").value;
  const text = control("grammar").value;
  document.body.dataset.marks = control("marks").checked ? "on" : "off";
  control("grammar-field").hidden = kind === "";
  control("grammar-label").textContent = kind === "regex" ? "Regular expression" : "JSON schema";
  control("grammar").setCustomValidity(kind ? problem(kind, text) : "");
  const digits = control("seed").value.trim();
  const inexact = /^\d+$/.test(digits) && !Number.isSafeInteger(Number(digits)) && !("rawJSON" in JSON);
  control("seed").setCustomValidity(inexact ? "This browser cannot send a seed above 9007199254740991." : "");
}

function problem(kind, text) {
  if (text.trim() === "") return "Enter what the output has to match, or choose free text.";
  if (kind === "regex") return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `Not JSON: ${error.message}`;
  }
}
