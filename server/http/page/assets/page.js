// The page: tabs, address, keys and live state. The views are in prompt.js, chat.js and plan.js.

import { getJson } from "./api.js";
import { Chat } from "./chat.js";
import { element } from "./dom.js";
import { keep, recall } from "./kept.js";
import { Monitor } from "./metrics.js";
import { showFacts, showPlan } from "./plan.js";
import { Plot } from "./plots.js";
import { setUpPresets } from "./presets.js";
import { setUpPrompt } from "./prompt.js";
import { setUpScheme } from "./scheme.js";
import { keptScope, open as openSettings, setLimits, setModels, setUp, use } from "./settings.js";
import { hide } from "./tokens.js";

const byId = (id) => document.getElementById(id);

// Views and tabs

const FIRST = "tessera.view"; // What the page opened on last, so that it does so before the server has answered.
const tabs = [...document.querySelectorAll('[role="tab"]')];
const panelOf = (tab) => byId(tab.getAttribute("aria-controls"));
const narrow = matchMedia("(max-width: 62rem)");
const prompt = setUpPrompt();
const promptScope = keptScope("tessera.settings");
let conversation = null; // The id of the one that is shown.
let chosen = false; // Whether the reader has chosen a view.
const chat = new Chat((id, opened) => {
  conversation = id;
  if (document.body.dataset.view === "chat") address(opened);
});
const shown = { prompt: !narrow.matches, chat: false }; // Whether the settings are, by view.

function select(tab, { focus = false } = {}) {
  const view = panelOf(tab).id;
  const before = document.body.dataset.view;
  if (before in shown) shown[before] = document.body.dataset.settings === "open";
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    panelOf(other).hidden = other !== tab;
  }
  document.body.dataset.view = view;
  byId("settings-toggle").hidden = !(view in shown);
  openSettings(shown[view] ?? false);
  if (focus) tab.focus();
  if (view === "engine") loadPlan();
  if (view === "chat") chat.enter();
  else chat.leave();
  if (view === "prompt") use(promptScope);
}

function choose(tab, options) {
  chosen = true;
  select(tab, options);
  address();
}

function address(opened = false) {
  const view = document.body.dataset.view;
  const next = `#${view}${view === "chat" && conversation ? `/${conversation}` : ""}`;
  if (location.hash === next) return;
  if (opened) history.pushState(null, "", next);
  else history.replaceState(null, "", next);
}

/** Show what the address names; returns whether it names anything. */
function follow() {
  const [view, id = null] = location.hash.slice(1).split("/");
  const tab = tabs.find((one) => panelOf(one).id === view);
  if (tab === undefined) return false;
  chosen = true;
  if (document.body.dataset.view !== view) select(tab);
  if (view === "chat" && id !== conversation) chat.open(id);
  return true;
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(tabs[to % tabs.length], { focus: true });
  });
}
addEventListener("popstate", () => {
  if (!follow() && document.body.dataset.view === "chat") chat.open(null);
});

// Keys

const keys = byId("keys");
byId("keys-open").addEventListener("click", () => keys.showModal());
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("button")) dialog.close();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "Escape" && hide()) return;
  if (event.key === "?" && !typing) keys.showModal();
  else if (document.body.dataset.view === "chat" && chat.press(event)) event.preventDefault();
  else if (event.key === "Escape") for (const { run } of [prompt, chat]) run.stop();
});

// The keyboard of a phone covers a part of the page where the browser does not make the page smaller.
visualViewport?.addEventListener("resize", () => {
  if (visualViewport.scale === 1) document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
});

// Live state

const plots = {
  throughput: new Plot(byId("plot-throughput"), { format: (value) => value.toFixed(0), scale: 10 }),
  running: new Plot(byId("plot-running"), { scale: 4 }),
  waiting: new Plot(byId("plot-waiting"), { scale: 4 }),
  kv: new Plot(byId("plot-kv"), { format: (value) => `${value.toFixed(value < 10 ? 1 : 0)} %`, scale: 20 }),
};
let described = false;

async function report({ state, phase, sample }) {
  const text = phase ? `${state}: ${phase}` : state;
  const node = byId("state");
  if (node.textContent !== text) node.textContent = text;
  node.dataset.state = state;
  for (const [name, plot] of Object.entries(plots)) plot.add(sample?.[name] ?? null);
  if (state === "ready" && !described) await describe();
  described = state === "ready";
}

async function describe() {
  let found;
  try {
    found = await getJson("info");
  } catch (error) {
    byId("model").textContent = error.message;
    return;
  }
  const { model_id: model, model_device_type: device, model_dtype: dtype, quantization } = found;
  const how = [device, dtype, quantization === "none" ? "" : quantization].filter(Boolean).join(", ");
  byId("model").replaceChildren(element("strong", {}, model), ` ${how}`);
  document.title = `${model} · Tessera`;
  setLimits(found);
  showFacts(byId("facts"), found);
  chat.describe(found);
  const first = found.model_use === "chat" ? "chat" : "prompt";
  keep(FIRST, first);
  const typing = byId("prompt-form").contains(document.activeElement);
  if (!chosen && !typing && document.body.dataset.view !== first) select(byId(`tab-${first}`));
  try {
    setModels((await getJson("v1/models")).data.map((one) => one.id));
  } catch {
    // The names are a choice only where there are several.
  }
  if (document.body.dataset.view === "engine") loadPlan();
}

async function loadPlan() {
  const error = byId("engine").querySelector(".error");
  try {
    await showPlan(byId("plan"));
    error.replaceChildren();
  } catch (problem) {
    error.textContent = problem.message;
  }
}

const monitor = new Monitor(report);
setUpPresets();
setUpScheme();
setUp(
  () => [prompt, chat].forEach((view) => view.update()),
  () => {
    described = false;
    monitor.restart();
  },
);

if (!follow()) select(recall(FIRST) === "chat" ? byId("tab-chat") : byId("tab-prompt"));
