// Measures a stream as the browser sees it, and collects what the server accounts for.

/** Times of one request, from the moment it is created. */
export class Stopwatch {
  constructor() {
    this.began = performance.now();
    this.first = this.last = null;
    this.tokens = 0;
    this.facts = {};
  }

  /** The response has begun. */
  respond(response) {
    this.facts.promptTokens = response.headers.get("x-prompt-tokens") ?? undefined;
  }

  /** A token has arrived. */
  token() {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += 1;
  }

  /** The stream has ended. */
  end({ tokens, promptTokens, seed }) {
    this.tokens = tokens ?? this.tokens;
    this.facts.promptTokens = promptTokens ?? this.facts.promptTokens;
    this.facts.seed = seed;
  }

  /** Pairs of name and value; `outcome` says how the request stands. */
  measures(outcome) {
    const span = this.last - this.first;
    const pairs = [["finish", outcome]];
    if (this.first !== null) pairs.push(["first token", milliseconds(this.first - this.began)]);
    if (span > 0 && this.tokens > 1) pairs.push(["tokens/s", rate(((this.tokens - 1) / span) * 1000)]);
    if (this.first !== null) pairs.push(["total", milliseconds(this.last - this.began)]);
    if (this.tokens) pairs.push(["tokens", this.tokens]);
    if (this.facts.promptTokens !== undefined) pairs.push(["prompt tokens", this.facts.promptTokens]);
    if (this.facts.seed !== undefined) pairs.push(["seed", this.facts.seed]);
    return pairs;
  }
}

/** The server's accounting of a request: its headers, and further figures of the last event. */
export function accountingOf(response, end) {
  const pairs = [];
  for (const [name, value] of response.headers) {
    if (name.startsWith("x-tessera-") && name !== "x-tessera-warnings") {
      pairs.push([readable(name.slice("x-tessera-".length)), value]);
    }
  }
  return pairs.concat(flatten(end.accounting ?? {}));
}

function flatten(record, prefix = "") {
  return Object.entries(record).flatMap(([name, value]) => {
    if (value === null) return [];
    if (typeof value === "object") return flatten(value, `${prefix}${name} `);
    return [[readable(prefix + name), typeof value === "number" ? Number(value.toPrecision(6)) : value]];
  });
}

function readable(name) {
  return name.replaceAll(/[-_]/g, " ");
}

function milliseconds(value) {
  return value < 10_000 ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : `${(value / 1000).toFixed(1)} s`;
}

function rate(value) {
  return value.toFixed(value < 100 ? 1 : 0);
}
