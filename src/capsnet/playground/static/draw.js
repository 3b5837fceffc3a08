// Pictures, bars and maps on canvases; colours come from the style sheet.

export function bytesOf(picture) {
  return Uint8Array.from(atob(picture.data), (letter) => letter.charCodeAt(0));
}

function colour(name) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hex = probe.fillStyle;
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

function paint(canvas, height, width, pixel) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let place = 0; place < height * width; place++) {
    image.data.set([...pixel(place), 255], place * 4);
  }
  context.putImageData(image, 0, 0);
}

export function showPicture(canvas, picture) {
  const bytes = bytesOf(picture);
  const size = picture.height * picture.width;
  paint(canvas, picture.height, picture.width, picture.channels === 3
    ? (place) => [bytes[place], bytes[size + place], bytes[2 * size + place]]
    : (place) => [bytes[place], bytes[place], bytes[place]]);
}

/** Two pictures in red and green; where both have ink it is yellow. */
export function showPair(canvas, first, second) {
  const [one, two] = [bytesOf(first), bytesOf(second)];
  const [red, green] = [colour("--red"), colour("--green")];
  paint(canvas, first.height, first.width, (place) =>
    red.map((value, part) => Math.min(255, (value * one[place] + green[part] * two[place]) / 255)));
}

export function showTinted(canvas, picture, name) {
  const bytes = bytesOf(picture);
  const tint = colour(name);
  paint(canvas, picture.height, picture.width, (place) => tint.map((value) => (value * bytes[place]) / 255));
}

/** A map in colours: `even` has the colour of the ground, `highest` and 0 those of the two ends. */
export function showMap(canvas, map, even, highest) {
  const stops = ["--heat-low", "--heat-0", "--heat-1", "--heat-2"].map(colour);
  const between = (low, high, share) => low.map((value, part) => value + (high[part] - value) * share);
  const colours = map.flat().map((value) => {
    if (value < even) return between(stops[1], stops[0], Math.min((even - value) / (even || highest), 1));
    const share = highest > even ? (value - even) / (highest - even) : 0;
    return share < 0.5 ? between(stops[1], stops[2], 2 * share) : between(stops[2], stops[3], 2 * share - 1);
  });
  paint(canvas, map.length, map[0].length, (place) => colours[place]);
}

/** Rows of bars, one for each class; `choose` makes them radio buttons. */
export class Bars {
  constructor(host, name, choose) {
    Object.assign(this, { host, name, choose, rows: [] });
  }

  show(lengths, classes, marks, chosen) {
    if (this.rows.length !== lengths.length) this.#build(classes);
    this.rows.forEach((row, number) => {
      const percent = Math.round(lengths[number] * 100);
      row.bar.style.width = `${lengths[number] * 100}%`;
      row.value.textContent = lengths[number].toFixed(2);
      row.name.textContent = classes[number];
      row.element.className = `bar ${marks[number] ?? ""} ${number === chosen ? "chosen" : ""}`;
      row.track.setAttribute("aria-label", `class ${classes[number]}: length ${percent} %`);
      if (row.radio) row.radio.checked = number === chosen;
    });
  }

  #build(classes) {
    this.host.replaceChildren();
    if (this.choose) {
      this.host.setAttribute("role", "radiogroup");
      this.host.setAttribute("aria-label", "Capsule");
    }
    this.rows = classes.map((_, number) => {
      const element = document.createElement(this.choose ? "label" : "div");
      const [name, track, bar, value] = Array.from({ length: 4 }, () => document.createElement("span"));
      name.className = "name";
      value.className = "value";
      track.className = "track";
      track.setAttribute("role", "img");
      track.append(bar);
      let radio = null;
      if (this.choose) {
        radio = document.createElement("input");
        Object.assign(radio, { type: "radio", name: this.name, value: String(number) });
        radio.addEventListener("change", () => this.choose(number));
        element.append(radio);
      }
      element.append(name, track, value);
      this.host.append(element);
      return { element, name, track, bar, value, radio };
    });
  }
}
