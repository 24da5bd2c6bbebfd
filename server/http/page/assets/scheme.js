// The colour scheme: the system's, unless one is chosen.

/** Prepare the button that chooses the other scheme. */
export function setUpScheme() {
  const button = document.getElementById("scheme");
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const scheme = () => root.dataset.scheme ?? (dark.matches ? "dark" : "light");
  const label = () => (button.textContent = scheme() === "dark" ? "Light" : "Dark");

  button.addEventListener("click", () => {
    const next = scheme() === "dark" ? "light" : "dark";
    // The system's own scheme needs no choice to be stored, and is then followed again.
    const chosen = next !== (dark.matches ? "dark" : "light");
    if (chosen) root.dataset.scheme = next;
    else delete root.dataset.scheme;
    try {
      if (chosen) localStorage.setItem("tessera.scheme", next);
      else localStorage.removeItem("tessera.scheme");
    } catch {
      // Storage is blocked: the choice lasts until the page is left.
    }
    label();
  });
  dark.addEventListener("change", label);
  label();
}
