// The kernel plan of GET /plan, and the facts of GET /info, as tables.

import { getJson } from "./api.js";
import { define, element } from "./dom.js";

/** Fetch and show the plan; throws an ApiError. */
export async function showPlan(node) {
  const plan = await getJson("plan");
  const single = element("p", { class: "wide" }, `A decode step of one sequence: ${plan.one_sequence}.`);
  const { requests, why } = plan.deterministic;
  const deterministic = element("p", { class: "wide" }, `Deterministic requests: ${requests}; ${why}.`);
  const parts = [facts(plan), single, deterministic, ...plan.phases.map(phase), steps(plan.steps)];
  node.replaceChildren(element("p", {}, plan.arch_name), ...parts);
}

/** Show what /info reports. */
export function showFacts(list, info) {
  // `version` is that of the API, by which clients of Text Generation Inference choose what they send.
  const { tessera_version: own, version, ...others } = info;
  const versions = [["Tessera version", own], ["version of TGI's API", version]];
  define(list, [...versions.filter(([, value]) => value != null), ...flatten(others)]);
}

/** Pairs of name and text of a document's values, those of nested objects and lists too. */
function flatten(value, name = "") {
  if (value === null || value === undefined) return [];
  if (typeof value !== "object") return [[name, format(value)]];
  const entries = Object.entries(value);
  if (entries.length === 0) return [[name, "none"]];
  if (Array.isArray(value) && value.every((one) => one === null || typeof one !== "object")) {
    return [[name, value.map(format).join(", ")]];
  }
  // Lists are numbered from 1.
  const key = (part) => readable(Array.isArray(value) ? String(Number(part) + 1) : part);
  return entries.flatMap(([part, one]) => flatten(one, name ? `${name}: ${key(part)}` : key(part)));
}

function facts(plan) {
  const list = element("dl", { class: "facts" });
  define(list, [
    ["attention heads", `${plan.num_heads} query, ${plan.num_kv_heads} key-value, dimension ${plan.head_dim}`],
    ...(plan.num_ranks > 1 ? [["one rank of", plan.num_ranks]] : []),
    ["dtype", plan.dtype],
    ["weights", plan.weight_dtype],
    ["KV cache", plan.block_size === null ? plan.kv_dtype : `${plan.kv_dtype}, blocks of ${plan.block_size} tokens`],
    ["KV cache for a token", `${format(plan.memory.kv_bytes_per_token / 1024)} KiB`],
    [plan.sm ? "multiprocessors" : "cores", plan.num_sms],
    ["memory bandwidth", plan.memory_bandwidth_gbs ? `${format(plan.memory_bandwidth_gbs)} GB/s` : "not known"],
    ["peak", plan.peak_tflops ? `${format(plan.peak_tflops)} TFLOP/s` : "not known"],
  ]);
  return list;
}

function phase(one) {
  const layers = one.sliding_window === null ? "" : `, window of ${format(one.sliding_window)} tokens`;
  const parts = [
    element("h3", {}, `${one.phase}${layers}`),
    element("p", { class: "kernel" }, element("code", {}, one.kernel), ` ${lineage(one)}`),
    element("p", {}, `${one.why}.`),
  ];
  if (one.launches.length) parts.push(launches(one.launches));
  if (one.refused.length) parts.push(refused(one.refused));
  return element("section", { class: "phase" }, ...parts);
}

function lineage({ flash_attention: generation, tested }) {
  const follows = generation === null ? "PyTorch's attention" : `FlashAttention-${generation}`;
  return tested ? follows : `${follows}; not tested on a processor of this architecture`;
}

function launches(rows) {
  return table(
    "Launch configurations",
    ["sequences", "longest", "tile", "warps", "stages", "per SM", "source"],
    rows.map((row) => [
      row.min_num_seqs <= 1 ? "any" : `≥ ${format(row.min_num_seqs)}`,
      row.max_seqlen_k === null ? "any" : `≤ ${format(row.max_seqlen_k)}`,
      `${row.block_m} × ${row.block_n}`,
      row.num_warps,
      row.num_stages,
      row.programs_per_sm,
      row.measured ? `measured: ${row.provenance}` : row.provenance,
    ]),
  );
}

function steps(rows) {
  return element(
    "section",
    { class: "phase" },
    element("h3", {}, "steps"),
    ...rows.map((step) =>
      table(`${step.step}: ${step.executor}`, ["operation", "kernel"], step.operations.map((it) => [it.operation, it.kernel])),
    ),
  );
}

function refused(rows) {
  return table(
    "Preferred kernels that do not apply",
    ["kernel", "reason"],
    rows.map((row) => [row.kernel, row.reasons.join("; ")]),
  );
}

function table(caption, columns, rows) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell)))));
  // Focusable, because a wide table scrolls sideways on a narrow screen.
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
    element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body)),
  );
}

function readable(name) {
  return name.replaceAll("_", " ");
}

function format(value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 16 }) : String(value);
}
