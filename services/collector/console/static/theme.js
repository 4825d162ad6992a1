/* Runs before the first paint, so that the page does not flash in the other theme. */
"use strict";

(() => {
  const KEY = "baton-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  const apply = () => {
    root.dataset.theme = localStorage.getItem(KEY) ?? (system.matches ? "dark" : "light");
    const button = document.getElementById("theme");
    if (!button) return;
    const other = root.dataset.theme === "dark" ? "light" : "dark";
    button.textContent = other === "light" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${other} colours`);
  };

  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      localStorage.setItem(KEY, root.dataset.theme === "dark" ? "light" : "dark");
      apply();
    });
    apply();
  });
})();
