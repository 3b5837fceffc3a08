// Puts the page together: weights, tabs, the shared input, keys, and the address.

import { get, hush, say } from "./api.js";
import { CompareView, describe } from "./compare.js";
import { DigitView } from "./digit.js";
import { Pad } from "./pad.js";
import { PairView } from "./pair.js";
import { RoutingView } from "./routing.js";
import { change, readAddress, state, writeAddress } from "./state.js";
import { showTheme, switchTheme } from "./theme.js";

const find = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];

/** What the views share. */
class Page {
  all = [];
  pad = null;

  get weights() {
    return this.all.find((each) => each.name === state.weights) ?? this.all[0];
  }

  get iterations() {
    const given = Number(state.iterations);
    return Number.isInteger(given) && given >= 1 && given <= 10 ? given : null;
  }

  iterationOptions() {
    return [new Option("as trained", ""), ...Array.from({ length: 10 }, (_, place) => place + 1).map((count) => new Option(`${count} iteration${count > 1 ? "s" : ""}`, count))];
  }
}

const page = new Page();
let views = {};

function stopAll() {
  for (const each of Object.values(views)) each.stop?.();
}

function showView(name, focus = false) {
  const view = Object.hasOwn(views, name) ? name : "digit";
  change({ view });
  hush();
  stopAll();
  for (const tab of tabs) {
    const chosen = tab.dataset.view === view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    find(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  find("input").hidden = view === "pair";
  find("iterations").disabled = view === "pair" || view === "compare";
  find("weights").disabled = view === "compare" || (view === "pair" && views.pair.fitting.length < 2);
  document.querySelector(".layout").classList.toggle("wide", view === "pair");
}

/** Asks anew; with a new input or new weights, not `keep`, no class is chosen and nothing turned. */
function update({ keep = false } = {}) {
  if (!keep) {
    stopAll();
    change({ class: "", offsets: "" });
  }
  views[state.view].update();
}

function showSettings() {
  find("weights").value = page.weights.name;
  find("weights").title = describe(page.weights);
  find("iterations").value = page.iterations ?? "";
}

function listen() {
  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => {
      showView(tab.dataset.view);
      update({ keep: true });
    });
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      showView(tabs[(place + by + tabs.length) % tabs.length].dataset.view, true);
      update({ keep: true });
    });
  });
  find("weights").addEventListener("change", () => {
    change({ weights: find("weights").value });
    showSettings();
    update();
  });
  find("iterations").addEventListener("change", () => {
    stopAll();
    change({ iterations: find("iterations").value, step: "", offsets: "" });
    update({ keep: true });
  });
  find("theme").addEventListener("click", () => {
    switchTheme();
    update({ keep: true });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update({ keep: true }));
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") && event.target.type !== "radio") return;
    if (event.ctrlKey || event.metaKey || event.altKey || state.view === "pair") return;
    const act = { n: () => page.pad.step(1), p: () => page.pad.step(-1), c: () => page.pad.clear() }[event.key.toLowerCase()];
    act?.();
  });
  window.addEventListener("hashchange", showAddress);
  window.addEventListener("beforeunload", writeAddress);
}

async function showAddress() {
  stopAll();
  readAddress();
  showSettings();
  await page.pad.set(state.input, true);
  await views.pair.start();
  views.compare.start();
  showView(state.view);
  update({ keep: true });
}

async function start() {
  showTheme();
  page.all = (await get("/api/weights")).weights;
  find("weights").append(...page.all.map((each) => new Option(each.name, each.name)));
  find("iterations").append(...page.iterationOptions());
  page.pad = new Pad(find("pad"), {
    large: true,
    weights: () => page.weights.name,
    changed: (input) => {
      change({ input, step: "" });
      update();
    },
  });
  views = { digit: new DigitView(page), routing: new RoutingView(page), pair: new PairView(page), compare: new CompareView(page) };
  listen();
  await showAddress();
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => say(error.message));
