// Light or dark, on every page: what was chosen last, else as the system has it.

const root = document.documentElement;

export function showTheme() {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen) root.dataset.theme = chosen;
  } catch {
    // Browsers may refuse to store anything.
  }
}

export function switchTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("theme", root.dataset.theme);
  } catch {
    // Then it holds until the page is left.
  }
}
