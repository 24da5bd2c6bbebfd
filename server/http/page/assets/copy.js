// Copies text, and says so on the button that was pressed.

/**
 * Copy a text when a button is pressed.
 * @param {HTMLButtonElement} button
 * @param {function(): string} text  The text as it is when the button is pressed.
 */
export function copyOnClick(button, text) {
  const [label, name] = [button.textContent, button.ariaLabel];
  let timer = 0;
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    // Screen readers then say the outcome, not the name.
    button.ariaLabel = null;
    clearTimeout(timer);
    timer = setTimeout(() => {
      button.textContent = label;
      button.ariaLabel = name;
    }, 1500);
  });
}

/** Copy a text to the clipboard; returns whether that was possible. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers offer the clipboard only on HTTPS and on the same machine.
    return copySelected(text);
  }
}

function copySelected(text) {
  const had = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.readOnly = true;
  area.className = "offscreen";
  document.body.append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    area.remove();
    had?.focus?.({ preventScroll: true });
  }
}
