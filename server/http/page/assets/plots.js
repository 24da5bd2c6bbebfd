// Small plots of the last minute.

import { element, graphic } from "./dom.js";

const SAMPLES = 61;
const WIDTH = SAMPLES - 1;
const HEIGHT = 32;

/** A plot of one figure in a <figure> that has a caption. */
export class Plot {
  /**
   * @param {HTMLElement} figure
   * @param {object} options
   * @param {function(number): string} options.format  Renders a value with its unit.
   * @param {number} options.scale  Smallest value of the top of the plot.
   */
  constructor(figure, { format = String, scale = 1 } = {}) {
    this.format = format;
    this.scale = scale;
    this.name = figure.querySelector("figcaption").textContent;
    this.values = [];
    this.area = graphic("path", { class: "area" });
    this.line = graphic("path", { class: "line" });
    this.value = element("p", { class: "value" }, "–");
    this.svg = graphic(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": this.name },
      this.area,
      this.line,
    );
    figure.append(this.value, this.svg);
  }

  /** Add the newest value; null is a gap. */
  add(value) {
    this.values = [...this.values, value].slice(-SAMPLES);
    this.value.textContent = value === null ? "–" : this.format(value);
    const known = this.values.filter((one) => one !== null);
    const highest = Math.max(0, ...known);
    this.#draw(Math.max(this.scale, highest));
    const now = value === null ? "unknown" : this.format(value);
    this.svg.setAttribute("aria-label", `${this.name}: now ${now}, highest ${this.format(highest)} in the last minute`);
  }

  #draw(top) {
    const start = SAMPLES - this.values.length;
    let line = "";
    let area = "";
    let run = [];
    const close = () => {
      if (!run.length) return;
      const path = run.map(([x, y]) => `${x} ${y.toFixed(2)}`).join("L");
      line += `M${path}`;
      area += `M${run[0][0]} ${HEIGHT}L${path}L${run.at(-1)[0]} ${HEIGHT}Z`;
      run = [];
    };
    for (const [i, value] of this.values.entries()) {
      if (value === null) close();
      else run.push([start + i, HEIGHT - 1 - (value / top) * (HEIGHT - 2)]);
    }
    close();
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}
