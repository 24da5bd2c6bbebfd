// Follows the engine's state by reading /metrics every second while the page is visible.

import { ApiError, get } from "./api.js";

const INTERVAL = 1000;

/** Parse the samples of Prometheus' text format: by name, a list of labels (as text) and value. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (match === null) continue;
    const [, name, labels = "", value] = match;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(value) });
  }
  return samples;
}

/** Sum of a metric over its labels; 0 if it does not exist. */
function sum(samples, name) {
  return (samples.get(name) ?? []).reduce((total, sample) => total + sample.value, 0);
}

/** Polls, and calls `report` with {state, phase, sample}; `sample` is null unless the figures are known. */
export class Monitor {
  constructor(report) {
    this.report = report;
    this.previous = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.restart());
    this.restart();
  }

  /** Read at once, and from then on every second. Rates start anew. */
  restart() {
    clearTimeout(this.timer);
    this.previous = null;
    this.round = Symbol("round");
    if (!document.hidden) this.#poll(this.round);
  }

  async #poll(round) {
    const seen = await this.#read();
    if (round !== this.round) return;
    this.report(seen);
    if (seen.state === "locked") return; // until there is another key
    this.timer = setTimeout(() => this.#poll(round), INTERVAL);
  }

  async #read() {
    try {
      const response = await get("metrics");
      if (response.status === 401 || response.status === 403) {
        return { state: "locked", phase: "API key needed", sample: null };
      }
      if (!response.ok) throw new ApiError(`/metrics: status ${response.status}`);
      const samples = parse(await response.text());
      const state = stateOf(samples);
      const phase = state === "ready" ? "" : await this.#phase();
      return { state, phase, sample: this.#sample(samples) };
    } catch (error) {
      return { state: "unreachable", phase: error.message, sample: null };
    }
  }

  async #phase() {
    const response = await get("health");
    const { phase } = await response.json();
    return phase;
  }

  #sample(samples) {
    const now = performance.now();
    const tokens = sum(samples, "tessera_generation_tokens_total");
    const before = this.previous;
    this.previous = { now, tokens };
    // The counter falls only if the service was started again.
    const known = before !== null && tokens >= before.tokens;
    return {
      throughput: known ? ((tokens - before.tokens) / (now - before.now)) * 1000 : null,
      running: sum(samples, "tessera_requests_running"),
      waiting: sum(samples, "tessera_requests_waiting"),
      kv: sum(samples, "tessera_kv_cache_usage_ratio") * 100,
    };
  }
}

function stateOf(samples) {
  const states = samples.get("tessera_engine_state") ?? [];
  const current = states.find((sample) => sample.value === 1);
  return /state="(\w+)"/.exec(current?.labels ?? "")?.[1] ?? "unknown";
}
