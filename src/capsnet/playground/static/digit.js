// One digit: capsule lengths, the reconstruction of the chosen capsule, and its numbers to turn.

import { Latest } from "./api.js";
import { Bars, showPicture } from "./draw.js";
import { change, readIndex, state } from "./state.js";

const REACH = 0.4; // how far a number can be turned either way
const STRIP = Array.from({ length: 11 }, (_, place) => (place - 5) / 20); // Fig. 4: ±0.25 by 0.05

const find = (id) => document.getElementById(id);

export class DigitView {
  #predict = new Latest("/api/predict");
  #reconstruct = new Latest("/api/reconstruct");
  #perturb = new Latest("/api/perturb");
  #said = null;
  #turn = 0;
  #sliders = [];
  #playing = null;

  constructor(page) {
    this.page = page;
    this.bars = new Bars(find("lengths"), "class", (number) => {
      change({ class: String(number), offsets: "" });
      this.#showChosen();
    });
    find("reset").addEventListener("click", () => {
      this.stop();
      change({ offsets: "" });
      this.#showChosen();
    });
    find("all-dimensions").addEventListener("click", () => {
      change({ glance: state.glance ? "" : "open" });
      this.#showGlance();
    });
  }

  update() {
    const { pad, weights, iterations } = this.page;
    find("verdict").textContent = "";
    this.#reconstruct.drop();
    this.#perturb.drop();
    const body = { weights: weights.name, image: pad.body(), num_iterations: iterations };
    const turn = ++this.#turn;
    this.#predict.ask(body, (said) => {
      if (weights !== this.page.weights) return;
      this.#said = { ...said, weights, turn };
      showPicture(find("seen"), said.input);
      this.#showChosen();
    });
  }

  get #chosen() {
    return readIndex(state.class, this.#said.lengths.length) ?? this.#said.classes[0];
  }

  get #offsets() {
    return state.offsets.split(",").map((text) => Math.min(Math.max(Number(text) || 0, -REACH), REACH));
  }

  get #capsule() {
    const offsets = this.#offsets;
    return this.#said.capsules[this.#chosen].map((value, place) => value + (offsets[place] ?? 0));
  }

  /** Whether what was said last came from the weights that are chosen now. */
  get #isCurrent() {
    return this.#said?.weights === this.page.weights;
  }

  #showChosen() {
    if (!this.#isCurrent) return;
    const { weights, pad } = this.page;
    const { lengths, classes, label, turn } = this.#said;
    const marks = { [classes[0]]: "best" };
    this.bars.show(lengths, weights.classes, marks, this.#chosen);
    const isOld = turn !== this.#turn; // an answer on the digit before, while one draws
    find("verdict").textContent = pad.isEmpty || isOld ? "" : verdict(weights, lengths, classes, label);
    for (const each of document.querySelectorAll(".chosen-name")) each.textContent = weights.classes[this.#chosen];
    for (const each of document.querySelectorAll(".dims")) each.textContent = weights.capsule_dim;
    find("digit-note").textContent = weights.decoder
      ? "The decoder knows nothing but this one capsule's vector."
      : "These weights were trained without reconstruction, so there is no decoder to draw with.";
    this.#buildSliders(weights.capsule_dim, weights.decoder);
    this.#draw();
    this.#showGlance();
  }

  #buildSliders(count, enabled) {
    if (this.#sliders.length !== count) {
      find("sliders").replaceChildren();
      this.#sliders = Array.from({ length: count }, (_, place) => this.#buildSlider(place));
    }
    const offsets = this.#offsets;
    this.#sliders.forEach(({ slider, value, play }, place) => {
      slider.value = offsets[place] ?? 0;
      slider.disabled = play.disabled = !enabled;
      value.textContent = this.#capsule[place].toFixed(2);
    });
    find("all-dimensions").disabled = !enabled;
  }

  #buildSlider(place) {
    const row = document.createElement("div");
    row.className = "slider";
    const name = document.createElement("label");
    const slider = document.createElement("input");
    const value = Object.assign(document.createElement("span"), { className: "value" });
    const play = document.createElement("button");
    Object.assign(slider, { type: "range", min: -REACH, max: REACH, step: 0.01, value: 0, id: `dimension-${place}` });
    Object.assign(name, { htmlFor: slider.id, textContent: place });
    Object.assign(play, { type: "button", className: "quiet", textContent: "▶", title: `Sweep number ${place}` });
    play.setAttribute("aria-label", play.title);
    slider.addEventListener("input", () => this.#turned());
    slider.addEventListener("dblclick", () => { slider.value = 0; this.#turned(); });
    play.addEventListener("click", () => this.#play(place));
    row.append(name, slider, value, play);
    find("sliders").append(row);
    return { row, slider, value, play };
  }

  #turned() {
    if (!this.#isCurrent) return;
    const offsets = this.#sliders.map(({ slider }) => Number(slider.value));
    change({ class: String(this.#chosen), offsets: offsets.some(Boolean) ? offsets.join(",") : "" });
    this.#sliders.forEach(({ value }, place) => { value.textContent = this.#capsule[place].toFixed(2); });
    this.#draw();
  }

  #draw() {
    const canvas = find("reconstruction");
    const { weights } = this.page;
    if (!weights.decoder) {
      this.#reconstruct.drop();
      canvas.width = canvas.height = 28;
    } else if (state.offsets || !this.#said.reconstruction || this.#chosen !== this.#said.reconstructed) {
      const body = { weights: weights.name, class: this.#chosen, capsule: this.#capsule };
      this.#reconstruct.ask(body, ({ image }) => showPicture(canvas, image));
    } else {
      this.#reconstruct.drop();
      showPicture(canvas, this.#said.reconstruction);
    }
  }

  #play(place) {
    const again = this.#playing?.place === place;
    this.stop();
    if (again) return;
    const { slider, play, row } = this.#sliders[place];
    const start = performance.now();
    play.textContent = "■";
    play.setAttribute("aria-pressed", "true");
    row.classList.add("playing");
    const tick = (now) => {
      slider.value = REACH * Math.sin((now - start) / 600);
      this.#turned();
      this.#playing.frame = requestAnimationFrame(tick);
    };
    this.#playing = { place, frame: requestAnimationFrame(tick) };
  }

  stop() {
    if (!this.#playing) return;
    cancelAnimationFrame(this.#playing.frame);
    const { play, row } = this.#sliders[this.#playing.place];
    play.textContent = "▶";
    play.setAttribute("aria-pressed", "false");
    row.classList.remove("playing");
    this.#playing = null;
  }

  /** Every dimension moved from -0.25 to 0.25, as in Fig. 4 of the paper. */
  #showGlance() {
    const glance = find("glance");
    glance.hidden = !state.glance || !this.page.weights.decoder;
    find("all-dimensions").setAttribute("aria-expanded", String(!glance.hidden));
    find("all-dimensions").textContent = glance.hidden ? "Show all at a glance" : "Hide the overview";
    if (glance.hidden || !this.#isCurrent) return;
    const body = {
      weights: this.page.weights.name, class: this.#chosen, capsule: this.#said.capsules[this.#chosen],
      dimensions: this.#sliders.map((_, place) => place), offsets: STRIP,
    };
    this.#perturb.ask(body, ({ images }) => {
      glance.replaceChildren(...images.flatMap((row, place) => {
        const name = document.createElement("span");
        name.textContent = place;
        return [name, ...row.map((image) => {
          const canvas = document.createElement("canvas");
          showPicture(canvas, image);
          return canvas;
        })];
      }));
      const legend = document.createElement("p");
      legend.textContent = "Each row turns one number from −0.25 to +0.25 in steps of 0.05, as Fig. 4 of the paper does.";
      glance.append(legend);
    });
  }
}

function verdict(weights, lengths, classes, label) {
  const [best] = classes;
  const unknown = `It looks like no ${weights.digits ? "digit" : "class"} it knows; nearest is`;
  const sure = lengths[best] >= 0.7 ? "It is" : lengths[best] >= 0.4 ? "It may be" : unknown;
  const truth = label === null ? "" : label === best ? " Right." : ` Wrong: it is labelled ${label}.`;
  return `${sure} ${nameOf(weights, best)}.${truth}`;
}

/** A class in a sentence: a 7, an 8, “ankle boot”. */
export function nameOf(weights, number) {
  const name = weights.classes[number];
  return weights.digits ? `${name === "8" ? "an" : "a"} ${name}` : `“${name}”`;
}
