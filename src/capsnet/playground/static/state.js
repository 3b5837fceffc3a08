// What the page shows, kept in the address, so that a view can be shared and reloaded.

const defaults = {
  view: "digit", weights: "", iterations: "", input: "t0", class: "", offsets: "",
  map: "coupling", step: "", a: "t3", b: "t0", shifts: "-3,-2,3,2", glance: "",
  left: "", leftIterations: "", right: "", rightIterations: "",
};

export const state = { ...defaults };
let timer = 0;
let known = ""; // the address's last part when it was last read or written here

export function readAddress() {
  known = location.hash;
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(defaults)) state[name] = given.get(name) ?? defaults[name];
}

/** A whole number below `count` from the address; null if it is none. */
export function readIndex(text, count) {
  return /^\d{1,4}$/.test(text) && Number(text) < count ? Number(text) : null;
}

/** Changes the state; the address follows, soon but not with every move of a pen. */
export function change(values) {
  Object.assign(state, values);
  timer ||= setTimeout(writeAddress, 350); // browsers allow about three changes a second
}

export function writeAddress() {
  clearTimeout(timer);
  timer = 0;
  if (location.hash !== known) return; // the user's new one is still to be read
  const set = Object.entries(state).filter(([name, value]) => String(value) !== defaults[name]);
  const text = new URLSearchParams(set.map(([name, value]) => [name, String(value)])).toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
  known = location.hash;
}

export function toBase64(bytes) {
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

/** Text for the address from bytes, and back. */
export function packBytes(bytes) {
  return toBase64(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export function unpackBytes(text) {
  try {
    const content = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    return Uint8Array.from(content, (letter) => letter.charCodeAt(0));
  } catch {
    return new Uint8Array();
  }
}
