// A place to give a digit: drawn strokes, a test digit, or an image that is dropped or chosen.
//
// Its value is text for the address: t12 is test digit 12, s… are strokes, p… are pixels.

import { get, post, say } from "./api.js";
import { bytesOf, showPicture } from "./draw.js";
import { packBytes, toBase64, unpackBytes } from "./state.js";

const SIDE = 256; // strokes are kept on a grid of 256×256
const PEN = 21;
const NUM_TEST = 10000;
// Bytes and pixels from which on a file is scaled down before it is sent: two must fit into one request.
const [LARGE, MAX_SIDE, SMALL_SIDE] = [1_400_000, 4096, 600];
const LONGEST = 255; // points of a stroke, whose number is one byte

const testDigits = new Map();

async function testDigit(index) {
  if (!testDigits.has(index)) testDigits.set(index, await get(`/api/digits/${index}`));
  return testDigits.get(index);
}

function icon(text, title, act) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", textContent: text, title });
  button.setAttribute("aria-label", title);
  button.addEventListener("click", act);
  return button;
}

export class Pad {
  #value = "s";
  #strokes = [];
  #pen = null;
  #pointer = 0; // whose pen it is
  #turned = ""; // the value of the image that was dark on light
  #opened = { value: "", file: "" }; // the image opened last: as it was prepared, and as it is
  #opening = 0;

  /** `changed` is called with the value; `weights` names those that prepare a dropped image. */
  constructor(host, { changed, weights, large }) {
    this.changed = changed;
    this.weights = weights;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "picture paper";
    this.canvas.setAttribute("aria-label", "Draw here");
    this.canvas.setAttribute("role", "img");
    this.file = document.createElement("input");
    Object.assign(this.file, { type: "file", accept: "image/*", hidden: true });
    this.number = document.createElement("input");
    Object.assign(this.number, { type: "number", min: 0, max: NUM_TEST - 1, className: "index", title: "Number of the test digit" });
    this.number.setAttribute("aria-label", "Number of the test digit");
    this.label = document.createElement("span");
    this.label.className = "label";
    const tools = document.createElement("div");
    tools.className = "tools";
    tools.append(
      icon(large ? "Clear" : "✕", "Clear", () => this.clear()),
      icon(large ? "Undo" : "↶", "Take the last stroke back", () => this.undo()),
      icon(large ? "Open image…" : "…", "Open an image", () => this.file.click()),
    );
    const stepper = document.createElement("div");
    stepper.className = "tools";
    if (large) stepper.append(Object.assign(document.createElement("span"), { textContent: "Test digit" }));
    stepper.append(
      icon("‹", "Previous test digit", () => this.step(-1)),
      this.number,
      icon("›", "Next test digit", () => this.step(1)),
      icon("⚄", "A test digit at random", () => this.set(`t${Math.floor(Math.random() * NUM_TEST)}`)),
    );
    host.append(this.canvas, tools, stepper, this.label, this.file);
    this.#listen(host);
  }

  /** The image as the API takes it. */
  body() {
    const content = this.#value.slice(1);
    if (this.#value.startsWith("t")) return { test: Number(content) };
    if (this.#value === this.#opened.value) return { file: this.#opened.file }; // each network prepares it its own way
    if (this.#value.startsWith("p")) return { picture: this.#picture };
    const canvas = Object.assign(document.createElement("canvas"), { width: 128, height: 128 });
    const context = canvas.getContext("2d");
    context.fillRect(0, 0, 128, 128);
    context.translate(4, 4); // a black edge, whatever is drawn, tells which is the ground
    context.scale(120 / SIDE, 120 / SIDE);
    drawStrokes(context, this.#strokes);
    return { file: canvas.toDataURL("image/png") };
  }

  get #picture() {
    const { channels, height, width, bytes } = unpackPixels(this.#value.slice(1));
    return { channels, height, width, data: toBase64(bytes) };
  }

  get isEmpty() {
    if (this.#value.startsWith("p")) return !unpackPixels(this.#value.slice(1)).bytes.some(Boolean);
    return this.#value.startsWith("s") && this.#strokes.length === 0;
  }

  async set(value, quiet = false) {
    say("", this);
    this.#pen = null; // a stroke that is being drawn ends here
    this.#value = isValid(value) ? value : "s";
    this.#strokes = this.#value.startsWith("s") ? unpackStrokes(this.#value.slice(1)) : [];
    await this.#show();
    if (!quiet) this.changed(this.#value);
  }

  clear() {
    this.set("s");
  }

  undo() {
    const rest = [...this.#strokes];
    do rest.pop(); while (rest.at(-1)?.length === LONGEST); // a long stroke was cut into several
    if (this.#strokes.length) this.set(`s${packStrokes(rest)}`);
  }

  step(by) {
    const now = this.#value.startsWith("t") ? Number(this.#value.slice(1)) : by > 0 ? -1 : 0;
    this.set(`t${(now + by + NUM_TEST) % NUM_TEST}`);
  }

  async open(file) {
    const [before, turn] = [this.#value, ++this.#opening];
    const isNewest = () => turn === this.#opening && before === this.#value; // nothing was given meanwhile
    try {
      const data = await readImage(file);
      const said = await post("/api/predict", { weights: this.weights(), image: { file: data } });
      if (!isNewest()) return;
      const { channels, height, width } = said.input;
      const sizes = [channels, height >> 8, height & 255, width >> 8, width & 255];
      const value = `p${packBytes([...sizes, ...bytesOf(said.input)])}`;
      this.#turned = said.polarity === "dark on light" ? value : "";
      this.#opened = { value, file: data };
      this.set(value);
    } catch (error) {
      if (isNewest()) say(error.message, this);
    }
  }

  async #show() {
    const value = this.#value;
    const isTest = value.startsWith("t");
    this.number.value = isTest ? this.#value.slice(1) : "";
    this.label.textContent = "";
    if (isTest) {
      try {
        const digit = await testDigit(Number(value.slice(1)));
        if (this.#value !== value) return; // another was set meanwhile
        this.label.textContent = `labelled ${digit.label}`;
        showPicture(this.canvas, digit.image);
      } catch (error) {
        say(error.message, this);
      }
    } else if (this.#value.startsWith("p")) {
      showPicture(this.canvas, this.#picture);
      this.label.textContent = this.#turned === this.#value
        ? "your image, dark on light: turned light on dark"
        : this.isEmpty ? "your image: there is no ink in it" : "your image";
    } else {
      this.#showStrokes();
    }
  }

  #showStrokes() {
    this.canvas.width = this.canvas.height = 2 * SIDE;
    const context = this.canvas.getContext("2d");
    context.fillRect(0, 0, 2 * SIDE, 2 * SIDE);
    context.scale(2, 2);
    if (this.#strokes.length) drawStrokes(context, this.#strokes);
    else {
      context.fillStyle = "#8a8f9c";
      context.font = "20px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillText("draw here", SIDE / 2, SIDE / 2 + 7);
    }
  }

  #listen(host) {
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]
        .map((share) => Math.min(Math.max(Math.round(share * SIDE), 0), SIDE - 1));
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      event.preventDefault();
      if (this.#pen) return; // a second finger
      this.canvas.setPointerCapture(event.pointerId);
      this.#pointer = event.pointerId;
      this.#pen = [place(event)];
      this.#strokes = [...this.#strokes, this.#pen];
      this.#drawn();
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.#pen || event.pointerId !== this.#pointer) return;
      for (const each of event.getCoalescedEvents?.().length ? event.getCoalescedEvents() : [event]) {
        const [x, y] = place(each);
        const [lastX, lastY] = this.#pen.at(-1);
        if (Math.hypot(x - lastX, y - lastY) < 3) continue;
        if (this.#pen.length === LONGEST) {
          this.#pen = [[lastX, lastY]];
          this.#strokes = [...this.#strokes, this.#pen];
        }
        this.#pen.push([x, y]);
      }
      this.#drawn();
    });
    const lift = (event) => {
      if (event.pointerId === this.#pointer) this.#pen = null;
    };
    this.canvas.addEventListener("pointerup", lift);
    this.canvas.addEventListener("pointercancel", lift);
    this.number.addEventListener("change", () => this.set(`t${Math.min(Math.max(Math.round(this.number.value) || 0, 0), NUM_TEST - 1)}`));
    this.file.addEventListener("change", () => {
      if (this.file.files[0]) this.open(this.file.files[0]);
      this.file.value = "";
    });
    host.addEventListener("dragover", (event) => { event.preventDefault(); host.classList.add("over"); });
    host.addEventListener("dragleave", () => host.classList.remove("over"));
    host.addEventListener("drop", (event) => {
      event.preventDefault();
      host.classList.remove("over");
      if (event.dataTransfer.files[0]) this.open(event.dataTransfer.files[0]);
    });
  }

  #drawn() {
    say("", this);
    this.#value = `s${packStrokes(this.#strokes)}`;
    this.number.value = "";
    this.label.textContent = "";
    this.#showStrokes();
    this.changed(this.#value);
  }
}

function isValid(value) {
  if (value.startsWith("p")) {
    const { channels, height, width, bytes } = unpackPixels(value.slice(1));
    return bytes.length > 0 && bytes.length === channels * height * width;
  }
  return /^t\d{1,4}$|^s[\w-]*$/.test(value);
}

function drawStrokes(context, strokes) {
  Object.assign(context, { strokeStyle: "#fff", lineWidth: PEN, lineCap: "round", lineJoin: "round" });
  for (const stroke of strokes) {
    context.beginPath();
    context.moveTo(...stroke[0]);
    for (const point of stroke) context.lineTo(...point);
    context.stroke();
  }
}

function unpackPixels(text) {
  const [channels, highRows, lowRows, highColumns, lowColumns, ...bytes] = unpackBytes(text);
  return { channels, height: 256 * highRows + lowRows, width: 256 * highColumns + lowColumns, bytes };
}

function packStrokes(strokes) {
  return packBytes(strokes.flatMap((stroke) => [stroke.length, ...stroke.flat()]));
}

function unpackStrokes(text) {
  const bytes = [...unpackBytes(text)];
  const strokes = [];
  while (bytes.length > 2) {
    const numbers = bytes.splice(0, 1 + 2 * bytes[0]).slice(1);
    const stroke = [];
    for (let place = 0; place + 1 < numbers.length; place += 2) stroke.push([numbers[place], numbers[place + 1]]);
    if (stroke.length) strokes.push(stroke);
  }
  return strokes;
}

function asText(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the file cannot be read"));
    reader.readAsDataURL(file);
  });
}

/** The file as text, scaled down if it is large; formats that only the server knows are sent as they are. */
async function readImage(file) {
  const image = await createImageBitmap(file).catch(() => null);
  if (file.size <= LARGE && !(image && Math.max(image.width, image.height) > MAX_SIDE)) return asText(file);
  if (!image) throw new Error("the file is too large, or no image");
  const scale = Math.min(1, SMALL_SIDE / Math.max(image.width, image.height));
  const canvas = Object.assign(document.createElement("canvas"), {
    width: Math.max(1, Math.round(image.width * scale)), height: Math.max(1, Math.round(image.height * scale)),
  });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}
