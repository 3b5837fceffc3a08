// The same digit seen by two sets of weights, or by one with different numbers of iterations.

import { Latest } from "./api.js";
import { Bars, showPicture } from "./draw.js";
import { change, state } from "./state.js";

const find = (id) => document.getElementById(id);
const sides = [
  { host: "compare-a", weights: "left", iterations: "leftIterations", fallback: (all) => [all[0], 1] },
  { host: "compare-b", weights: "right", iterations: "rightIterations", fallback: (all) => [all[0], ""] },
];

export class CompareView {
  #sides = [];
  #turn = 0;

  constructor(page) {
    this.page = page;
  }

  start() {
    this.#sides = sides.map((side, place) => this.#build(side, place));
  }

  #build(side, place) {
    const { all, iterationOptions } = this.page;
    const host = find(side.host);
    const head = document.createElement("div");
    head.className = "row";
    const [weights, iterations] = [document.createElement("select"), document.createElement("select")];
    weights.setAttribute("aria-label", `Weights ${place + 1}`);
    iterations.setAttribute("aria-label", `Routing ${place + 1}`);
    weights.append(...all.map((each) => new Option(each.name, each.name)));
    iterations.append(...iterationOptions());
    const [defaultWeights, defaultIterations] = side.fallback(all);
    weights.value = state[side.weights];
    if (!weights.value) weights.value = defaultWeights.name;
    iterations.value = state[side.iterations] === "0" ? "" : state[side.iterations] || String(defaultIterations);
    if (iterations.selectedIndex < 0) iterations.value = String(defaultIterations);
    const act = () => {
      change({ [side.weights]: weights.value, [side.iterations]: iterations.value || "0" });
      this.update();
    };
    weights.addEventListener("change", act);
    iterations.addEventListener("change", act);
    head.append(weights, iterations);
    const facts = Object.assign(document.createElement("p"), { className: "hint" });
    const bars = Object.assign(document.createElement("div"), { className: "bars" });
    const figure = document.createElement("figure");
    const canvas = Object.assign(document.createElement("canvas"), { className: "picture" });
    const caption = document.createElement("figcaption");
    figure.append(canvas, caption);
    const body = Object.assign(document.createElement("div"), { className: "compare-body" });
    body.append(bars, figure);
    host.replaceChildren(head, facts, body);
    return { weights, iterations, facts, bars: new Bars(bars, `compare-${place}`, null), canvas, caption, figure, ask: new Latest("/api/predict") };
  }

  update() {
    const winners = [null, null];
    const turn = ++this.#turn;
    find("compare-verdict").textContent = "";
    this.#sides.forEach((side, place) => {
      const weights = this.page.all.find((each) => each.name === side.weights.value);
      side.facts.textContent = describe(weights);
      const body = { weights: weights.name, image: this.page.pad.body(), num_iterations: Number(side.iterations.value) || null };
      side.ask.ask(body, (said) => {
        side.bars.show(said.lengths, weights.classes, { [said.classes[0]]: "best" }, -1);
        side.figure.hidden = !said.reconstruction;
        if (said.reconstruction) showPicture(side.canvas, said.reconstruction);
        side.caption.textContent = `capsule ${weights.classes[said.classes[0]]}, decoded`;
        winners[place] = { name: weights.classes[said.classes[0]], length: said.lengths[said.classes[0]] };
        if (turn === this.#turn) this.#showVerdict(...winners); // not on the digit before
      });
    });
  }

  #showVerdict(left, right) {
    if (!left || !right) return;
    const text = (side) => `${side.name} (length ${side.length.toFixed(2)})`;
    find("compare-verdict").textContent = this.page.pad.isEmpty
      ? "Draw a digit, or step to a test digit."
      : left.name === right.name
      ? `Both say ${left.name}: lengths ${left.length.toFixed(2)} and ${right.length.toFixed(2)}.`
      : `They differ: the first says ${text(left)}, the second ${text(right)}.`;
  }
}

export function describe(weights) {
  const facts = [
    `trained with ${weights.num_iterations} iteration${weights.num_iterations === 1 ? "" : "s"}`,
    weights.decoder ? "with reconstruction" : "without reconstruction",
    `${(weights.num_parameters / 1e6).toFixed(1)} million parameters`,
  ];
  if (weights.error_rate !== null) facts.push(`test error ${(weights.error_rate * 100).toFixed(2)} %`);
  return facts.join(", ");
}
