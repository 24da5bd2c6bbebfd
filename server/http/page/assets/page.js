// The page: tabs, colour scheme, live state and keys. The views are in prompt.js, chat.js and plan.js.

import { setUpChat } from "./chat.js";
import { getJson } from "./api.js";
import { Monitor } from "./metrics.js";
import { showFacts, showPlan } from "./plan.js";
import { Plot } from "./plots.js";
import { setUpPrompt } from "./prompt.js";
import { setLimits, setUp } from "./settings.js";
import { hide } from "./tokens.js";
import { element } from "./dom.js";

const byId = (id) => document.getElementById(id);

// Views and tabs

const views = [setUpPrompt(), setUpChat()];
const tabs = [...document.querySelectorAll('[role="tab"]')];
const panelOf = (tab) => byId(tab.getAttribute("aria-controls"));

function select(tab, focus = false) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    panelOf(other).hidden = other !== tab;
  }
  byId("settings-panel").hidden = tab.id === "tab-engine";
  document.body.dataset.view = panelOf(tab).id;
  history.replaceState(null, "", tab === tabs[0] ? location.pathname + location.search : `#${panelOf(tab).id}`);
  if (focus) tab.focus();
  if (tab.id === "tab-engine") loadPlan();
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(tabs[to % tabs.length], true);
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || hide()) return;
  for (const { run } of views) run.stop();
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
setUp(
  () => views.forEach((view) => view.update()),
  () => {
    described = false;
    monitor.restart();
  },
);

// Colour scheme

const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const scheme = () => root.dataset.scheme ?? (dark.matches ? "dark" : "light");
const label = () => (byId("scheme").textContent = scheme() === "dark" ? "Light" : "Dark");

byId("scheme").addEventListener("click", () => {
  const next = scheme() === "dark" ? "light" : "dark";
  // The system's own scheme needs no choice to be stored, and is then followed again.
  const chosen = next !== (dark.matches ? "dark" : "light");
  if (chosen) root.dataset.scheme = next;
  else delete root.dataset.scheme;
  try {
    if (chosen) localStorage.setItem("tessera.scheme", next);
    else localStorage.removeItem("tessera.scheme");
  } catch {
    // Storage is blocked: the choice lasts until the page is left.
  }
  label();
});
dark.addEventListener("change", label);
label();

select(tabs.find((tab) => location.hash === `#${panelOf(tab).id}`) ?? tabs[0]);
