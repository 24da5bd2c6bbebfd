// Copies text, on plain HTTP too, where browsers have no clipboard API.

/** Copy a text; returns whether the browser did. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    const focused = document.activeElement;
    area.value = text;
    area.className = "offscreen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

/** Copy a text, and say on the button what came of it. */
export async function copyWith(button, text) {
  const label = button.textContent;
  button.textContent = (await copyText(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = label), 1500);
}
