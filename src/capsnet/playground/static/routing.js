// Routing made visible: maps of the grid for each class and iteration, strongest parts on the image.

import { Latest } from "./api.js";
import { bytesOf, showMap } from "./draw.js";
import { change, readIndex, state } from "./state.js";

const [AMBER, GREY, VIOLET] = ["#ffb020", "#7d8499", "#9d8cff"]; // on the black of the image, in either theme
const find = (id) => document.getElementById(id);

export class RoutingView {
  #route = new Latest("/api/route");
  #routing = null;
  #part = null;
  #timer = 0;

  constructor(page) {
    this.page = page;
    for (const radio of document.querySelectorAll("[name=map]")) {
      radio.addEventListener("change", () => {
        change({ map: radio.value });
        this.show();
      });
    }
    find("play-routing").addEventListener("click", () => this.#play());
  }

  update() {
    const { pad, weights, iterations } = this.page;
    const body = { weights: weights.name, image: pad.body(), num_iterations: iterations };
    this.#route.ask(body, (routing) => {
      if (weights !== this.page.weights) return;
      this.#routing = { ...routing, weights };
      this.#part = null;
      this.show();
    });
  }

  get #last() {
    return this.#routing.iterations.at(-1);
  }

  get #chosen() {
    const { lengths } = this.#last;
    return readIndex(state.class, lengths.length) ?? lengths.indexOf(Math.max(...lengths));
  }

  get #step() {
    const count = this.#routing.iterations.length;
    return readIndex(state.step, count) ?? count - 1;
  }

  show() {
    const { weights } = this.page;
    if (this.#routing?.weights !== weights) return;
    const { kind } = this.#scale;
    for (const radio of document.querySelectorAll("[name=map]")) radio.checked = radio.value === kind;
    const grid = this.#last.coupling[0];
    find("num-primary").textContent = `On a grid of ${grid.length}×${grid[0].length}, ${weights.num_primary.toLocaleString("en")}`;
    this.#showMaps(weights.classes);
    find("map-legend").replaceChildren(...legend(this.#scale));
    find("routing-class").textContent = weights.classes[this.#chosen];
    this.#showParts();
    this.#showOverlay();
  }

  /** What the maps show, and the values that their colours stand for. */
  get #scale() {
    const kind = state.map === "agreement" ? "agreement" : "coupling";
    const { iterations } = this.#routing;
    const highest = iterations.flatMap((each) => each[kind].flat(2)).reduce((most, value) => Math.max(most, value));
    const first = iterations[0].coupling.flat(2); // priors may favour a class, their mean is the even share
    const even = kind === "coupling" ? first.reduce((sum, share) => sum + share) / first.length : 0;
    return { kind, even, highest: Math.max(highest, even + 1e-6) };
  }

  #showMaps(classes) {
    const { kind, even, highest } = this.#scale;
    const host = find("maps");
    host.style.setProperty("--columns", classes.length);
    const cells = [label("")];
    classes.forEach((name, number) => {
      const head = document.createElement("button");
      Object.assign(head, { type: "button", textContent: name, title: `Show the parts of ${name}` });
      head.className = number === this.#chosen ? "head chosen-column" : "head";
      head.setAttribute("aria-pressed", String(number === this.#chosen));
      head.addEventListener("click", () => this.#choose(number, this.#step));
      cells.push(head);
    });
    this.#routing.iterations.forEach((each, step) => {
      cells.push(label(`${step + 1}`, "iteration"));
      classes.forEach((name, number) => {
        const cell = Object.assign(document.createElement("button"), { type: "button" });
        const canvas = document.createElement("canvas");
        showMap(canvas, each[kind][number], even, highest);
        cell.className = "cell";
        if (number === this.#chosen && step === this.#step) cell.classList.add("chosen-cell");
        cell.title = `${kind} with ${name} in iteration ${step + 1}; capsule length ${each.lengths[number].toFixed(2)}`;
        cell.setAttribute("aria-label", cell.title);
        cell.setAttribute("aria-pressed", String(number === this.#chosen && step === this.#step));
        cell.addEventListener("click", () => this.#choose(number, step));
        const length = document.createElement("span");
        const bar = document.createElement("i");
        length.className = "mini";
        bar.style.width = `${each.lengths[number] * 100}%`;
        length.append(bar);
        cell.append(canvas, length);
        cells.push(cell);
      });
    });
    refill(host, cells);
  }

  #choose(number, step) {
    this.stop();
    change({ class: String(number), step: String(step), offsets: "" });
    this.#part = null;
    this.show();
  }

  #showParts() {
    const parts = this.#routing.parts[this.#chosen];
    refill(find("parts"), parts.map((part) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "part";
      const name = document.createElement("span");
      name.textContent = `type ${part.type + 1} at row ${part.row + 1}, column ${part.column + 1}`;
      const path = document.createElement("span");
      path.className = "path";
      path.textContent = part.coupling.map((share) => `${Math.round(share * 100)}`).join(" → ") + " %";
      button.append(name, path);
      const point = () => { this.#part = part; this.#showOverlay(); };
      const leave = () => { this.#part = null; this.#showOverlay(); };
      button.addEventListener("pointerenter", point);
      button.addEventListener("focus", point);
      button.addEventListener("pointerleave", leave);
      button.addEventListener("blur", leave);
      item.append(button);
      return item;
    }));
  }

  /** The image, with a disc where a place gained, and rings around the strongest parts. */
  #showOverlay() {
    const { kind, even, highest } = this.#scale;
    const { input, field, stride, start, iterations, parts } = this.#routing;
    const canvas = find("overlay");
    const scale = canvas.width / input.width;
    canvas.height = Math.round(scale * input.height);
    const context = canvas.getContext("2d");
    drawInput(context, input, scale);
    const map = iterations[this.#step][kind][this.#chosen];
    const centre = (place) => (start + place * stride + field / 2) * scale;
    map.forEach((row, y) => row.forEach((value, x) => {
      const share = (value - even) / (highest - even);
      context.globalAlpha = 0.9;
      context.fillStyle = share > 0.02 ? AMBER : GREY;
      context.beginPath();
      context.arc(centre(x), centre(y), stride * scale * (share > 0.02 ? 0.12 + 0.36 * Math.sqrt(share) : 0.06), 0, 2 * Math.PI);
      context.fill();
    }));
    context.globalAlpha = 1;
    context.lineWidth = 2.5;
    context.strokeStyle = VIOLET;
    for (const part of parts[this.#chosen]) {
      context.beginPath();
      context.arc(centre(part.column), centre(part.row), stride * scale * 0.55, 0, 2 * Math.PI);
      context.stroke();
    }
    if (this.#part) {
      const side = field * scale;
      context.lineWidth = 4;
      context.strokeRect((start + this.#part.column * stride) * scale, (start + this.#part.row * stride) * scale, side, side);
    }
  }

  stop() {
    clearInterval(this.#timer);
  }

  #play() {
    this.stop();
    if (!this.#routing) return;
    let step = 0;
    const show = () => {
      change({ class: String(this.#chosen), step: String(step) });
      this.show();
      step += 1;
      if (step >= this.#routing.iterations.length) this.stop();
    };
    show();
    this.#timer = setInterval(show, 900);
  }
}

/** Puts other elements into a host; the keyboard's focus stays at its place. */
function refill(host, elements) {
  const place = [...host.querySelectorAll("button")].indexOf(document.activeElement);
  host.replaceChildren(...elements);
  host.querySelectorAll("button")[place]?.focus({ preventScroll: true });
}

function label(text, above) {
  const element = document.createElement("span");
  element.className = "row-label";
  if (above) element.append(Object.assign(document.createElement("small"), { textContent: above }));
  element.append(text);
  return element;
}

function legend({ kind, even, highest }) {
  const scale = document.createElement("span");
  scale.className = "scale";
  const lines = "The orange line under each map is the capsule's length; discs on the image mark places that gained, rings the strongest parts.";
  return kind === "coupling"
    ? [`even share ${Math.round(even * 100)} % `, scale, ` ${Math.round(highest * 100)} % of a place's output goes to the digit. ${lines}`]
    : ["0 ", scale, ` ${highest.toFixed(3)} is what a place contributes to the digit's vector. ${lines}`];
}

function drawInput(context, input, scale) {
  const bytes = bytesOf(input);
  const size = input.height * input.width;
  for (let place = 0; place < size; place++) {
    const parts = input.channels === 3 ? [0, 1, 2].map((part) => bytes[part * size + place]) : Array(3).fill(bytes[place]);
    context.fillStyle = `rgb(${parts.map((value) => value * 0.8).join(" ")})`;
    context.fillRect((place % input.width) * scale, Math.floor(place / input.width) * scale, scale + 1, scale + 1);
  }
}
