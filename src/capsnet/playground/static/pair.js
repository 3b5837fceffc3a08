// Two digits laid over each other, recognised and taken apart in red and green.

import { Latest } from "./api.js";
import { describe } from "./compare.js";
import { nameOf } from "./digit.js";
import { Bars, bytesOf, showPair, showPicture, showTinted } from "./draw.js";
import { Pad } from "./pad.js";
import { change, state } from "./state.js";

const DIGIT = 28;
const find = (id) => document.getElementById(id);

export class PairView {
  #segment = new Latest("/api/segment");
  #said = null;
  #active = 0;
  #held = null;

  constructor(page) {
    this.page = page;
    this.bars = new Bars(find("pair-lengths"), "pair-class", null);
    this.pads = ["a", "b"].map((name) => new Pad(find(`pad-${name}`), {
      weights: () => (page.all.find((each) => each.digits) ?? page.all[0]).name,
      changed: (value) => {
        change({ [name]: value });
        this.update();
      },
    }));
    const stage = find("stage");
    stage.addEventListener("pointerdown", (event) => this.#grab(event));
    stage.addEventListener("pointermove", (event) => this.#drag(event));
    stage.addEventListener("pointerup", (event) => this.#drop(event));
    stage.addEventListener("pointercancel", (event) => this.#drop(event));
    stage.addEventListener("keydown", (event) => this.#key(event));
  }

  async start() {
    await this.pads[0].set(state.a, true);
    await this.pads[1].set(state.b, true);
    this.#choose(this.#active);
  }

  /** Weights for two digits: their images are larger than a digit. */
  get fitting() {
    return this.page.all.filter((each) => each.digits && each.decoder && each.classes.length > 1
      && each.height > DIGIT && each.width > DIGIT && each.channels === 1);
  }

  /** The chosen weights if they fit, else those of MultiMNIST, else any. */
  get #weights() {
    const fitting = this.fitting;
    return fitting.find((each) => each === this.page.weights) ?? fitting.find((each) => each.dataset === "multimnist") ?? fitting[0];
  }

  get #shifts() {
    const [x, y] = this.#reach;
    const given = state.shifts.split(",").map((text) => Math.round(Number(text)) || 0);
    return [0, 1].map((place) => [
      Math.min(Math.max(given[2 * place] ?? 0, -x), x), Math.min(Math.max(given[2 * place + 1] ?? 0, -y), y)]);
  }

  get #reach() {
    const weights = this.#weights;
    return [Math.floor((weights.width - DIGIT) / 2), Math.floor((weights.height - DIGIT) / 2)];
  }

  update() {
    const weights = this.#weights;
    find("pair-missing").hidden = Boolean(weights);
    for (const card of document.querySelectorAll("#view-pair > .card:not(#pair-missing)")) card.hidden = !weights;
    if (!weights) {
      find("pair-missing").textContent = "Two digits need weights trained on MultiMNIST, whose images have 36×36 pixels; "
        + "none are open here. Train some with “capsnet train multimnist” and open them with “capsnet serve --weights RUN”.";
      return;
    }
    find("pair-weights").textContent = `${weights.name} takes them apart: ${describe(weights)}.`;
    const digits = this.pads.map((pad, place) => {
      const [right, down] = this.#shifts[place];
      return { image: pad.body(), right, down };
    });
    this.#segment.ask({ weights: weights.name, digits }, (said) => {
      this.#said = said;
      this.#show(weights);
    });
  }

  #show(weights) {
    const { input, truth, parts, lengths, predicted, labels } = this.#said;
    const [first, second] = parts;
    showPicture(find("stage"), input);
    showPair(find("pair-found"), first.image, second.image);
    showPair(find("pair-truth"), truth[0], truth[1]);
    showTinted(find("pair-first"), first.image, "--red");
    showTinted(find("pair-second"), second.image, "--green");
    const name = (part) => `capsule ${weights.classes[part.class]} alone`;
    find("pair-first-name").textContent = name(first);
    find("pair-second-name").textContent = name(second);
    this.bars.show(lengths, weights.classes, { [first.class]: "first", [second.class]: "second" }, -1);
    const found = `It found ${nameOf(weights, first.class)} (red) and ${nameOf(weights, second.class)} (green)`;
    const known = labels.filter((label) => label !== null);
    const right = known.every((label) => predicted.includes(label));
    const truthText = known.length < 2 || known[0] === known[1] ? "." : right ? ": both right." : `; the labels are ${known[0]} and ${known[1]}.`;
    const same = known.length === 2 && known[0] === known[1] ? " Two digits of one class cannot be told apart: there is one capsule for each." : "";
    const missing = this.pads.some((pad) => pad.isEmpty);
    find("pair-verdict").textContent = missing ? "A digit is missing: draw one, or step to a test digit." : found + truthText + same;
  }

  #at(event) {
    const box = find("stage").getBoundingClientRect();
    const weights = this.#weights;
    return [((event.clientX - box.left) / box.width) * weights.width, ((event.clientY - box.top) / box.height) * weights.height];
  }

  /** Takes hold of the digit whose ink is nearest to the pointer. */
  #grab(event) {
    if (event.button || !this.#said) return;
    event.preventDefault();
    if (this.#held) return; // a second finger
    const stage = find("stage");
    stage.focus();
    stage.setPointerCapture(event.pointerId);
    const [x, y] = this.#at(event);
    const distance = (picture) => {
      const bytes = bytesOf(picture);
      let nearest = Infinity;
      bytes.forEach((value, place) => {
        if (value > 90) nearest = Math.min(nearest, Math.hypot((place % picture.width) + 0.5 - x, Math.floor(place / picture.width) + 0.5 - y));
      });
      return nearest;
    };
    this.#choose(distance(this.#said.truth[0]) <= distance(this.#said.truth[1]) ? 0 : 1);
    this.#held = { pointer: event.pointerId, from: [x, y], shift: this.#shifts[this.#active] };
  }

  /** Makes a digit the one that the arrow keys move. */
  #choose(place) {
    this.#active = place;
    ["a", "b"].forEach((name, each) => find(`name-${name}`).classList.toggle("active", each === place));
    find("stage").setAttribute("aria-label", `Two overlapping digits; arrow keys move the ${["first", "second"][place]}`);
  }

  #drag(event) {
    if (this.#held?.pointer !== event.pointerId) return;
    const [x, y] = this.#at(event);
    const { from, shift } = this.#held;
    this.#move(shift[0] + Math.round(x - from[0]), shift[1] + Math.round(y - from[1]));
  }

  #drop(event) {
    if (this.#held?.pointer === event.pointerId) this.#held = null;
  }

  #move(right, down) {
    const shifts = this.#shifts;
    const [x, y] = this.#reach;
    shifts[this.#active] = [Math.min(Math.max(right, -x), x), Math.min(Math.max(down, -y), y)];
    const text = shifts.flat().join(",");
    if (text === state.shifts) return;
    change({ shifts: text });
    this.update();
  }

  #key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === " ") this.#choose(1 - this.#active);
    else if (event.key in steps) {
      const [right, down] = this.#shifts[this.#active];
      this.#move(right + steps[event.key][0], down + steps[event.key][1]);
    } else return;
    event.preventDefault();
  }
}
