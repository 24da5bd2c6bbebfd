// The controls of a request: reads and checks them, and keeps them in this browser.

import { apiKey, setApiKey } from "./api.js";

const STORE = "tessera.settings";
const form = document.getElementById("settings");
const panel = document.getElementById("settings-panel");
const control = (id) => document.getElementById(id);
const kept = [...form.elements].filter((item) => item.id && item.id !== "api-key");

/** Prepare the controls; `changed` is called after each change, `newKey` after a change of the API key. */
export function setUp(changed, newKey) {
  restore();
  control("api-key").value = apiKey();
  control("api-key").addEventListener("change", (event) => {
    setApiKey(event.target.value.trim());
    newKey();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    check();
    store();
    changed();
  });
  form.addEventListener("reset", (event) => {
    // The API key is no setting with a default.
    event.preventDefault();
    for (const item of kept) {
      if (item.tagName === "SELECT") item.selectedIndex = 0;
      else if (item.type === "checkbox") item.checked = item.defaultChecked;
      else item.value = item.defaultValue;
    }
    check();
    store();
    changed();
  });
  // On a narrow screen the settings would come between the prompt and its output.
  panel.open = !matchMedia("(max-width: 62rem)").matches;
  check();
}

/** Set the limits that the server reported in /info. */
export function setLimits(info) {
  if (info.max_total_tokens) control("max-tokens").max = info.max_total_tokens;
  if (info.max_top_n_tokens !== undefined) control("alternatives").max = info.max_top_n_tokens;
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
    panel.open = true;
    form.reportValidity();
  }
  return found;
}

/** Open the settings at the API key. */
export function askForKey() {
  panel.open = true;
  control("api-key").focus();
}

function values() {
  const stop = control("stop").value.split("\n").filter(Boolean).map(unescape);
  const kind = control("grammar-kind").value;
  const grammar = control("grammar").value;
  return {
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

function store() {
  const values = Object.fromEntries(kept.map((item) => [item.id, item.type === "checkbox" ? item.checked : item.value]));
  try {
    localStorage.setItem(STORE, JSON.stringify(values));
  } catch {
    // Storage is blocked: the settings last until the page is left.
  }
}

function restore() {
  try {
    const values = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    for (const item of kept) {
      const value = values[item.id];
      if (item.type === "checkbox") item.checked = value ?? item.defaultChecked;
      else if (typeof value === "string") item.value = value;
    }
  } catch {
    // Blocked or damaged storage: the defaults apply.
  }
}
